"""Growth rules for one drafter at a time; each file is one rule and meets the engine through :mod:`tree.growth`."""

from __future__ import annotations

from tree.growth import Policy
from tree.policies.adaptive_shape import AdaptiveShape
from tree.policies.chain import Chain
from tree.policies.eagle import Eagle
from tree.policies.fixed import Fixed, Template
from tree.policies.opt_tree import OptTree
from tree.policies.sequoia import Sequoia
from tree.policies.talon import Talon

POLICIES: dict[str, Policy] = {
    "chain": Chain(),
    "fixed": Fixed(),
    "template": Template(),
    "eagle": Eagle(),
    "talon": Talon(),
    "opt_tree": OptTree(),
    "sequoia": Sequoia(),
    "adaptive_shape": AdaptiveShape(),
}
"""Every deterministic policy with its default parameters, by name; ``with_budget`` and ``dataclasses.replace`` adapt it."""
