"""A packed forest holds every sample, once where samples agree, and its tables say the same as its structure.

The oracle is plain Python over the samples: sets of prefixes, and walks up the parents.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_kernels import zorro
from arctic_kernels.zorro import PackedForest, ZorroError
from arctic_kernels.zorro.layout import Ranges, spread_on_device, spread_on_host

SHARES = ("auto", "prompts", "none")


@st.composite
def batches(draw: st.DrawFn, max_samples: int = 12) -> tuple[list[list[int]], list[int]]:
    """Samples grown from each other: ragged, equal, prefixes of each other, one-token, with and without responses."""
    samples: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_samples))):
        base = draw(st.sampled_from(samples)) if samples and draw(st.booleans()) else []
        kept = base[: draw(st.integers(0, len(base)))]
        samples.append(kept + draw(st.lists(st.integers(0, 2), min_size=0 if kept else 1, max_size=9)))
    prompts = [draw(st.integers(1, len(sample))) for sample in samples]
    return samples, prompts


def prefixes(samples: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(sample[: stop + 1]) for sample in samples for stop in range(len(sample))}


def path(forest: PackedForest, node: int) -> list[int]:
    """Rows from the root's first token to the node's last one."""
    parent = int(forest.structure.parents_N[node])
    first, stop = forest.structure.offsets_N1[node : node + 2].tolist()
    return (path(forest, parent) if parent >= 0 else []) + list(range(first, stop))


def root_of(forest: PackedForest, node: int, level: int) -> int:
    """The ancestor (or self) on a level."""
    while forest.structure.levels_N[node] > level:
        node = int(forest.structure.parents_N[node])
    return node


def check_tokens(forest: PackedForest, samples: list[list[int]], prompts: list[int]) -> None:
    """Samples, positions, labels and predicting rows are right."""
    token_T, position_T = forest.token_ids[0], forest.position_ids[0]
    predicting, row_R, label_R = set(), [], []
    for index, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
        rows = forest.sample_rows(index)
        assert token_T[rows].tolist() == sample
        assert position_T[rows].tolist() == list(range(len(sample)))
        first, stop = forest.structure.offsets_N1[forest.nodes_B[index] :][:2]
        assert first <= rows[-1] < stop
        row_R += rows[prompt - 1 : -1].tolist()
        label_R += sample[prompt:]
        predicting.update(rows[prompt - 1 : -1].tolist())
        assert forest.cu_responses[index + 1] - forest.cu_responses[index] == len(sample) - prompt
    assert forest.rows_P.tolist() == sorted(predicting)
    assert forest.rows_P[forest.row_of_R].tolist() == row_R
    assert forest.labels_R.tolist() == label_R
    assert forest.cu_responses[0] == 0
    assert forest.naive_tokens == sum(map(len, samples))
    assert forest.tokens_saved == forest.naive_tokens - forest.num_tokens == forest.naive_tokens - len(token_T)
    for tensor in (forest.token_ids, forest.position_ids, forest.rows_P, forest.row_of_R, forest.labels_R):
        assert tensor.dtype == torch.int64


def check_structure(forest: PackedForest) -> None:
    """Nodes are in level order, contiguous, not empty, and start where their parents end."""
    s = forest.structure
    parents, lengths = s.parents_N, s.lengths_N
    assert s.offsets_N1[0] == 0
    assert (lengths > 0).all()
    assert lengths.max() == forest.max_node
    assert forest.cu_nodes.dtype == torch.int32
    assert forest.cu_nodes.tolist() == s.offsets_N1.tolist()
    assert (np.diff(s.levels_N) >= 0).all()
    for level in range(forest.depth):
        assert (np.diff(parents[s.level(level)]) >= 0).all()  # grouped by parent, in parent order
    for node, parent in enumerate(parents):
        assert parent < node
        assert s.starts_N[node] == (s.starts_N[parent] + lengths[parent] if parent >= 0 else 0)
        assert s.levels_N[node] == (s.levels_N[parent] + 1 if parent >= 0 else 0)
    has_children = np.isin(np.arange(forest.num_nodes), parents)
    roots = has_children[s.level(0)]
    assert not (np.diff(roots.astype(int)) > 0).any()


def check_parts(forest: PackedForest) -> None:
    """The nodes' causal calls and the ancestor parts cover the mask exactly, each pair once."""
    mask = np.zeros((forest.num_tokens, forest.num_tokens), bool)
    for node in range(forest.num_nodes):
        own = path(forest, node)
        for row in range(int(forest.structure.offsets_N1[node]), own[-1] + 1):
            mask[row, [key for key in own if forest.position_ids[0, key] <= forest.position_ids[0, row]]] = True
    assert forest.ancestor_mask().numpy().tolist() == mask.tolist()
    covered = np.zeros(mask.shape, int)
    for first, stop in zip(forest.cu_nodes.tolist(), forest.cu_nodes.tolist()[1:], strict=False):
        covered[first:stop, first:stop] += np.tri(stop - first, dtype=int)
    pairs = []
    for part in forest.ancestors:
        pairs.append((part.query_level, part.key_level))
        cu_q, cu_k = part.cu_q.tolist(), part.cu_k.tolist()
        assert part.cu_q.dtype == part.cu_k.dtype == torch.int32
        assert (cu_q[0], cu_k[0], cu_q[-1], cu_k[-1]) == (0, 0, part.q_stop - part.q_start, part.k_stop - part.k_start)
        assert (part.max_q, part.max_k) == (max(np.diff(cu_q)), max(np.diff(cu_k)))
        queried = np.zeros(part.k_stop - part.k_start, bool)
        for sequence in range(len(cu_q) - 1):
            q = slice(part.q_start + cu_q[sequence], part.q_start + cu_q[sequence + 1])
            covered[q, part.k_start + cu_k[sequence] : part.k_start + cu_k[sequence + 1]] += 1
            queried[cu_k[sequence] : cu_k[sequence + 1]] = cu_q[sequence + 1] > cu_q[sequence]
        assert queried[0]
        assert queried[-1]
        if part.queried_k is None:
            assert queried.all()
        else:
            assert not queried.all()
            assert part.queried_k.tolist() == queried.tolist()
    assert pairs == [(q, k) for q in range(1, forest.depth) for k in range(q)]
    assert covered.tolist() == mask.astype(int).tolist()


