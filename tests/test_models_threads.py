"""Nothing before the serving thread may open a team of helper threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TASKS = Path("/proc/self/task")

PROGRAM = """
import os, sys, torch
from models.packed import HalfLinear, fp16_packing_available, fp32_packing_available
from models.threads import no_helpers
torch.set_num_threads(2)
def tasks(): return len(os.listdir("/proc/self/task"))
def work(): return torch.randn(2000, 2000).exp().sum()
before = tasks()
with no_helpers():
    work()
fp16_packing_available(), fp32_packing_available()
inside, restored = tasks(), torch.get_num_threads()
work()
print(before, inside, restored, tasks())
"""


@pytest.mark.skipif(not TASKS.exists(), reason="counts threads through /proc")
def test_work_without_helpers_opens_no_team() -> None:
    """A second team costs the engine's thread half its speed; the control shows that the same work opens one otherwise."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    before, inside, restored, control = map(int, done.stdout.split())
    assert inside == before, done.stderr
    assert restored == 2
    assert control > before
