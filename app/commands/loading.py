"""Loading models for a command that answers in its own process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.commands.options import describe, fail
from app.commands.serve import say
from app.config import Settings

if TYPE_CHECKING:
    from app.serving import LoadedEngine


def local_target(target: str) -> str:
    """The folder or hub id that a target's name stands for. Ends the program if the embedded one cannot be had."""
    from app.target import with_local_target
    from models.embedded import EmbeddedTargetMissing, EmbeddedTargetUnusable

    try:
        return with_local_target(Settings(target=target), say).target
    except (EmbeddedTargetMissing, EmbeddedTargetUnusable) as error:
        fail(describe(error))


def load(settings: Settings) -> tuple[Settings, LoadedEngine]:
    """The settings with their target as a folder or hub id, and the engine, not started. Ends the program if it cannot."""
    from transformers.utils.logging import disable_progress_bar

    from app.build import build
    from app.target import with_local_target
    from models.embedded import EmbeddedTargetMissing, EmbeddedTargetUnusable

    disable_progress_bar()  # it would be drawn through our lines
    try:
        settings = with_local_target(settings, say)
        return settings, build(settings, say)
    except (ValueError, OSError, EmbeddedTargetMissing, EmbeddedTargetUnusable) as error:
        fail(describe(error))
