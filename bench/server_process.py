"""A real server, `graftserve serve`, in a process of its own: started with given settings, watched, and told to stop.

    with ServerProcess.start(settings) as server:
        httpx.get(f"{server.url}/health")
        status = server.stop()
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, NoReturn

import psutil
from pydantic import SecretStr

from app.config import ENV_PREFIX, Settings

ROOT = Path(__file__).resolve().parent.parent
START_S = 600.0  # the first start converts a model and may measure prices
STOP_S = 45.0  # the server gives answers in flight 30 s
_READY = re.compile(r"ready in \S+ s at (http://\S+)")


class ServerFailed(RuntimeError):
    """The server did not start, or did not stop; the message says how it ended and what it wrote last."""


class ServerProcess:
    """A running server. It ends with the `with` block, whatever ends that, SIGTERM to us included.

    The signal is ours meanwhile, so only the main thread can start one.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command` and wait until it says that it is ready. Raises ServerFailed and OSError."""
        self._on_sigterm = signal.signal(signal.SIGTERM, _leave)  # else we would end without a chance to end it
        self._output: IO[bytes] = tempfile.TemporaryFile()  # what it writes to standard error
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._output,
            cwd=ROOT,
            env=dict(environment),
            process_group=0,  # Ctrl-C is for us; we end the server then
        )
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @classmethod
    def start(cls, settings: Settings) -> ServerProcess:
        """A server with these settings, at any free port of the settings' host.

        API keys are left out: it is ours alone, and those who ask it have none.
        """
        command = [sys.executable, "-m", "app", "serve", *as_options(settings.model_copy(update={"port": 0}))]
        secrets = {
            ENV_PREFIX + name.upper(): value.get_secret_value()
            for name, value in settings
            if isinstance(value, SecretStr)  # on the command line everybody on the machine could read it
        }
        inherited = {name: value for name, value in os.environ.items() if name != f"{ENV_PREFIX}API_KEYS"}
        return cls(command, {**inherited, **secrets})

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    def resident_bytes(self) -> int:
        """Resident memory of the server and its children. Raises ServerFailed if it is gone."""
        try:
            process = psutil.Process(self.pid)
            family = [process, *process.children(recursive=True)]
            return sum(member.memory_info().rss for member in family)
        except psutil.NoSuchProcess as error:
            raise ServerFailed(f"the server {self._how_it_ended()}") from error

    def written(self) -> str:
        """All that it wrote to standard error so far."""
        # Not seek and read: parent and child share the file's position, and the child would write where we stopped reading.
        return os.pread(self._output.fileno(), os.fstat(self._output.fileno()).st_size, 0).decode("utf-8", "replace")

    def stop(self) -> int | None:
        """Ask it to stop (SIGTERM); the status it ends with, or None if it does not end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End it at once. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        self._output.close()
        if signal.getsignal(signal.SIGTERM) is _leave:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _wait_until_ready(self) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if found := _READY.search(self.written()):
                return found.group(1)
            if self._process.poll() is not None:
                raise ServerFailed(f"the server {self._how_it_ended()}")
            time.sleep(0.05)
        raise ServerFailed(f"the server was not ready after {START_S:.0f} s: {self._last_line()}")

    def _how_it_ended(self) -> str:
        status = self._process.poll()
        how = f"was ended by {signal.Signals(-status).name}" if status is not None and status < 0 else f"ended with {status}"
        return f"{how}: {self._last_line()}"

    def _last_line(self) -> str:
        lines = [line.strip() for line in self.written().splitlines() if line.strip()]
        return lines[-1] if lines else "it wrote nothing"


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def as_options(settings: Settings) -> list[str]:
    """The command line that gives a command exactly these settings; secrets are left out."""
    options = []
    for name, value in settings.model_dump(mode="json").items():
        if isinstance(getattr(settings, name), SecretStr):
            continue
        if value is None:
            if Settings.model_fields[name].default is None:
                continue
            value = "none"  # turned off, where leaving it out would mean the default
        if isinstance(value, list):
            if not value or any(isinstance(item, SecretStr) for item in getattr(settings, name)):
                continue  # nothing to say, or nothing to show
            value = ",".join(value)
        text = value if isinstance(value, str) else json.dumps(value)
        options += [f"--{name.replace('_', '-')}", text]
    return options
