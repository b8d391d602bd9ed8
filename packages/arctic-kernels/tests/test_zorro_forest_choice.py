"""Which shared runs become nodes: the cost model, against trying every choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_kernels.zorro import PackedForest
from arctic_kernels.zorro.discovery import QUERIED_PER_NODE, Runs, Trie, choose, find_runs
from arctic_kernels.zorro.forest import DEFAULT_MIN_SHARED_TOKENS

RNG = np.random.default_rng(0)


def fresh(count: int) -> list[int]:
    """Tokens that no other sample has in a row."""
    return RNG.integers(0, 100_000, count).tolist()


def pack(samples: list[list[int]], min_shared_tokens: int = DEFAULT_MIN_SHARED_TOKENS) -> PackedForest:
    return PackedForest.from_sequences(samples, [1] * len(samples), min_shared_tokens=min_shared_tokens)


@st.composite
def tries(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Parents and ends of the nodes of a trie; inner nodes have two children or more."""
    parents, ends, pending = [], [], [(-1, 0, 0)]
    inner = 0
    while pending:
        parent, start, depth = pending.pop()
        parents.append(parent)
        ends.append(start + draw(st.integers(1, 30)))
        if inner < 7 and depth < 4 and draw(st.booleans()):
            inner += 1
            pending += [(len(parents) - 1, ends[-1], depth + 1)] * draw(st.integers(2, 3))
    return parents, ends


def total_cost(parents: list[int], ends: list[int], kept: set[int], min_shared: int) -> float:
    """Tokens to compute and costs of the kept inner nodes; infinite where one is too short."""
    inner = {parent for parent in parents if parent >= 0}
    total = 0.0
    for node in range(len(parents)):
        if node in inner and node not in kept:
            continue
        above = parents[node]
        while above >= 0 and above not in kept:
            above = parents[above]
        length = ends[node] - (ends[above] if above >= 0 else 0)
        total += length
        if node in inner:
            below = sum(ends[x] - ends[parents[x]] for x in range(len(parents)) if is_below(parents, x, node))
            total += (min_shared - 1) * (1 + below / QUERIED_PER_NODE)
            if length < min_shared:
                return float("inf")
    return total


def is_below(parents: list[int], node: int, top: int) -> bool:
    """Whether ``top`` is an ancestor of ``node``."""
    while parents[node] >= 0:
        node = parents[node]
        if node == top:
            return True
    return False


@settings(max_examples=200, deadline=None)
@given(trie=tries(), min_shared=st.integers(1, 40))
def test_no_other_choice_of_nodes_costs_less(trie: tuple[list[int], list[int]], min_shared: int) -> None:
    parents, ends = trie
    inner = sorted({parent for parent in parents if parent >= 0})
    leaves = [node for node in range(len(parents)) if node not in inner]
    runs = choose(built(parents, ends, leaves), min_shared)
    kept = {node for node in inner if chosen(runs, parents, ends, leaves, node)}
    assert len(runs.ends_N) == len(kept) + len(leaves)
    subsets = itertools.chain.from_iterable(itertools.combinations(inner, size) for size in range(len(inner) + 1))
    best = min(total_cost(parents, ends, set(subset), min_shared) for subset in subsets)
    assert total_cost(parents, ends, kept, min_shared) == pytest.approx(best)


def built(parents: list[int], ends: list[int], leaves: list[int]) -> Trie:
    """The trie with one sample per leaf; an inner node's source is a sample below it."""
    samples = {leaf: sample for sample, leaf in enumerate(leaves)}
    trie = Trie([0] * len(leaves), [ends[leaf] for leaf in leaves])
    for node, (parent, end) in enumerate(zip(parents, ends, strict=True)):
        below = next(leaf for leaf in leaves if leaf == node or is_below(parents, leaf, node))
        trie.add(parent, end, samples[below])
    return trie


def chosen(runs: Runs, parents: list[int], ends: list[int], leaves: list[int], node: int) -> bool:
    """Whether an inner node was kept: the chosen path of a leaf below it has a node that ends where it does."""
    sample = next(index for index, leaf in enumerate(leaves) if is_below(parents, leaf, node))
    at, found = int(runs.nodes_B[sample]), set()
    while at >= 0:
        found.add(int(runs.ends_N[at]))
        at = int(runs.parents_N[at])
    return ends[node] in found