def check_window(forest: PackedForest, window: int) -> None:
    """Keys of a node are its last path tokens and its own, in order."""
    part = forest.window(window)
    assert forest.window(window) is part
    cu_q, cu_k, gather = part.cu_q.tolist(), part.cu_k.tolist(), part.gather_G.tolist()
    assert part.cu_k.dtype == torch.int32
    assert part.gather_G.dtype == torch.int64
    assert cu_q == forest.cu_nodes.tolist()
    assert (part.max_q, part.max_k) == (max(np.diff(cu_q)), max(np.diff(cu_k)))
    assert cu_k[-1] == len(gather)
    for node in range(forest.num_nodes):
        before = min(window - 1, int(forest.structure.starts_N[node]))
        size = before + int(forest.structure.lengths_N[node])
        assert gather[cu_k[node] : cu_k[node + 1]] == path(forest, node)[-size:]


@settings(max_examples=300, deadline=None)
@given(batch=batches(), share=st.sampled_from(SHARES), min_shared=st.integers(1, 4), window=st.integers(1, 12))
def test_every_table_of_a_forest_of_random_samples_is_right(
    batch: tuple[list[list[int]], list[int]], share: Any, min_shared: int, window: int
) -> None:
    forest = PackedForest.from_sequences(*batch, share=share, min_shared_tokens=min_shared)
    check_tokens(forest, *batch)
    check_structure(forest)
    check_parts(forest)
    check_window(forest, window)


@settings(max_examples=300, deadline=None)
@given(batch=batches())
def test_free_sharing_computes_each_distinct_prefix_once(batch: tuple[list[list[int]], list[int]]) -> None:
    samples, prompts = batch
    forest = PackedForest.from_sequences(samples, prompts, min_shared_tokens=1)
    assert forest.num_tokens == len(prefixes(samples))


@settings(max_examples=200, deadline=None)
@given(batch=batches())
def test_whole_prompts_are_shared_among_the_samples_that_have_them_and_nothing_else_is(
    batch: tuple[list[list[int]], list[int]],
) -> None:
    samples, prompts = batch
    forest = PackedForest.from_sequences(samples, prompts, share="prompts", min_shared_tokens=1)
    distinct = {tuple(sample[:prompt]) for sample, prompt in zip(samples, prompts, strict=True)}
    responses = sum(map(len, samples)) - sum(prompts)
    assert forest.num_tokens == sum(map(len, distinct)) + responses
    assert forest.depth <= 2


def test_sharing_nothing_keeps_the_samples_as_they_come() -> None:
    forest = PackedForest.from_sequences([[1, 2, 3], [1, 2, 3], [1, 2]], [1, 2, 2], share="none", min_shared_tokens=1)
    assert forest.token_ids.tolist() == [[1, 2, 3, 1, 2, 3, 1, 2]]
    assert forest.cu_nodes.tolist() == [0, 3, 6, 8]
    assert forest.ancestors == ()
    assert (forest.depth, forest.tokens_saved) == (1, 0)


