"""What a result depends on besides our code: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from app.version import version
from models.loading import Placement


def machine(placement: Placement) -> dict[str, Any]:
    """A JSON object; ``commit`` is None outside a git checkout and ends in ``+`` if files were changed since."""
    device = placement.device
    return {
        "graftserve": version(),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "weights": placement.weights,
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    home = Path(__file__).resolve().parent.parent
    if not (home / ".git").exists():  # an installed wheel may lie inside somebody else's checkout
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=home, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
