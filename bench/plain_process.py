"""transformers' own `generate`, unmodified and in float32, in a process of its own.

Two threads that compute in one process slow each other down (see `models.threads`); two processes that wait for each other do
not. So the model that we are compared with lives in a child process, which computes only while it is asked and takes its turn
like every other method.

Parent and child exchange JSON objects, one per line: first what to load, answered by ``{"ready": true}``, then
``{"prompt": [ids], "max_tokens": n}``, answered by ``{"token_ids": [ids], "seconds": s}``. Instead of an answer the child may
say ``{"error": "..."}`` and end. It ends when its input does, so it does not outlive a parent that was killed.

    with PlainProcess.start(target, "cpu", threads=2, num_tokens=49152, stop_tokens={2}) as plain:
        token_ids, seconds = plain.generate(prompt, max_tokens=128)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

ROOT = Path(__file__).resolve().parent.parent


class PlainProcessFailed(RuntimeError):
    """The child process gave up; the message says why, in one line."""


class PlainProcess:
    """The parent's side. The child ends with the `with` block, whatever ends that."""

    def __init__(self, command: Sequence[str], load: dict[str, Any]) -> None:
        """Start `command` and wait until it has loaded what `load` says. Raises PlainProcessFailed and OSError."""
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # what the child writes to standard error
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            cwd=ROOT,
            encoding="utf-8",
            process_group=0,  # Ctrl-C is for the parent, which ends the child then
        )
        try:
            self._ask(load)
        except BaseException:
            self.close()
            raise

    @classmethod
    def start(cls, target: str, device: str, *, threads: int, num_tokens: int, stop_tokens: Iterable[int]) -> PlainProcess:
        """A child with `target`, a folder or hub id, in float32 on `device`; token ids from `num_tokens` on are padding."""
        source = str(Path(target).resolve()) if Path(target).exists() else target
        load = {
            "target": source,
            "device": device,
            "threads": threads,
            "num_tokens": num_tokens,
            "stop_tokens": sorted(stop_tokens),
        }
        return cls([sys.executable, "-m", "bench.plain_process"], load)

    @property
    def pid(self) -> int:
        """Of the child process."""
        return self._process.pid

    def generate(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
        """The greedy continuation, the end token included, and the seconds it took in there. Raises PlainProcessFailed."""
        answer = self._ask({"prompt": list(prompt), "max_tokens": max_tokens})
        return answer["token_ids"], answer["seconds"]

    def close(self) -> None:
        """End the child at once. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._complaints):
            assert stream is not None, "both are pipes"
            try:
                stream.close()
            except BrokenPipeError:  # something it was asked had not gone out yet
                pass

    def __enter__(self) -> PlainProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            raise PlainProcessFailed(f"the process with transformers' generate {self._how_it_ended()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PlainProcessFailed(f"transformers' generate failed: {answer['error']}")
        return answer

    def _how_it_ended(self) -> str:
        """The status of a child that stopped answering, and the last line it wrote."""
        try:
            status = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "closed its output without an answer"
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self._complaints.seek(0)
        lines = self._complaints.read().decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}: {last}" if last else how


class Plain(Protocol):
    """What the child asks; see :class:`models.reference.PlainModel`."""

    def generate(self, prompt: Sequence[int], *, max_tokens: int, stop_tokens: frozenset[int]) -> list[int]: ...


def serve(questions: Iterable[str], answers: IO[str]) -> None:
    """The child's side: load what the first line says, answer each of the others."""

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    lines = iter(questions)
    try:
        load = json.loads(next(lines))
        model, stop_tokens = _load(load), frozenset(load["stop_tokens"])
        say({"ready": True})
        for line in lines:
            asked = json.loads(line)
            start = time.perf_counter()
            ids = model.generate(asked["prompt"], max_tokens=asked["max_tokens"], stop_tokens=stop_tokens)
            say({"token_ids": ids, "seconds": time.perf_counter() - start})
    except BrokenPipeError:  # the parent is gone
        raise
    except Exception as error:  # whatever it is, the parent should hear of it
        say({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        raise SystemExit(1) from error


def _load(load: dict[str, Any]) -> Plain:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from models.loading import choose_placement
    from models.reference import PlainModel

    disable_progress_bar()
    torch.set_num_threads(load["threads"])
    return PlainModel.load(load["target"], choose_placement(load["device"], "fp32"), num_tokens=load["num_tokens"])


def main() -> None:
    """Serve on standard input and output."""
    # Answers have the output to themselves: whatever else is printed goes to standard error.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        try:
            serve(sys.stdin, answers)
        except BrokenPipeError:
            os._exit(1)  # leaving in order would flush into the broken pipe


if __name__ == "__main__":
    main()
