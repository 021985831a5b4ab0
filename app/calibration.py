"""What forwards cost on this machine: measured once per model, device, weights and threads, kept in the cache folder.

    profile = profile_for(loaded, settings, print)      # before the engine starts, or while it is idle
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from app import drafting
from app.config import Settings
from app.drafting import SHIPPED
from app.forward_costs import Effort, Progress, measure_models
from app.machine import machine
from app.serving import LoadedEngine
from engine.engine import Engine
from models.embedded import cache_root
from models.loading import Placement, choose_placement
from scheduler.auto_budget import TARGET
from scheduler.cost import VERSION, CostProfile, Origin

_FORMAT = 3  # raise when something else is measured
_MOST_MISFIT = 0.25  # of a fit to quiet measurements: they came to 0.01 to 0.14, beside other programs to 0.4 and more

T = TypeVar("T")


def default_effort(placement: Placement) -> Effort:
    """On an accelerator forwards are quick and trees large."""
    return Effort() if placement.device.type == "cpu" else Effort(rows=(1, 2, 4, 8, 16, 32, 64, 128), rounds=10)


def profile_for(
    loaded: LoadedEngine, settings: Settings, progress: Progress, *, effort: Effort | None = None, fresh: bool = False
) -> CostProfile:
    """The profile of the loaded models: from the cache, or measured now (half a minute on a CPU) and cached.

    The engine must not be at work. `fresh` measures in any case. Prices that contradict each other were measured while other
    programs took the processor: they are used, and put right as the server works (`scheduler.drift`), but not kept. A cache
    that cannot be written costs a line of progress only.
    """
    engine = loaded.engine
    assert isinstance(engine, Engine), "models can be measured in this very process only"
    placement = choose_placement(settings.device, settings.weights)
    effort = effort or default_effort(placement)
    file = cache_file(engine, settings, placement, effort)
    if not fresh:
        try:
            return CostProfile.from_json(file.read_text("utf-8"))
        except FileNotFoundError:
            pass
        except (ValueError, OSError) as error:
            progress(f"costs of forwards: {file} is damaged ({error}), measuring again")
    progress(f"measuring what forwards cost on this machine, once, for about {effort.seconds:.0f} s")
    target, drafters = engine.target, list(engine.drafters.values())
    models = in_own_thread(
        lambda: measure_models(target, drafters, engine.max_model_len, engine.max_num_seqs, effort, progress),
        settings.threads,
    )
    profile = CostProfile(models, _origin(engine, settings, placement))
    misfit = max((model.misfit for model in models.values()), default=0.0)
    if misfit > _MOST_MISFIT:
        progress(
            f"costs of forwards: measurements contradict each other by {misfit:.0%}, since the machine is busy; "
            "they are used now, but measured again at the next start"
        )
        return profile
    try:
        _write(file, profile.to_json())
    except OSError as error:
        progress(f"costs of forwards cannot be kept in {file}: {error}")
    else:
        progress(f"costs of forwards: measured, kept in {file}")
    return profile


def read_profile(file: Path) -> CostProfile:
    """The profile in `file`. ValueError, naming the file, for one that cannot be read or has no target."""
    try:
        profile = CostProfile.from_json(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"costs: {file}: {error}") from error
    if TARGET not in profile.models:
        raise ValueError(f"costs: {file} has no prices of a model {TARGET!r}")
    return profile


def cache_file(engine: Engine, settings: Settings, placement: Placement, effort: Effort) -> Path:
    """Where the profile of these models on this machine, in these weights and threads, is kept."""
    about = machine(placement)
    plans = effort.plans(engine.target, list(engine.drafters.values()), engine.max_model_len, engine.max_num_seqs)
    identity = {
        "format": (_FORMAT, VERSION),
        **{key: about[key] for key in ("graftserve", "versions", "device", "weights", "processor", "cpus")},
        "threads": settings.threads or about["threads"],
        "target": (engine.model_id, engine.target.model.config.to_json_string()),  # type: ignore[operator, union-attr]
        "measured": [(plan.rows, plan.sequences, plan.context) for plan in plans],
        **{role: _fingerprint(getattr(settings, role), role, settings.target) for role in ("small", "medium")},
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return cache_root() / "costs" / f"{key}.json"


def in_own_thread(work: Callable[[], T], threads: int | None = None) -> T:
    """Run `work` on a thread of its own and return what it returns, or raise what it raises.

    A team of OpenMP helpers lives as long as its thread (see `models.threads`): a team of the caller would slow down the
    engine's for good. Not inside `no_helpers`, which would measure one processor.
    """
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            if threads is not None:
                torch.set_num_threads(threads)
            outcome.append(work())
        except BaseException as error:  # handed on below
            failure.append(error)

    thread = threading.Thread(target=run, name="calibration", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def _origin(engine: Engine, settings: Settings, placement: Placement) -> Origin:
    about = machine(placement)
    hardware = about["processor"] if placement.device.type == "cpu" else about["device"]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Origin(hardware, engine.model_id, placement.weights, str(settings.threads or about["threads"]), now)


def _fingerprint(name: str | None, role: str, target: str) -> Any:
    """What the price of the drafter behind a setting depends on: its name, and for a folder its files."""
    resolved = drafting.resolve(name, role, target)
    if resolved is None:
        return None
    folder = SHIPPED / role if resolved == drafting.PRETRAINED else Path(resolved)
    if not folder.is_dir():
        return resolved
    files = ((path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file())
    return [str(folder.resolve()), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)]


def _write(file: Path, text: str) -> None:
    """All or nothing: another process may read it meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, prefix=f"{file.name}.part-", delete=False) as part:
        part.write(text)
    try:
        os.replace(part.name, file)
    except OSError:
        Path(part.name).unlink(missing_ok=True)
        raise
