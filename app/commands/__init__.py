"""The commands of the command line, one module each. Heavy imports wait until a command runs."""

from collections.abc import Callable

from app.commands.config import config
from app.commands.generate import generate
from app.commands.prove import prove
from app.commands.serve import serve
from app.commands.version import version

COMMANDS: dict[str, Callable[..., None]] = {
    "serve": serve,
    "generate": generate,
    "prove": prove,
    "config": config,
    "version": version,
}
