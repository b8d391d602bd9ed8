"""Padded layouts in and out: whatever stands in padding, wherever padding is, the packed batch is the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_core.data import Batch, Sample
from arctic_core.errors import DataError
from arctic_core.padded import PaddedBatch, from_padded

FIELDS = ("loss_mask", "advantages", "old_logprobs", "teacher_logprobs")


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    with_topk = draw(st.booleans())
    return Batch.from_samples(
        Sample(
            token_ids=rng.integers(0, 9, prompt + response),
            prompt_length=prompt,
            group=int(rng.integers(0, 3)),
            temperature=float(rng.choice([0.5, 1.0])),
            policy_version=int(rng.integers(0, 4)),
            **{name: rng.integers(0, 2, response) for name in FIELDS},
            topk_ids=np.tile(np.arange(3), (response, 1)) if with_topk else None,
            teacher_topk_logprobs=-rng.random((response, 3)) if with_topk else None,
        )
        for prompt, response in lengths
    )


def place(rows: list[np.ndarray], width: int, left: list[int], poison: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows in a matrix, each ``left`` columns from its left edge; poison elsewhere."""
    tail = rows[0].shape[1:] if rows else ()
    values = np.full((len(rows), width, *tail), poison, rows[0].dtype if rows else np.float32)
    mask = np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        values[i, left[i] : left[i] + len(row)] = row
        mask[i, left[i] : left[i] + len(row)] = 1
    return values, mask


def padded(batch: Batch, draw_left, extra: int, poison: float) -> PaddedBatch:
    samples = batch.samples()
    prompts = [sample.token_ids[: sample.prompt_length] for sample in samples]
    responses = [sample.response_ids for sample in samples]
    width_p = max([len(row) for row in prompts], default=0) + extra
    width_w = max([len(row) for row in responses], default=0) + extra
    left_p = [draw_left(width_p - len(row)) for row in prompts]
    left_w = [draw_left(width_w - len(row)) for row in responses]
    prompt_ids, prompt_mask = place(prompts, width_p, left_p, 3)
    response_ids, response_mask = place(responses, width_w, left_w, 3)
    fields = {}
    for name in (*FIELDS, "topk_ids", "teacher_topk_logprobs"):
        rows = [getattr(sample, name) for sample in samples]
        if rows and rows[0] is not None:
            fields[name] = place(rows, width_w, left_w, 0 if name == "topk_ids" else poison)[0]
    return from_padded(
        prompt_ids.astype(np.int64),
        prompt_mask,
        response_ids.astype(np.int64),
        response_mask,
        groups=batch.groups,
        temperature=batch.temperatures.tolist(),
        policy_versions=[sample.policy_version for sample in samples],
        fields=fields,
    )


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 3), st.sampled_from(["left", "right", "middle"]), st.sampled_from([np.nan, np.inf, 1e30]))
def test_any_layout_packs_to_the_same_batch(batch: Batch, extra: int, side: str, poison: float) -> None:
    left = {"left": lambda room: room, "right": lambda room: 0, "middle": lambda room: room // 2}[side]
    result = padded(batch, left, extra, poison)
    for name in ("token_ids", "cu_seqlens", "prompt_lengths", "temperatures", *(FIELDS if len(batch) else ())):
        assert np.array_equal(getattr(result.batch, name), getattr(batch, name)), name
    for name in ("policy_versions", "topk_ids", "teacher_topk_logprobs"):
        if getattr(batch, name) is not None:
            assert np.array_equal(getattr(result.batch, name), getattr(batch, name)), name
    assert result.batch.groups == batch.groups


@settings(max_examples=40, deadline=None)
@given(batches(), st.integers(0, 3), st.booleans())
def test_results_go_back_to_their_places(batch: Batch, extra: int, matrix: bool) -> None:
    layout = padded(batch, lambda room: room, extra, 0.0)
    size = batch.num_response_tokens
    values = np.arange(size * 2, dtype=np.float32).reshape(size, 2) if matrix else np.arange(size, dtype=np.float32)
    back = layout.pad(values, fill=-7.0)
    assert np.array_equal(layout.unpad(back), values)
    assert (back[~layout.response_mask_BW] == -7).all()


ONE = ([[1, 2]], [[1, 1]], [[3, 4, 5]], [[1, 1, 1]])


@pytest.mark.parametrize(
    ("index", "value", "where"),
    [
        (0, [1, 2], "prompt_ids"),
        (0, [[1.0, 2.0]], "prompt_ids"),
        (1, [[1, 1, 1]], "prompt_mask"),
        (1, [[0, 0]], "batch.prompt_lengths"),
        (2, [[3, 4, 5], [3, 4, 5]], "response_mask"),
        (3, [[1, 0, 1]], "response_mask"),
        (3, [[1, 2, 1]], "response_mask"),
    ],
)
def test_what_is_refused(index: int, value: list, where: str) -> None:
    arguments = list(ONE)
    arguments[index] = value
    with pytest.raises(DataError) as caught:
        from_padded(*arguments, groups=[0])
    assert caught.value.where == where


def test_fields_must_be_known_and_fit() -> None:
    with pytest.raises(DataError, match=r"fields\.rewards"):
        from_padded(*ONE, groups=[0], fields={"rewards": [[1, 2, 3]]})
    with pytest.raises(DataError, match=r"fields\.advantages"):
        from_padded(*ONE, groups=[0], fields={"advantages": [[1, 2]]})
    layout = from_padded(*ONE, groups=[0])
    with pytest.raises(DataError, match="values"):
        layout.pad([1.0, 2.0])
    with pytest.raises(DataError, match="values"):
        layout.unpad([[1.0, 2.0]])


def test_what_is_no_array_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"batch\.temperatures"):
        from_padded(*ONE, groups=[0], temperature=[1.0, 0.5])
    with pytest.raises(DataError, match=r"fields\.advantages: is no array"):
        from_padded(*ONE, groups=[0], fields={"advantages": [[1, 2, 3], [1]]})
    with pytest.raises(DataError, match="response_mask: is no array"):
        from_padded(*ONE[:3], [[1, 1], [1]], groups=[0])
    assert from_padded(*ONE, groups=[0], temperature=np.float32(0.5)).batch.temperatures.tolist() == [0.5]
