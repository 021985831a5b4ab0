"""Which rule may verify which tree: the pairs that are exact, and the reason why another one is not.

Greedy matching and the target-sampling walk are exact on every tree. A ratio rule needs children that were drawn from the
very row it divides by, in the way it assumes; on other trees it emits another law than the target's, silently. So wrong
pairs are errors, raised where a schedule is put together and again where a tree is verified.
"""

from __future__ import annotations

from tree.draws import TreeKind
from verify.base import Verifier

_NOT = {
    TreeKind.DETERMINISTIC: "their children were chosen and not drawn, and a ratio of p to q says nothing about those",
    TreeKind.IID: "their draws repeat, and the rule takes every token that it refused out of q",
    TreeKind.DELAYED: "their draws repeat, and the rule takes every token that it refused out of q",
    TreeKind.WITHOUT_REPLACEMENT: "their later siblings were not drawn from q alone, which the rule takes them for",
    TreeKind.ONE_SAMPLED: "only one child of a node was drawn there, the others were chosen",
}


def check_pair(verifier: Verifier, kind: TreeKind, *, is_chain: bool = True) -> None:
    """Raise ValueError, with the reason, if `verifier` would be wrong on trees of this kind.

    `is_chain`: whether the trees have no node with two children, if that is known.
    """
    if kind not in verifier.accepts:
        raise ValueError(f"the {verifier.name} rule cannot verify {kind.value} trees: {_NOT[kind]}")
    if verifier.needs_chain and not is_chain:
        raise ValueError(f"the {verifier.name} rule verifies chains only, and these trees branch")
