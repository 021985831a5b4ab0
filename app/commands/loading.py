"""Loading models for a command that answers in its own process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.commands.options import describe, fail
from app.commands.serve import say
from app.config import Settings

if TYPE_CHECKING:
    from app.serving import LoadedEngine


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