def test_runs_shorter_than_the_least_are_not_shared() -> None:
    for length, nodes in ((63, 2), (64, 3)):
        stem = fresh(length)
        assert pack([stem + fresh(5), stem + fresh(5)]).num_nodes == nodes


def test_a_run_is_shared_only_if_it_saves_more_than_the_tokens_below_it_cost() -> None:
    stem = fresh(100)
    short = [stem + fresh(100) for _ in range(2)]
    long = [stem + fresh(3000) for _ in range(2)]  # 100 saved against 63 · (1 + 6000 / 4096)
    assert pack(short).num_tokens == 300
    assert pack(long).num_tokens == 6200


def test_a_node_that_is_not_kept_adds_its_tokens_to_its_children() -> None:
    stem, left = fresh(40), fresh(40)
    samples = [stem + left + fresh(9), stem + left + fresh(9), stem + left + fresh(9), stem + fresh(9)]
    forest = pack(samples)
    assert sorted(forest.structure.lengths_N.tolist()) == [9, 9, 9, 49, 80]
    for index, sample in enumerate(samples):
        assert forest.token_ids[0][forest.sample_rows(index)].tolist() == sample


def test_a_short_rest_joins_the_path_that_it_begins() -> None:
    stem, tail = fresh(100), fresh(100)
    samples = [stem + fresh(100), stem + tail[:10], stem + tail, stem + tail[:20], stem + tail[:9] + fresh(3)]
    forest = pack(samples)
    assert sorted(forest.structure.lengths_N.tolist()) == [12, 100, 100, 100]
    for index, sample in enumerate(samples):
        assert forest.token_ids[0][forest.sample_rows(index)].tolist() == sample


def test_of_short_rests_alone_the_longest_holds_those_that_begin_it() -> None:
    stem, tail = fresh(100), fresh(30)
    samples = [stem + fresh(100), *(stem + tail[:size] for size in (10, 20, 30, 15))]
    assert sorted(pack(samples).structure.lengths_N.tolist()) == [30, 100, 100]


def test_samples_that_agree_on_the_first_key_but_not_after_are_told_apart() -> None:
    stem = fresh(64)
    for at in (64, 65, 319, 320, 321, 1343, 1344, 5000):  # around the borders of the pieces that are compared
        body = fresh(6000)
        other = [*body[:at], body[at] + 1, *body[at + 1 :]]
        forest = pack([stem + body, stem + other], min_shared_tokens=1)
        assert forest.structure.lengths_N.tolist() == [64 + at, 6000 - at, 6000 - at]


def test_samples_of_a_deep_tree_share_on_every_level() -> None:
    """Each turn goes on from a point 200 tokens before the end of the one before."""
    samples, history = [], fresh(500)
    for _ in range(6):
        samples.append(history + fresh(200))
        history = history + fresh(400)
    forest = pack(samples)
    assert forest.depth == 6
    assert forest.num_tokens == 500 + 4 * 400 + 5 * 200 + 600  # the last turn's history has no second user
    for index, sample in enumerate(samples):
        assert forest.token_ids[0][forest.sample_rows(index)].tolist() == sample


def test_prompts_that_differ_only_between_the_hashed_tokens_are_not_taken_for_equal() -> None:
    prompt = fresh(6400)
    other = list(prompt)
    other[3250] += 1
    samples = [prompt + fresh(3), other + fresh(3), prompt + fresh(3), other + fresh(3)]
    forest = PackedForest.from_sequences(samples, [6400] * 4, share="prompts")
    assert forest.structure.parents_N.tolist() == [-1, -1, 0, 0, 1, 1]
    for index, sample in enumerate(samples):
        assert forest.token_ids[0][forest.sample_rows(index)].tolist() == sample


def test_a_thousand_samples_that_leave_one_path_one_by_one_are_still_found() -> None:
    """The worst case for comparing with one sample after the other: each is the first to leave."""
    stem = np.arange(3000)
    rows = [np.concatenate([stem[: 2 * index + 2], [5000 + index]]) for index in range(1000)]
    lengths_B = np.array([len(row) for row in rows])
    runs = find_runs(np.concatenate(rows), np.cumsum(lengths_B) - lengths_B, lengths_B, 1)
    starts = np.where(runs.parents_N >= 0, runs.ends_N[runs.parents_N], 0)
    assert (runs.ends_N - starts).sum() == 2000 + 1000
