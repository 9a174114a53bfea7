"""Shortest paths and cycles against plain Floyd-Warshall."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from traceana.clock.graph import (
    UNREACHED,
    Edges,
    close,
    components,
    distances,
    make_pattern,
    matrix,
    negative_cycles,
    potentials,
    rough,
    tight_path,
    tightest,
)

edge = st.tuples(st.integers(0, 11), st.integers(0, 11), st.integers(-20, 60))


def graph(nodes: int, given_edges: list[tuple[int, int, int]]) -> Edges:
    kept = [(a % nodes, b % nodes, w) for a, b, w in given_edges if a % nodes != b % nodes]
    a, b, w = (np.array([e[i] for e in kept], dtype=np.int64) for i in range(3))
    return tightest(nodes, a, b, w, np.arange(len(kept)))


def oracle(edges: Edges) -> list[list[int | None]]:
    """All shortest paths, None for none, by the textbook loop."""
    n = edges.nodes
    d: list[list[int | None]] = [[0 if i == j else None for j in range(n)] for i in range(n)]
    for a, b, w in zip(edges.a.tolist(), edges.b.tolist(), edges.w.tolist(), strict=True):
        known = d[a][b]
        d[a][b] = w if known is None else min(known, w)
    for k in range(n):
        for i in range(n):
            for j in range(n):
                ik, kj, ij = d[i][k], d[k][j], d[i][j]
                if ik is not None and kj is not None and (ij is None or ik + kj < ij):
                    d[i][j] = ik + kj
    return d


@given(st.integers(2, 12), st.lists(edge, max_size=40))
@settings(max_examples=150, deadline=None)
def test_distances_or_a_negative_cycle(nodes: int, given_edges: list[tuple[int, int, int]]) -> None:
    edges = graph(nodes, given_edges)
    want = oracle(edges)
    contradictory = any((want[i][i] or 0) < 0 for i in range(nodes))
    pattern, w = make_pattern(nodes, edges.a, edges.b), matrix(edges)
    assert close(pattern, w) is not contradictory
    cycles = negative_cycles(edges)
    assert bool(cycles) is contradictory
    for cycle in cycles:
        assert int(edges.w[cycle].sum()) < 0
        assert edges.b[cycle].tolist() == [*edges.a[cycle][1:].tolist(), int(edges.a[cycle[0]])]
    if contradictory:
        return
    start = np.full((nodes, nodes), UNREACHED, dtype=np.int64)
    np.fill_diagonal(start, 0)
    got = distances(pattern, w, start)
    assert [[None if x >= UNREACHED else x for x in row] for row in got.tolist()] == want
    assert distances(pattern, w.T, start).tolist() == got.T.tolist()
    assert (start.diagonal() == 0).all(), "the starting values must stay as they were"


@given(st.integers(2, 12), st.lists(edge, max_size=40), st.lists(st.integers(-50, 50), min_size=12, max_size=12))
@settings(max_examples=150, deadline=None)
def test_potentials_keep_every_constraint(
    nodes: int, given_edges: list[tuple[int, int, int]], wishes: list[int]
) -> None:
    edges = graph(nodes, given_edges)
    pattern, w = make_pattern(nodes, edges.a, edges.b), matrix(edges)
    if not close(pattern, w):
        return
    wish = np.array(wishes[:nodes], dtype=np.int64)
    found = potentials(pattern, w, wish)
    assert (found[edges.b] - found[edges.a] <= edges.w).all()
    if (wish[edges.b] - wish[edges.a] <= edges.w).all():
        assert found.tolist() == wish.tolist()
    assert potentials(pattern, w, found).tolist() == found.tolist()


@given(st.integers(2, 12), st.lists(edge, max_size=40))
@settings(max_examples=100, deadline=None)
def test_components_are_mutual_reach(nodes: int, given_edges: list[tuple[int, int, int]]) -> None:
    edges = graph(nodes, given_edges)
    hops = oracle(Edges(nodes, edges.a, edges.b, np.ones_like(edges.w), edges.fact))
    want = [min(j for j in range(nodes) if hops[i][j] is not None and hops[j][i] is not None) for i in range(nodes)]
    assert components(edges).tolist() == want


@given(st.integers(2, 12), st.lists(edge, min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_tight_path_adds_up(nodes: int, given_edges: list[tuple[int, int, int]]) -> None:
    edges = graph(nodes, given_edges)
    pattern, w = make_pattern(nodes, edges.a, edges.b), matrix(edges)
    if not close(pattern, w):
        return
    start = np.full((1, nodes), UNREACHED, dtype=np.int64)
    start[0, 0] = 0
    dist = distances(pattern, w, start)[0]
    for target in range(1, nodes):
        path = tight_path(edges, dist, 0, target)
        if dist[target] >= UNREACHED:
            assert path == []
            continue
        assert int(edges.w[path].sum()) == dist[target]
        assert [0, *edges.b[path].tolist()] == [*edges.a[path].tolist(), target]


def test_a_long_ring_takes_few_steps() -> None:
    n = 1000
    a = np.arange(n)
    pattern = make_pattern(n, a, (a + 1) % n)
    assert len(pattern.steps) < 40
    w = matrix(tightest(n, a, (a + 1) % n, np.full(n, 3), a))
    assert close(pattern, w)
    start = np.full((1, n), UNREACHED, dtype=np.int64)
    start[0, 0] = 0
    assert distances(pattern, w, start)[0].tolist() == (3 * a).tolist()
    assert distances(pattern, w.T, start)[0].tolist() == (3 * ((n - a) % n)).tolist()


def test_rough_follows_the_narrowest_two_way_bounds() -> None:
    # 0-1 is known to 10, 0-2 to 100000 directly but to 10 through 1, and 3 only from above.
    edges = graph(5, [(0, 1, 1005), (1, 0, -995), (1, 2, 2005), (2, 1, -1995), (0, 2, 60), (2, 3, 7)])
    offset, slop = rough(edges, 0)
    assert offset.tolist() == [0, 1000, 3000, 3007, 0]
    assert slop.tolist() == [0, 5, 10, 10, 0]
