"""Decision rules: target rows in, accepted path and one extra token out."""

from verify.base import Noise, Verdict, Verifier
from verify.greedy import Greedy
from verify.walk import TargetWalk

VERIFIERS: dict[str, Verifier] = {rule.name: rule for rule in (Greedy(), TargetWalk())}

__all__ = ["VERIFIERS", "Noise", "Verdict", "Verifier"]
