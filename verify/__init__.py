"""Decision rules: target rows in, accepted path and one extra token out.

Three tables by name. :data:`VERIFIERS` are right on every tree. :data:`RATIO_VERIFIERS` accept more of a sampled tree and
are exact on the kinds of trees that they accept, see :func:`check_pair`. :data:`LOSSY_VERIFIERS` change the text and are
only for those who ask for them by name. :data:`EVERY_VERIFIER` has them all.
"""

from verify.base import Noise, Verdict, Verifier
from verify.block import Block
from verify.fly import Fly
from verify.greedy import Greedy
from verify.khisti import Khisti
from verify.margin import Margin
from verify.naive import Naive
from verify.pairs import check_pair
from verify.specinfer import DistinctRejection, SpecInfer
from verify.spectr import SpecTr
from verify.traversal import Traversal
from verify.walk import TargetWalk

VERIFIERS: dict[str, Verifier] = {rule.name: rule for rule in (Greedy(), TargetWalk())}

RATIO_VERIFIERS: dict[str, Verifier] = {
    rule.name: rule for rule in (Naive(), SpecInfer(), DistinctRejection(), SpecTr(), Khisti(), Block(), Traversal())
}

LOSSY_VERIFIERS: dict[str, Verifier] = {rule.name: rule for rule in (Margin(), Fly())}

EVERY_VERIFIER: dict[str, Verifier] = {**VERIFIERS, **RATIO_VERIFIERS, **LOSSY_VERIFIERS}

__all__ = [
    "EVERY_VERIFIER",
    "LOSSY_VERIFIERS",
    "RATIO_VERIFIERS",
    "VERIFIERS",
    "Noise",
    "Verdict",
    "Verifier",
    "check_pair",
]
