"""The decision rules once more, slow and obvious, with every random decision handed out.

A rule here gets a *chooser*: asked with the depth and the weights of the alternatives, it returns the index of one. A
chooser that races exponentials gives the same verdicts as the production rules, element by element. :func:`outcomes`
instead tries every decision and yields every outcome with its probability, so that tests compare laws exactly and never
by sampling. Ratio rules get their decisions in three kinds (:class:`Decisions`), made of a chooser or replayed.

Rows are lists here, indexed by node and not by row number, and nothing is checked: tests also run these rules where they
are wrong, to see that it is noticed.
"""

from verify.reference.bottom_up import block_reference, traversal_reference
from verify.reference.decisions import Chooser, Chosen, Decisions, Replayed, choose_by, outcomes, sum_in_order
from verify.reference.top_down import (
    Solver,
    distinct,
    khisti,
    naive,
    recursive,
    recursive_shuffled,
    smallest_rho,
    spectr,
    top_down_reference,
)
from verify.reference.walk import greedy_reference, walk_reference

__all__ = [
    "Chooser",
    "Chosen",
    "Decisions",
    "Replayed",
    "Solver",
    "block_reference",
    "choose_by",
    "distinct",
    "greedy_reference",
    "khisti",
    "naive",
    "outcomes",
    "recursive",
    "recursive_shuffled",
    "smallest_rho",
    "spectr",
    "sum_in_order",
    "top_down_reference",
    "traversal_reference",
    "walk_reference",
]