def test_a_shared_row_scores_all_its_labels() -> None:
    forest = PackedForest.from_sequences([[5, 6, 7], [5, 6, 8, 9], [5, 6]], [2, 2, 2], min_shared_tokens=1)
    assert forest.token_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert forest.position_ids.tolist() == [[0, 1, 2, 2, 3]]
    assert forest.rows_P.tolist() == [1, 3]
    assert forest.row_of_R.tolist() == [0, 0, 1]
    assert forest.labels_R.tolist() == [7, 8, 9]
    assert forest.cu_responses == (0, 1, 3, 3)


def test_equal_samples_are_one_node_and_each_has_its_labels() -> None:
    forest = PackedForest.from_sequences([[1, 2, 3]] * 3, [1, 2, 1], min_shared_tokens=3)
    assert forest.num_nodes == 1
    assert forest.labels_R.tolist() == [2, 3, 3, 2, 3]
    assert forest.row_of_R.tolist() == [0, 1, 1, 0, 1]


def test_a_sample_that_begins_another_makes_no_node() -> None:
    turns = [list(range(stop)) for stop in (10, 20, 30)]
    forest = PackedForest.from_sequences(turns, [5, 15, 25], min_shared_tokens=1)
    assert (forest.num_nodes, forest.num_tokens) == (1, 30)
    check_tokens(forest, turns, [5, 15, 25])
    assert forest.rows_P.tolist() == [*range(4, 9), *range(14, 19), *range(24, 29)]


def test_groups_are_found_wherever_their_samples_stand() -> None:
    first, second = list(range(100)), list(range(200, 290))
    samples = [[*first, 1], [7, 8], [*second, 1], [*first, 2], [*second, 2], [*first, 3]]
    forest = PackedForest.from_sequences(samples, [100, 1, 90, 100, 90, 100])
    assert forest.structure.parents_N.tolist() == [-1, -1, -1, 0, 0, 0, 1, 1]
    assert forest.structure.lengths_N.tolist() == [100, 90, 2, 1, 1, 1, 1, 1]
    check_tokens(forest, samples, [100, 1, 90, 100, 90, 100])


@pytest.mark.parametrize("options", [{}, {"share": "none"}, {"share": "prompts", "min_shared_tokens": 1}])
def test_an_empty_batch_is_one_token_that_predicts_nothing(options: dict[str, Any]) -> None:
    forest = PackedForest.from_sequences([], [], **options)
    check_structure(forest)
    check_parts(forest)
    check_window(forest, 4)
    assert (forest.token_ids.tolist(), forest.position_ids.tolist()) == ([[0]], [[0]])
    assert (forest.num_nodes, forest.num_samples, forest.naive_tokens, forest.tokens_saved) == (1, 0, 0, 0)
    assert [len(x) for x in (forest.rows_P, forest.row_of_R, forest.labels_R)] == [0, 0, 0]
    assert forest.cu_responses == (0,)


def test_samples_may_be_lists_arrays_or_tensors_of_any_integers() -> None:
    samples = [[1, 2, 3], [1, 2, 4, 5]]
    wanted = PackedForest.from_sequences(samples, [1, 2], min_shared_tokens=1)
    for given_samples in (
        [np.array(sample, np.int32) for sample in samples],
        [torch.tensor(sample, dtype=torch.int32) for sample in samples],
        [torch.tensor(samples[0]), np.array(samples[1], np.uint16)],
    ):
        forest = PackedForest.from_sequences(given_samples, torch.tensor([1, 2]), min_shared_tokens=1)
        assert forest.token_ids.tolist() == wanted.token_ids.tolist()
        assert forest.labels_R.tolist() == wanted.labels_R.tolist()
    flat = np.array(samples[0] + samples[1], np.int32)
    forest = PackedForest.from_packed(flat, np.array([3, 4]), np.array([1, 2]), min_shared_tokens=1)
    assert forest.token_ids.dtype == torch.int64
    assert forest.token_ids.tolist() == wanted.token_ids.tolist()


