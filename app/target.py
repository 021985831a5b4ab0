"""What the name of a target stands for."""

from __future__ import annotations

from collections.abc import Callable

from app.config import EMBEDDED, Settings
from app.drafting import resolve
from models.embedded import embedded_target


def with_local_target(settings: Settings, progress: Callable[[str], None]) -> Settings:
    """The same settings, with the folder of the embedded model instead of its name, and drafters decided.

    Takes half a minute on the first call of a machine. Raises what `models.embedded.embedded_target` raises.
    """
    drafters = {role: resolve(getattr(settings, role), role, settings.target) for role in ("small", "medium")}
    if settings.target == EMBEDDED:
        return settings.model_copy(update={"target": str(embedded_target(progress)), **drafters})
    return settings.model_copy(update=drafters)
