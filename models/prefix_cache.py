"""Rows of texts that are over, kept for texts that begin alike: a radix tree over the rows of one pool.

A node is a run of keys (token ids) with one row per key; the way from the top spells a beginning of some text. The tree owns
its rows as a sequence owns its own, so sharing a beginning is one owner more per row: nothing is copied or moved, and a shared
row is never written, since new tokens get rows of their own. The cache is the pool's reserve: it gives rows up only when the
pool has no free ones left, least recently used first, from the ends of beginnings inwards, and never rows that a text in
flight stands on.

What a text in flight has of the cache is its :class:`Lease`: a node and the length spelled down to it. Each node counts the
leases at or below it. Traps:

* A text may come to have rows of its own for keys that another text has brought in the meantime. It then changes over to the
  cache's rows (:meth:`PrefixCache.share`), so below a lease the text's rows *are* the tree's, and no row of the tree is in
  use without a lease.
* A row whose numbers are NaN or infinite would break every later text, so rows are looked at before they come in.
* Nodes nobody uses are kept in the order of last use, a parent always behind its children: a lease that ends appends its nodes
  from the bottom up, and a node cannot be used without its parent. So the first in that order is a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.kv_cache import RowList, RowPool


@dataclass(slots=True, eq=False)
class Node:
    """A run of keys below `parent`, with the row of each. The top has none and no parent."""

    keys: list[Any]
    rows: list[int]
    parent: Node | None
    children: dict[Hashable, Node] = field(default_factory=dict)  # by their first key
    num_users: int = 0  # leases here or below

    def path(self) -> Iterator[Node]:
        """This node and those above it, the top left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class Lease:
    """What one text in flight has of the cache: its first `length` rows are those on the way down to `node`."""

    node: Node
    length: int = 0


