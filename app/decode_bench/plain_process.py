"""transformers' own `generate`, unmodified and in float32, in a process of its own.

Two threads that compute in one process slow each other down (see `models.threads`); two processes that wait for each other do
not. So the model that we are compared with lives in a child process, which computes only while it is asked and takes its turn
like every other method.

Parent and child exchange JSON objects, one per line: first what to load, answered by ``{"ready": true}``, then
``{"prompt": [ids], "max_tokens": n, "lookup": k or null, "assisted": bool}``, answered by the fields of `Written`. Instead of
an answer the child may say ``{"error": "..."}`` and end. It ends when its input does, so it does not outlive a parent that was
killed.

    with PlainProcess.start(target, "cpu", threads=2, num_tokens=49152, stop_tokens={2}) as plain:
        token_ids, seconds = plain.generate(prompt, max_tokens=128)[:2]
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
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from models.reference import Arrivals

ROOT = Path(__file__).resolve().parents[2]


class Written(NamedTuple):
    """One answer, and how it came."""

    token_ids: list[int]  # the end token included
    seconds: float  # in there, without the way through the pipes
    first_s: float  # of these, until the first block of tokens was there
    num_first: int  # tokens of that block
    num_blocks: int


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
    def start(
        cls,
        target: str,
        device: str,
        *,
        threads: int,
        num_tokens: int,
        stop_tokens: Iterable[int],
        assistant: str | None = None,
    ) -> PlainProcess:
        """A child with `target`, a folder or hub id, in float32 on `device`; token ids from `num_tokens` on are padding.

        `assistant` is loaded likewise, for assisted generation; it must have the target's vocabulary.
        """
        load = {
            "target": _place(target),
            "assistant": assistant and _place(assistant),
            "device": device,
            "threads": threads,
            "num_tokens": num_tokens,
            "stop_tokens": sorted(stop_tokens),
        }
        return cls([sys.executable, "-m", "app.decode_bench.plain_process"], load)

    @property
    def pid(self) -> int:
        """Of the child process."""
        return self._process.pid

    def generate(
        self, prompt: Sequence[int], max_tokens: int, *, lookup: int | None = None, assisted: bool = False
    ) -> Written:
        """The greedy continuation; with prompt lookup of `lookup` tokens, or by the assistant. Raises PlainProcessFailed."""
        asked = {"prompt": list(prompt), "max_tokens": max_tokens, "lookup": lookup, "assisted": assisted}
        return Written(**self._ask(asked))

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


def _place(source: str) -> str:
    """As the child will find it from its own folder."""
    return str(Path(source).resolve()) if Path(source).exists() else source


class Plain(Protocol):
    """What the child asks; see :class:`models.reference.PlainModel`."""

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        stop_tokens: frozenset[int],
        lookup: int | None,
        assistant: Any,
        streamer: Arrivals,
    ) -> list[int]: ...


def serve(questions: Iterable[str], answers: IO[str]) -> None:
    """The child's side: load what the first line says, answer each of the others."""

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    lines = iter(questions)
    try:
        from models.reference import Arrivals

        load = json.loads(next(lines))
        (model, assistant), stop_tokens = _load(load), frozenset(load["stop_tokens"])
        say({"ready": True})
        for line in lines:
            asked, arrivals = json.loads(line), Arrivals()
            start = time.perf_counter()
            ids = model.generate(
                asked["prompt"],
                max_tokens=asked["max_tokens"],
                stop_tokens=stop_tokens,
                lookup=asked["lookup"],
                assistant=assistant if asked["assisted"] else None,
                streamer=arrivals,
            )
            seconds = time.perf_counter() - start
            first, num_first = arrivals.blocks[0]
            say(Written(ids, seconds, first - start, num_first, len(arrivals.blocks))._asdict())
    except BrokenPipeError:  # the parent is gone
        raise
    except Exception as error:  # whatever it is, the parent should hear of it
        say({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        raise SystemExit(1) from error


def _load(load: dict[str, Any]) -> tuple[Plain, Plain | None]:
    """The model and its assistant. Raises ValueError for one of another vocabulary, besides what loading raises."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from models.loading import choose_placement
    from models.reference import PlainModel

    disable_progress_bar()
    torch.set_num_threads(load["threads"])
    placement = choose_placement(load["device"], "fp32")
    model = PlainModel.load(load["target"], placement, num_tokens=load["num_tokens"])
    if load["assistant"] is None:
        return model, None
    assistant = PlainModel.load(load["assistant"], placement, num_tokens=load["num_tokens"])
    if assistant.vocab_size != model.vocab_size:
        raise ValueError(
            f"the assistant {load['assistant']} has {assistant.vocab_size} output rows, the target {model.vocab_size}; "
            "it needs the target's tokenizer"
        )
    return model, assistant


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
