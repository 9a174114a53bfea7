"""Difference constraints theta[b] - theta[a] <= w as a graph, and shortest paths in it. Integers throughout.

The shortest path from a to b is the tightest upper bound on theta[b] - theta[a] that all constraints together imply;
a cycle of negative weight says that they contradict each other. The graphs are sparse (a rank talks to its neighbours),
so nodes are eliminated in an order that adds few edges, and the neighbours of an eliminated node keep what went through
it. A sweep back makes the bound of every such edge exact, and two sweeps give the distances from anywhere (Planken, de
Weerdt, van der Krogt: P3C, ICAPS 2008). Nodes that are no neighbours of each other go in one step, so that a ring of
1,000 ranks takes some twenty steps.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traceana.arrays import distinct
from traceana.intervals import IntArray

__all__ = [
    "UNREACHED", "BoolArray", "Edges", "Pattern", "close", "components", "distances", "make_pattern", "matrix",
    "negative_cycles", "potentials", "rough", "sane", "tight_path", "tightest",
]  # fmt: skip

BoolArray = NDArray[np.bool_]
# Sums of two stay inside int64, and `sane` weights (three days) times a thousand hops stay far below.
UNREACHED = 1 << 61
LIMIT = 1 << 48


@dataclass(frozen=True, slots=True)
class Edges:
    """One constraint per ordered pair of nodes, sorted by b: theta[b] - theta[a] <= w. `fact` says which fact it is."""

    nodes: int
    a: IntArray
    b: IntArray
    w: IntArray
    fact: IntArray

    @property
    def reversed(self) -> Edges:
        """The same with every edge turned round."""
        return tightest(self.nodes, self.b, self.a, self.w, self.fact)


@dataclass(frozen=True, slots=True)
class Pattern:
    """An order of elimination. Each step is some nodes of equal degree d, none of them neighbours: `(nodes [m], near
    [m, d])`, where `near` are their neighbours among the nodes of later steps, all neighbours of each other then.
    `a`, `b`: every ordered pair of neighbours, those that elimination adds included."""

    steps: tuple[tuple[IntArray, IntArray], ...]
    a: IntArray
    b: IntArray


def tightest(nodes: int, a: IntArray, b: IntArray, w: IntArray, fact: IntArray) -> Edges:
    """The least `w` of every pair (a, b); ties go to the lower `fact`."""
    if not a.size:
        return Edges(nodes, a, b, w, fact)
    order = np.argsort(b * nodes + a, kind="stable")
    a, b, w, fact = a[order], b[order], w[order], fact[order]
    new = np.ones(a.size, dtype=bool)
    new[1:] = (a[1:] != a[:-1]) | (b[1:] != b[:-1])
    first = np.flatnonzero(new)
    least = np.minimum.reduceat(w, first)
    late = np.where(w == np.repeat(least, np.diff(first, append=a.size)), fact, np.iinfo(np.int64).max)
    return Edges(nodes, a[first], b[first], least, np.minimum.reduceat(late, first))


def sane(edges: Edges) -> Edges:
    """Without bounds looser than LIMIT, and none tighter than -LIMIT, so that no sum of weights can overflow."""
    keep = edges.w < LIMIT
    w = np.maximum(edges.w[keep], -LIMIT)
    return Edges(edges.nodes, edges.a[keep], edges.b[keep], w, edges.fact[keep])


def make_pattern(nodes: int, a: IntArray, b: IntArray) -> Pattern:
    """An order of elimination for the edges given: nodes with the fewest neighbours first."""
    near: list[set[int]] = [set() for _ in range(nodes)]
    pairs = distinct(np.minimum(a, b) * nodes + np.maximum(a, b))
    for x, y in zip((pairs // nodes).tolist(), (pairs % nodes).tolist(), strict=True):
        if x != y:
            near[x].add(y)
            near[y].add(x)
    left = set(range(nodes))
    steps: list[tuple[IntArray, IntArray]] = []
    while left:
        least = min(len(near[n]) for n in left)
        blocked: set[int] = set()
        chosen: list[int] = []
        for node in sorted(n for n in left if len(near[n]) == least):
            if node not in blocked:
                chosen.append(node)
                blocked |= near[node]
        around = [sorted(near[node]) for node in chosen]
        steps.append((np.array(chosen, dtype=np.int64), np.array(around, dtype=np.int64).reshape(len(chosen), least)))
        left -= set(chosen)
        for node in chosen:
            for other in near[node]:
                near[other] |= near[node]
                near[other] -= {other, node}
    none = np.zeros(0, dtype=np.int64)
    early = np.concatenate([none, *(np.repeat(v, n.shape[1]) for v, n in steps)])
    late = np.concatenate([none, *(n.ravel() for _, n in steps)])
    return Pattern(tuple(steps), np.concatenate([early, late]), np.concatenate([late, early]))


def matrix(edges: Edges) -> IntArray:
    """The weights as a matrix; UNREACHED where there is no edge, 0 on the diagonal."""
    w = np.full((edges.nodes, edges.nodes), UNREACHED, dtype=np.int64)
    w[edges.a, edges.b] = edges.w
    np.fill_diagonal(w, 0)
    return w


def close(pattern: Pattern, w: IntArray) -> bool:
    """Make every bound of the pattern exact, in place. False (and `w` useless) where there is a negative cycle."""
    for nodes, near in pattern.steps:
        if near.shape[1]:
            into, out = w[near, nodes[:, None]], w[nodes[:, None], near]
            if (into + out < 0).any():
                return False
            np.minimum.at(w, (near[:, :, None], near[:, None, :]), into[:, :, None] + out[:, None, :])
    for nodes, near in reversed(pattern.steps):
        if near.shape[1]:
            block = w[near[:, :, None], near[:, None, :]]
            into, out = w[near, nodes[:, None]], w[nodes[:, None], near]
            w[near, nodes[:, None]] = (block + into[:, None, :]).min(axis=2)
            w[nodes[:, None], near] = (out[:, :, None] + block).min(axis=1)
    w[w > UNREACHED // 2] = UNREACHED
    return True


def distances(pattern: Pattern, w: IntArray, start: IntArray) -> IntArray:
    """Shortest distances in the closed `w` from starting values: one row per start, UNREACHED where it has none. The
    value at node i is the least of start[j] + distance(j, i)."""
    d = start.T.copy()
    for nodes, near in pattern.steps:
        if near.shape[1]:
            out = w[nodes[:, None], near]
            np.minimum.at(d, near, d[nodes][:, None, :] + out[:, :, None])
    for nodes, near in reversed(pattern.steps):
        if near.shape[1]:
            into = w[near, nodes[:, None]]
            d[nodes] = np.minimum(d[nodes], (d[near] + into[:, :, None]).min(axis=1))
    return np.ascontiguousarray(np.where(d > UNREACHED // 2, UNREACHED, d).T)


def potentials(pattern: Pattern, w: IntArray, wanted: IntArray, among: BoolArray | None = None) -> IntArray:
    """A solution of all constraints near `wanted`, and `wanted` itself if it is one. With `among`, only the wishes of
    those nodes count, and only nodes that are related to them both ways get a sound value.

    The mean of the greatest solution that is nowhere above and the least that is nowhere below; the mean of two
    solutions is one, and so is its floor, because the weights are integers.
    """
    count = np.ones(wanted.size, dtype=bool) if among is None else among
    below = distances(pattern, w, np.where(count, wanted, UNREACHED)[None, :])[0]
    above = -distances(pattern, w.T, np.where(count, -wanted, UNREACHED)[None, :])[0]
    both: IntArray = below + above
    return both // 2


def components(edges: Edges) -> IntArray:
    """For every node the lowest node of its strong component: those that bound each other both ways."""
    label = np.full(edges.nodes, -1, dtype=np.int64)
    ahead: list[list[int]] = [[] for _ in range(edges.nodes)]
    back: list[list[int]] = [[] for _ in range(edges.nodes)]
    for a, b in zip(edges.a.tolist(), edges.b.tolist(), strict=True):
        ahead[a].append(b)
        back[b].append(a)
    seen = np.zeros(edges.nodes, dtype=bool)
    finished: list[int] = []
    for start in range(edges.nodes):
        stack = [(start, False)]
        while stack:
            node, done = stack.pop()
            if done:
                finished.append(node)
            elif not seen[node]:
                seen[node] = True
                stack.append((node, True))
                stack += [(n, False) for n in ahead[node] if not seen[n]]
    for start in reversed(finished):
        if label[start] >= 0:
            continue
        group, queue = [start], [start]
        label[start] = start
        while queue:
            for n in back[queue.pop()]:
                if label[n] < 0:
                    label[n] = start
                    group.append(n)
                    queue.append(n)
        label[group] = min(group)
    return label


def _loops(pred: IntArray, edges: Edges) -> list[list[int]]:
    """The cycles of the graph of predecessors (no two share a node), each as positions in `edges`, in order."""
    state = np.zeros(pred.size, dtype=np.int8)
    found: list[list[int]] = []
    back = np.where(pred >= 0, edges.a[pred], -1).tolist()
    for start in np.flatnonzero(pred >= 0).tolist():
        trail: list[int] = []
        node = start
        while node >= 0 and state[node] == 0:
            state[node] = 1
            trail.append(node)
            node = back[node]
        if node >= 0 and state[node] == 1:
            found.append([int(pred[n]) for n in trail[trail.index(node) :]][::-1])
        state[trail] = 2
    return found


def negative_cycles(edges: Edges) -> list[list[int]]:
    """Cycles whose weights sum to less than 0, as positions in `edges`, in order; no two share a node. Not all of them,
    but none only if there is none. Bellman-Ford, all edges at once: slower than `close`, but it names the cycles."""
    if edges.a.size == 0:
        return []
    dist = np.zeros(edges.nodes, dtype=np.int64)
    pred = np.full(edges.nodes, -1, dtype=np.int64)
    heads, first = np.unique(edges.b, return_index=True)
    place = np.repeat(np.arange(heads.size), np.diff(np.append(first, edges.b.size)))
    for step in range(edges.nodes + 1):
        through = dist[edges.a] + edges.w
        best = np.minimum.reduceat(through, first)
        better = best < dist[heads]
        if not better.any():
            return []
        dist[heads[better]] = best[better]
        hit = np.flatnonzero((through == best[place]) & better[place])
        nodes, at = np.unique(edges.b[hit], return_index=True)
        pred[nodes] = hit[at]
        if step == edges.nodes or (step >= 7 and step & (step + 1) == 0):
            found = _loops(pred, edges)
            if found:
                return found
    raise AssertionError("Bellman-Ford neither settled nor found a cycle")


def rough(edges: Edges, root: int) -> tuple[IntArray, IntArray]:
    """Crude offset of every node from `root` along a tree of the narrowest two-way bounds (one-way ones where there is
    nothing else), and how far it can be off where both ways bound it. Nodes without any path start at 0."""
    bound = dict(zip(zip(edges.a.tolist(), edges.b.tolist(), strict=True), edges.w.tolist(), strict=True))
    near: list[set[int]] = [set() for _ in range(edges.nodes)]
    for a, b in bound:
        near[a].add(b)
        near[b].add(a)
    offset, slop = np.zeros(edges.nodes, dtype=np.int64), np.zeros(edges.nodes, dtype=np.int64)
    done = np.zeros(edges.nodes, dtype=bool)
    for start in [root, *range(edges.nodes)]:
        heap = [] if done[start] else [(False, 0, start, 0, 0)]
        while heap:
            _, _, node, at, off = heapq.heappop(heap)
            if done[node]:
                continue
            done[node] = True
            offset[node], slop[node] = at, off
            for other in near[node]:
                if done[other]:
                    continue
                high, back = bound.get((node, other)), bound.get((other, node))
                if high is not None and back is not None:
                    width = abs(high + back)
                    heapq.heappush(heap, (False, width, other, at + (high - back) // 2, off + (width + 1) // 2))
                else:
                    step = high if high is not None else -(back or 0)
                    heapq.heappush(heap, (True, 0, other, at + step, off))
    return offset, slop


def tight_path(edges: Edges, dist: IntArray, source: int, target: int) -> list[int]:
    """Positions in `edges` of a path that makes dist[target] (`dist`: distances from `source`), in order; empty where
    there is none."""
    if dist[target] >= UNREACHED:
        return []
    start = dist[edges.a]
    fits = (start < UNREACHED) & (np.where(start < UNREACHED, start, 0) + edges.w == dist[edges.b])
    # Breadth-first over the tight edges: shortest in hops, and free of the loops that cycles of weight 0 would make.
    order = np.argsort(edges.a[fits], kind="stable")
    places = np.flatnonzero(fits)[order]
    tails = edges.a[places]
    back: dict[int, int] = {source: -1}
    layer = [source]
    while layer and target not in back:
        following: list[int] = []
        for node in layer:
            lo, hi = np.searchsorted(tails, node, "left"), np.searchsorted(tails, node, "right")
            for edge in places[lo:hi].tolist():
                end = int(edges.b[edge])
                if end not in back:
                    back[end] = edge
                    following.append(end)
        layer = following
    path: list[int] = []
    node = target
    while back.get(node, -1) >= 0:
        path.append(back[node])
        node = int(edges.a[back[node]])
    return path[::-1]
