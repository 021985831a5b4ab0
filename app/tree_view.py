"""A draft tree drawn for people: who proposed what, how likely they thought it, and what the target took."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.text import Text
from rich.tree import Tree

from engine.sequence import TreeRecord

TARGET = "target"
_PALETTE = ("cyan", "magenta", "yellow", "green", "blue")


def colors(drafter_names: Sequence[str]) -> dict[str, str]:
    """A color for every drafter, by name, the same for the same list; the target's own tokens stay plain."""
    return {TARGET: "default"} | {name: _PALETTE[i % len(_PALETTE)] for i, name in enumerate(drafter_names)}


def draw(record: TreeRecord, decode: Callable[[Sequence[int]], str], color: Mapping[str, str]) -> Tree:
    """The verified nodes of a tree. The accepted path is bold and ends in the token that the target added.

    A node shows its token, the probability that the scorer gave it after its parent, its creator, and the scorer if that
    is another one. Likelier siblings come first.
    """
    tree, verified, accepted = record.tree, set(record.nodes), {0, *record.path}
    last = record.path[-1] if record.path else 0

    def label(node: int) -> Text:
        bold = "bold " if node in accepted else ""
        text = Text(repr(decode([tree.token[node]])), style=f"{bold}{color.get(tree.creator[node], 'default')}")
        text.append(f"  {math.exp(tree.lp[node]):.2f} {tree.creator[node]}", style="default not bold")
        if tree.scorer[node] != tree.creator[node]:
            text.append(f", scored by {tree.scorer[node]}", style="default not bold")
        return text

    def hang(branch: Tree, node: int) -> None:
        children = [child for child in tree.children[node].values() if child in verified]
        if node == last:
            branch.add(Text(repr(decode([record.extra])), style="bold").append("  ← the target's own token", "not bold"))
        for child in sorted(children, key=lambda child: (-tree.lp[child], child)):
            hang(branch.add(label(child)), child)

    root = Text(repr(decode([tree.token[0]])), style="bold")
    root.append(
        f"  {len(record.nodes) - 1} of {len(tree) - 1} drafted nodes verified, {len(record.path)} accepted", "not bold"
    )
    drawing = Tree(root)
    hang(drawing, 0)  # recursion is as deep as the tree, which is far less than Python allows
    return drawing
