"""Samples and batches: what they accept, what they refuse and how they say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_core.data import TOKEN_FIELDS, Batch, Sample
from arctic_core.errors import DataError


def sample(prompt: int = 2, response: int = 3, **fields: Any) -> Sample:
    return Sample(token_ids=np.arange(prompt + response), prompt_length=prompt, **fields)


def assert_equal(one: Sample, other: Sample) -> None:
    for name in Sample.__struct_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b
            assert type(a) is type(b)


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    """Ragged samples that agree on which fields they have; groups come interleaved."""
    fields = draw(st.sets(st.sampled_from(TOKEN_FIELDS)))
    versioned = draw(st.booleans())
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        prompt, response = draw(st.integers(1, 4)), draw(st.integers(0, 4))
        ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=prompt + response, max_size=prompt + response))
        numbers = st.lists(st.floats(width=32), min_size=response, max_size=response)
        rows.append(
            Sample(
                token_ids=ids,
                prompt_length=prompt,
                group=draw(st.integers(0, 2) | st.sampled_from(["a", "b"])),
                temperature=draw(st.sampled_from([0.5, 1.0, 1.25])),
                policy_version=draw(st.integers(0, 9)) if versioned else None,
                **{name: draw(numbers) for name in fields},
            )
        )
    return rows


# --- samples ------------------------------------------------------------------------------------------------------------


def test_a_sample_coerces_plain_python_and_numpy_scalars() -> None:
    row = Sample(
        token_ids=[1, 2, 3],
        prompt_length=np.int64(1),
        group=np.int32(7),
        temperature=np.float32(0.5),
        policy_version=np.int16(4),
        advantages=[1, 2],
        loss_mask=np.array([True, False]),
    )
    assert row.token_ids.dtype == np.int32
    assert row.advantages.dtype == row.loss_mask.dtype == np.float32
    scalars = (row.prompt_length, row.group, row.temperature, row.policy_version)
    assert [type(value) for value in scalars] == [int, int, float, int]
    assert row.response_ids.tolist() == [2, 3]
    assert row.response_length == 2


def test_an_empty_response_is_valid() -> None:
    row = Sample(token_ids=[5], prompt_length=1, advantages=[])
    assert row.response_length == 0
    assert len(row.advantages) == 0


@pytest.mark.parametrize(
    ("build", "where", "message"),
    [
        (lambda: Sample(token_ids=[[1]], prompt_length=1), "sample.token_ids", "one dimension"),
        (lambda: Sample(token_ids=3, prompt_length=1), "sample.token_ids", "one dimension"),
        (lambda: Sample(token_ids=[1.0], prompt_length=1), "sample.token_ids", "float64"),
        (lambda: Sample(token_ids=[True], prompt_length=1), "sample.token_ids", "bool"),
        (lambda: Sample(token_ids=["a"], prompt_length=1), "sample.token_ids", "expected integers"),
        (lambda: Sample(token_ids=[[1], [2, 3]], prompt_length=1), "sample.token_ids", "no array"),
        (lambda: Sample(token_ids=[2**31], prompt_length=1), "sample.token_ids", "int32"),
        (lambda: Sample(token_ids="text", prompt_length=1), "sample.token_ids", "is text"),
        (lambda: Sample(token_ids=[1, -100], prompt_length=1), "sample.token_ids", "-100 is negative"),
        (lambda: Sample(token_ids=[], prompt_length=1), "sample.prompt_length", "outside 1..0"),
        (lambda: sample(prompt=0), "sample.prompt_length", "0 is outside 1..3"),
        (lambda: Sample(token_ids=[1], prompt_length=2), "sample.prompt_length", "2 is outside 1..1"),
        (lambda: Sample(token_ids=[1], prompt_length=1.0), "sample.prompt_length", "expected an integer"),
        (lambda: sample(group=1.5), "sample.group", "expected an integer"),
        (lambda: sample(group=True), "sample.group", "expected an integer"),
        (lambda: sample(group=None), "sample.group", "expected an integer"),
        (lambda: sample(policy_version="1"), "sample.policy_version", "expected an integer"),
        *((lambda t=t: sample(temperature=t), "sample.temperature", "positive") for t in (0, -1, np.nan, np.inf, "1", True)),
        *((lambda n=n: sample(**{n: [1.0, 2.0]}), f"sample.{n}", r"\(2,\), expected \(3,\)") for n in TOKEN_FIELDS),
        (lambda: sample(advantages=[[1], [2], [3]]), "sample.advantages", r"\(3, 1\), expected \(3,\)"),
        (lambda: sample(advantages=["a", "b", "c"]), "sample.advantages", "expected numbers"),
        (lambda: sample(advantages=[1j, 2j, 3j]), "sample.advantages", "expected numbers"),
        (lambda: sample(advantages=[[1], [2, 3], []]), "sample.advantages", "no array"),
    ],
)
def test_a_malformed_sample_names_field_and_reason(build: Callable[[], Sample], where: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        build()
    assert caught.value.where == where


def test_replace_validates() -> None:
    row = sample()
    assert row.replace(advantages=[1, 2, 3]).advantages.tolist() == [1, 2, 3]
    with pytest.raises(DataError):
        row.replace(advantages=[1])
    with pytest.raises(AttributeError):
        row.prompt_length = 1  # type: ignore[misc]


def test_nan_is_carried_not_judged() -> None:
    assert np.isnan(sample(old_logprobs=[np.nan, np.inf, 0.0]).old_logprobs[0])


# --- batches ------------------------------------------------------------------------------------------------------------


@given(sample_lists())
def test_samples_come_back_from_a_batch(rows: list[Sample]) -> None:
    batch = Batch.from_samples(rows)
    assert len(batch) == len(rows)
    for got, want in zip(batch.samples(), rows, strict=True):
        assert_equal(got, want)
    for i in range(-len(rows), len(rows)):
        assert_equal(batch[i], rows[i])


@given(sample_lists(), st.data())
def test_select_is_a_list_of_samples(rows: list[Sample], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=8)) if rows else []
    batch = Batch.from_samples(rows)
    got = batch.select(chosen)
    assert len(got) == len(chosen)
    got.replace()  # checks it as if new
    assert len(batch) == len(rows)  # the original is left alone
    for row, i in zip(got.samples(), chosen, strict=True):
        assert_equal(row, rows[i])


@given(sample_lists())
def test_an_empty_selection_keeps_the_fields(rows: list[Sample]) -> None:
    batch = Batch.from_samples(rows)
    empty = batch.select([])
    assert len(empty) == empty.num_response_tokens == 0
    for name in (*TOKEN_FIELDS, "policy_versions"):
        assert (getattr(empty, name) is None) == (getattr(batch, name) is None)


def test_a_selection_checks_its_indices() -> None:
    batch = Batch.from_samples([sample(), sample()])
    for outside in (2, -3):
        with pytest.raises(IndexError, match=f"sample {outside} of a batch of 2"):
            batch.select([0, outside])
    with pytest.raises(IndexError):
        Batch.from_samples([]).select([0])
    for wrong in ([0.0], [True, False], [[0]]):
        with pytest.raises(DataError) as caught:
            batch.select(wrong)
        assert caught.value.where == "batch.select"


def test_a_selection_shares_no_memory() -> None:
    batch = Batch.from_samples([sample(advantages=[1, 2, 3])])
    batch.select([0]).advantages[:] = 9
    assert batch.advantages.tolist() == [1, 2, 3]


@given(sample_lists())
def test_offsets_lengths_and_split_agree(rows: list[Sample]) -> None:
    batch = Batch.from_samples(rows)
    assert batch.lengths.tolist() == [len(row.token_ids) for row in rows]
    assert batch.response_lengths.tolist() == [row.response_length for row in rows]
    assert batch.num_response_tokens == batch.cu_responses[-1] == sum(row.response_length for row in rows)
    values = np.arange(batch.num_response_tokens)
    parts = batch.split(values)
    assert [len(part) for part in parts] == batch.response_lengths.tolist()
    assert np.concatenate([*parts, []]).tolist() == values.tolist()


def test_groups_may_interleave() -> None:
    batch = Batch.from_samples([sample(group=g) for g in ("A", "B", "A")])
    assert batch.groups == ("A", "B", "A")
    assert batch.select([2, 0]).groups == ("A", "A")


def test_the_empty_batch() -> None:
    batch = Batch.from_samples([])
    assert (len(batch), batch.samples(), batch.groups, batch.split(np.zeros(0))) == (0, [], (), [])
    assert batch.cu_seqlens.tolist() == [0]


def test_an_absent_mask_means_all_ones() -> None:
    batch = Batch.from_samples([sample()])
    assert batch.mask.tolist() == [1, 1, 1]
    assert batch.replace(loss_mask=[0, 1, 0]).mask.tolist() == [0, 1, 0]


def test_indices_out_of_range() -> None:
    batch = Batch.from_samples([sample()])
    for index in (1, -2):
        with pytest.raises(IndexError):
            batch[index]


def join(*rows: Sample) -> Batch:
    return Batch.from_samples(rows)


def batch(**changes: Any) -> Batch:
    """Two samples of 2+3 and 1+0 tokens."""
    return join(sample(), sample(1, 0)).replace(**changes)


@pytest.mark.parametrize(
    ("build", "where", "message"),
    [
        (
            lambda: join(sample(), sample(advantages=[1, 2, 3])),
            "batch.advantages",
            "sample 0 has no advantages",
        ),
        (
            lambda: join(sample(policy_version=1), sample()),
            "batch.policy_versions",
            "sample 1 has no policy_version",
        ),
        (lambda: batch(token_ids=[1]), "batch.cu_seqlens", "do not cut 1 tokens into 2"),
        (lambda: batch(token_ids=[0, 1, 2, 3, 4, -1]), "batch.token_ids", "negative"),
        (lambda: batch(cu_seqlens=[0, 6]), "batch.cu_seqlens", "2 offsets do not cut 6 tokens into 2"),
        (lambda: batch(cu_seqlens=[]), "batch.cu_seqlens", "0 offsets"),
        (lambda: batch(cu_seqlens=[1, 5, 6]), "batch.cu_seqlens", "do not cut"),
        (lambda: batch(cu_seqlens=[0, 7, 6]), "batch.cu_seqlens", "do not cut"),
        (lambda: batch(cu_seqlens=[0.0, 5.0, 6.0]), "batch.cu_seqlens", "float64"),
        (lambda: batch(prompt_lengths=[2]), "batch.cu_seqlens", "into 1 samples"),
        (lambda: batch(prompt_lengths=[2, 0]), "batch.prompt_lengths", "sample 1 has prompt_length 0"),
        (lambda: batch(prompt_lengths=[6, 1]), "batch.prompt_lengths", "sample 0 has prompt_length 6 and 5 tokens"),
        (lambda: batch(groups=(1,)), "batch.groups", "1 group ids for 2 samples"),
        (lambda: batch(groups=(1, 2.5)), "batch.groups", "expected an integer"),
        (lambda: batch(temperatures=[1.0]), "batch.temperatures", r"\(1,\), expected \(2,\)"),
        (lambda: batch(temperatures=[1.0, 0.0]), "batch sample 1.temperature", "positive"),
        (lambda: batch(policy_versions=[1]), "batch.policy_versions", "1 versions for 2 samples"),
        *((lambda n=n: batch(**{n: [1.0]}), f"batch.{n}", r"\(1,\), expected \(3,\)") for n in TOKEN_FIELDS),
        (lambda: batch().split(np.zeros(4)), "batch.split", "4 values for 3 response tokens"),
    ],
)
def test_a_malformed_batch_names_field_and_reason(build: Callable[[], object], where: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        build()
    assert caught.value.where == where