def test_a_forest_does_not_change_when_the_callers_tokens_do() -> None:
    flat = np.arange(6)
    forest = PackedForest.from_packed(flat, [6], [3])
    flat[:] = 0
    assert forest.token_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert forest.labels_R.tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("samples", "prompts", "options", "message"),
    [
        ([[1, 2]], [3], {}, "Sample 0 of 2 tokens has a prompt length of 3"),
        ([[1, 2], [1, 2]], [1, 0], {}, "Sample 1 of 2 tokens has a prompt length of 0; a prompt has at least one token"),
        ([[1], []], [1, 0], {}, "Sample 1 of 0 tokens"),
        ([[1, 2]], [-1], {}, "prompt length of -1"),
        ([[1, 2]], [1, 1], {}, "1 samples have 2 prompt lengths"),
        ([[1.0, 2.0]], [1], {}, "sample 0 is of type float64; it must hold integers"),
        ([[1], torch.tensor([True, False])], [1, 1], {}, "sample 1 is of type bool"),
        ([[[1, 2]]], [1], {}, r"sample 0 has the shape \(1, 2\)"),
        ([[1, 2]], [1.5], {}, "prompt_lengths is of type float64"),
        ([[1, 2]], [1], {"share": "all"}, "share is 'all'"),
        ([[1, 2]], [1], {"min_shared_tokens": 0}, "min_shared_tokens is 0"),
    ],
)
def test_malformed_samples_and_options_are_refused_by_name(
    samples: Any, prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ZorroError, match=message):
        PackedForest.from_sequences(samples, prompts, **options)


def test_lengths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ZorroError, match="add up to 5 tokens, but 6 token ids"):
        PackedForest.from_packed(np.arange(6), [2, 3], [1, 1])


def test_a_window_without_tokens_is_refused() -> None:
    with pytest.raises(ZorroError, match="sliding window of 0 tokens"):
        PackedForest.from_sequences([[1]], [1]).window(0)


@pytest.mark.parametrize("sample", [2, -1])
def test_rows_of_an_unknown_sample_are_an_index_error(sample: int) -> None:
    with pytest.raises(IndexError, match=f"sample {sample} of a forest of 2"):
        PackedForest.from_sequences([[1], [2]], [1, 1]).sample_rows(sample)


def test_building_never_waits_for_the_device() -> None:
    """The meta device has no data to wait for: whatever read a tensor back would fail on it."""
    samples = [[1, 2, 3], [1, 2, 4], [1, 8], [5, 6, 7, 7], [5, 6, 9], [5, 8]]  # the 8s stand between inner nodes
    here = PackedForest.from_sequences(samples, [1] * 6, min_shared_tokens=1)
    there = PackedForest.from_sequences(samples, [1] * 6, min_shared_tokens=1, device="meta")
    assert any(part.queried_k is not None for part in here.ancestors)
    for mine, other in zip(tensors(here), tensors(there), strict=True):
        assert other.device.type == "meta"
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)


def test_a_forest_moves_with_all_its_tensors() -> None:
    forest = PackedForest.from_sequences([[1, 2, 3], [1, 2, 4]], [1, 1], min_shared_tokens=1)
    forest.window(3)
    assert forest.to("cpu") is forest
    moved = forest.to("meta")
    assert moved.device.type == "meta"
    assert all(tensor.device.type == "meta" for tensor in tensors(moved))
    assert moved.structure is forest.structure
    assert forest.device.type == "cpu"


def test_forests_pickle() -> None:
    forest = PackedForest.from_sequences([[1, 2, 3], [1, 2, 4]], [1, 1], min_shared_tokens=1)
    check_tokens(pickle.loads(pickle.dumps(forest)), [[1, 2, 3], [1, 2, 4]], [1, 1])


def test_importing_the_package_loads_none_of_its_parts() -> None:
    program = "import sys, arctic_kernels.zorro as z; assert 'PackedForest' in dir(z); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)})
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = zorro.nothing


@given(pieces=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=8))
def test_ranges_are_written_out_alike_on_host_and_device(pieces: list[tuple[int, int]]) -> None:
    ranges = Ranges(np.array([x for x, _ in pieces], np.int64), np.array([x for _, x in pieces], np.int64))
    wanted = [number for start, count in pieces for number in range(start, start + count)]
    assert spread_on_host(ranges).tolist() == wanted
    starts, counts = torch.from_numpy(ranges.starts_S), torch.from_numpy(ranges.counts_S)
    assert spread_on_device(starts, counts, ranges.total).tolist() == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_forest_built_on_a_gpu_equals_one_built_on_the_cpu() -> None:
    generator = np.random.default_rng(0)
    stem = generator.integers(0, 9, 300).tolist()
    samples = [stem[: generator.integers(70, 300)] + generator.integers(0, 9, 90).tolist() for _ in range(40)]
    here, there = (PackedForest.from_sequences(samples, [50] * 40, device=device) for device in ("cpu", "cuda"))
    for mine, other in zip(tensors(here), tensors(there), strict=True):
        assert torch.equal(mine, other.cpu())


def tensors(forest: PackedForest) -> list[torch.Tensor]:
    """All tensors of a forest, with those of its parts and of one window."""
    window = forest.window(3)
    records = (forest, *forest.ancestors, window)
    return [value for record in records for value in vars(record).values() if isinstance(value, torch.Tensor)]