class PrefixCache:
    """Cached beginnings over one pool, whose reserve it becomes. Keys are lists of anything hashable, token ids as a rule."""

    def __init__(self, pool: RowPool) -> None:
        assert pool.reserve is None, "the pool has a reserve already"
        self._pool = pool
        self._top = Node([], [], None)
        self._unused: OrderedDict[Node, None] = OrderedDict()  # nodes without users, least recently used first
        self._num_rows = self._num_unused = 0
        pool.reserve = self

    @classmethod
    def over(cls, pool: RowPool) -> PrefixCache:
        """The cache that the pool has, or a new one."""
        return pool.reserve if isinstance(pool.reserve, cls) else cls(pool)

    @property
    def num_rows(self) -> int:
        """Rows in the tree."""
        return self._num_rows

    @property
    def num_unused(self) -> int:
        """Rows in the tree that no text in flight stands on."""
        return self._num_unused

    def begin(self) -> Lease:
        """A lease of nothing yet."""
        return Lease(self._top)

    def match(self, keys: list[Any], limit: int) -> tuple[int, int]:
        """How many of the first `limit` keys the tree spells, and how many rows of these nobody uses. Changes nothing."""
        length = num_unused = 0
        for node, count in self._walk(keys, 0, limit, self._top):
            length += count
            num_unused += count if node.num_users == 0 else 0
        return length, num_unused

    def take(self, lease: Lease, keys: list[Any], limit: int) -> list[int]:
        """Extend `lease`, which stays at the first keys it has, as far as the tree spells the first `limit` keys.

        Returns the rows, which the caller owns from now on like any others.
        """
        rows: list[int] = []
        for node, count in self._walk(keys, lease.length, limit, lease.node):
            self._lock(lease, self._split(node, count))
            rows += lease.node.rows
        self._pool.share(rows)
        return rows

    def share(self, lease: Lease, keys: list[Any], rows: RowList, length: int) -> None:
        """Let others have the rows of the first `length` keys too, and extend `lease` to them, as far as they are sound.

        Where the tree has these keys by now, its rows take the place of the text's own in `rows`, which go back.
        """
        known = self.take(lease, keys, length)
        if known:
            self._pool.release(rows.replace(lease.length - len(known), known))
        new = rows.view()[lease.length : length].tolist()
        count = self._pool.num_sound(new)
        if count == 0:
            return
        added = keys[lease.length : lease.length + count]
        self._pool.share(new[:count])
        self._num_rows += count
        node = lease.node
        if node.parent is not None and node.num_users == 1 and not node.children:
            # Nobody else stands here: the run just gets longer, as when a long prompt comes in piece by piece.
            node.keys += added
            node.rows += new[:count]
            lease.length += count
            return
        child = Node(added, new[:count], node)
        node.children[added[0]] = child
        self._num_unused += count  # until the lease takes it, in the next line
        self._unused[child] = None
        self._lock(lease, child)

    def end(self, lease: Lease) -> None:
        """The text is over. Safe to call twice."""
        for node in lease.node.path():
            node.num_users -= 1
            if node.num_users == 0:
                self._unused[node] = None
                self._num_unused += len(node.rows)
        lease.node, lease.length = self._top, 0

    def evict(self, count: int) -> None:
        """Give `count` rows back to the pool, the least recently used first; there must be as many that nobody uses."""
        assert count <= self._num_unused, f"{count} rows wanted, {self._num_unused} are unused"
        while count > 0:
            node = next(iter(self._unused))
            assert not node.children and node.parent is not None, "children are used last before their parents"
            num_kept = max(len(node.rows) - count, 0)
            dropped = node.rows[num_kept:]
            if num_kept == 0:
                del self._unused[node]
                del node.parent.children[node.keys[0]]
            del node.keys[num_kept:], node.rows[num_kept:]
            self._num_rows -= len(dropped)
            self._num_unused -= len(dropped)
            count -= len(dropped)
            self._pool.release(dropped)

    def clear(self) -> None:
        """Give every row back that nobody uses."""
        self.evict(self._num_unused)

    def rows(self) -> list[int]:
        """Every row of the tree."""
        found, nodes = [], [self._top]
        while nodes:
            node = nodes.pop()
            found += node.rows
            nodes += node.children.values()
        return found

    def check(self, leases: Sequence[Lease]) -> None:
        """Assert every invariant; `leases` are all that have not ended."""
        users: dict[Node, int] = {}
        for lease in leases:
            assert sum(len(node.keys) for node in lease.node.path()) == lease.length, "a lease has lost its length"
            for node in lease.node.path():
                users[node] = users.get(node, 0) + 1
        place = {node: index for index, node in enumerate(self._unused)}
        unused, nodes = set(), list(self._top.children.values())
        while nodes:
            node = nodes.pop()
            assert len(node.keys) == len(node.rows) > 0, "a run has one row per key"
            assert node.parent is not None and node.parent.children[node.keys[0]] is node, "a node has lost its parent"
            assert node.num_users == users.pop(node, 0), "users miscounted"
            if node.num_users == 0:
                unused.add(node)
                assert all(place[child] < place[node] for child in node.children.values()), "a parent before its child"
            nodes += node.children.values()
        assert not users, "a lease of a node that is not in the tree"
        assert unused == set(self._unused), "the order of use does not hold the unused nodes"
        assert self._num_unused == sum(len(node.rows) for node in unused), "unused rows miscounted"
        rows = self.rows()
        assert len(set(rows)) == len(rows) == self._num_rows, "a row is in the tree twice, or rows are miscounted"

    def _walk(self, keys: list[Any], start: int, limit: int, node: Node) -> Iterator[tuple[Node, int]]:
        """Nodes below `node` that go on with ``keys[start:limit]``, and how many keys of each do; the last maybe not all."""
        while start < limit and (child := node.children.get(keys[start])) is not None:
            count = common_length(child.keys, keys, start, limit)
            is_whole = count == len(child.keys)
            yield child, count
            if not is_whole:
                return
            start, node = start + count, child

    def _split(self, node: Node, count: int) -> Node:
        """The node that ends after the first `count` keys of `node`; what is behind them stays `node`, leases included."""
        if count == len(node.keys):
            return node
        assert node.parent is not None and count > 0
        upper = Node(node.keys[:count], node.rows[:count], node.parent, {node.keys[count]: node}, node.num_users)
        node.parent.children[upper.keys[0]] = upper
        node.keys, node.rows, node.parent = node.keys[count:], node.rows[count:], upper
        if upper.num_users == 0:
            self._unused[upper] = None  # behind its child; whoever splits takes it at once
        return upper

    def _lock(self, lease: Lease, node: Node) -> None:
        """Move a lease from a node to a child of it."""
        assert node.parent is lease.node, "a lease goes down one node at a time"
        if node.num_users == 0:
            del self._unused[node]
            self._num_unused -= len(node.rows)
        node.num_users += 1
        lease.node, lease.length = node, lease.length + len(node.rows)


def common_length(run: list[Any], keys: list[Any], start: int, limit: int) -> int:
    """How many keys of `run` are those of ``keys[start:limit]``. Compares slices: texts have thousands of keys."""
    low, high = 0, min(len(run), limit - start) + 1  # that many agree; fewer than that many do
    if run[: high - 1] == keys[start : start + high - 1]:
        return high - 1
    while high - low > 1:
        middle = (low + high) // 2
        if run[low:middle] == keys[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
