"""``graftserve serve``: load the models and answer HTTP until told to stop.

The port is taken and /health answers before the models are loaded. Exit status: 0 after a requested stop, 2 for
what the user can mend (settings, port, model), 1 for our own failures.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from app.commands.options import fail, takes_settings
from app.config import Settings

if TYPE_CHECKING:
    from types import FrameType

    import uvicorn
    from fastapi import FastAPI

    from app.serving import LoadedEngine

_GOODBYE_S = 5  # how long their last bytes may take after that


@takes_settings
def serve(settings: Settings) -> None:
    """Serve the target model over HTTP, by default the embedded one on 127.0.0.1:8000."""
    started_s = time.monotonic()
    from app.access import exposure_problem
    from app.logs import set_up_logs

    set_up_logs(settings.log_level, settings.log_format)
    tell = _say_in_log if settings.log_format == "json" else say
    problem = exposure_problem(settings)
    if problem is not None:
        fail(problem)
    tell(f"starting (target: {settings.target})")

    import uvicorn

    from app.main import create_app

    listener = _listen(settings.host, settings.port)
    failures: list[BaseException] = []

    def load() -> LoadedEngine:
        from transformers.utils.logging import disable_progress_bar

        from app.build import build
        from app.target import with_local_target

        disable_progress_bar()  # it would be drawn through our lines
        return build(with_local_target(settings, tell), tell)

    def give_up(failure: BaseException) -> None:
        failures.append(failure)
        server.should_exit = True

    app = create_app(load, settings, on_failure=give_up)

    class DrainingServer(uvicorn.Server):
        """The first signal lets answers in flight finish while new ones are refused; the second ends at once."""

        is_draining = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.is_draining:
                self.force_exit = True
                super().handle_exit(sig, frame)
            else:
                self.is_draining = True
                threading.Thread(target=self._drain, args=(sig, frame), daemon=True).start()

        def _drain(self, sig: int, frame: FrameType | None) -> None:
            if app.state.serving is not None:
                app.state.serving.engine.stop(drain_s=settings.drain_s)
            super().handle_exit(sig, frame)

    server = DrainingServer(
        uvicorn.Config(
            app,
            log_config=None,  # its records go where ours go
            access_log=False,  # ours says more
            timeout_graceful_shutdown=_GOODBYE_S,
        )
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end like Ctrl-C, with status 0
    try:
        asyncio.run(_run(server, app, listener, started_s, tell))
    except KeyboardInterrupt:  # uvicorn repeats the signal when it has shut down
        tell("stopped")
        if app.state.serving is None or server.force_exit:
            # A thread still computes and cannot be stopped; torch aborts the process when the interpreter ends under it.
            os._exit(0)
    if failures:
        _exit_for(failures[0])


def say(line: str) -> None:
    """One line of progress for the person at the terminal; standard output stays free."""
    typer.echo(f"graftserve: {line}", err=True)


def _say_in_log(line: str) -> None:
    """The same for a machine that reads the log."""
    logging.getLogger("graftserve").info("%s", line)


async def _run(
    server: uvicorn.Server, app: FastAPI, listener: socket.socket, started_s: float, tell: Callable[[str], None]
) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def announce() -> None:
        while app.state.serving is None:
            await asyncio.sleep(0.02)
        tell(f"ready in {time.monotonic() - started_s:.1f} s at {url} (model: {app.state.serving.model})")

    watch = asyncio.create_task(announce())
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()


def _listen(host: str, port: int) -> socket.socket:
    """Take the port now: a port in use should be known before the models are loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]
        fail(f"cannot listen on {host} port {port}: {reason}; choose another with --host and --port")
    # asyncio sets this only on sockets it made itself. Without it every small write waits for an acknowledgment (40 ms).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _exit_for(failure: BaseException) -> None:
    """End with the status of a failed start. Its message is in the log already; our own bugs show a traceback too."""
    from models.embedded import EmbeddedTargetMissing, EmbeddedTargetUnusable

    if isinstance(failure, (ValueError, OSError, EmbeddedTargetMissing, EmbeddedTargetUnusable)):
        raise typer.Exit(2)
    traceback.print_exception(failure)
    raise typer.Exit(1)
