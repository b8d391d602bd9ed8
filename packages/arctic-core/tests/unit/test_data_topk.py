"""The fields with K entries per response token."""

import numpy as np
import pytest

from arctic_core import wire
from arctic_core.data import Batch, Sample
from arctic_core.errors import DataError


def sample(length: int = 3, width: int = 2, seed: int = 0, **changes) -> Sample:
    rng = np.random.default_rng(seed)
    values = {
        "token_ids": rng.integers(0, 50, 2 + length),
        "prompt_length": 2,
        "topk_ids": np.argsort(rng.random((length, 50)), axis=1)[:, :width],
        "teacher_topk_logprobs": -rng.random((length, width)),
        "teacher_logprobs": -rng.random(length),
    }
    return Sample(**{**values, **changes})


def test_a_batch_keeps_them_per_sample() -> None:
    samples = [sample(3, seed=1), sample(0, seed=2), sample(1, seed=3)]
    batch = Batch.from_samples(samples)
    assert batch.topk_ids.shape == batch.teacher_topk_logprobs.shape == (4, 2)
    assert batch.topk_ids.dtype == np.int32
    for original, copy in zip(samples, batch.samples(), strict=True):
        for name in ("topk_ids", "teacher_topk_logprobs", "teacher_logprobs"):
            assert np.array_equal(getattr(original, name), getattr(copy, name))
    chosen = batch.select([2, 0])
    assert np.array_equal(chosen.topk_ids, np.concatenate([samples[2].topk_ids, samples[0].topk_ids]))
    assert batch.select([]).topk_ids.shape == (0, 2)
    assert [part.shape for part in batch.split(batch.topk_ids)] == [(3, 2), (0, 2), (1, 2)]


def test_they_survive_the_wire() -> None:
    batch = Batch.from_samples([sample(3)])
    back = wire.decode(wire.encode(batch), Batch)
    assert np.array_equal(back.topk_ids, batch.topk_ids)
    assert np.array_equal(back.teacher_topk_logprobs, batch.teacher_topk_logprobs)


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"topk_ids": np.zeros((2, 2), int)}, "topk_ids", "expected (3, K)"),
        ({"topk_ids": np.zeros(3, int)}, "topk_ids", "expected (3, K)"),
        ({"topk_ids": np.zeros((3, 0), int)}, "topk_ids", "at least 1"),
        ({"topk_ids": np.full((3, 2), 4)}, "topk_ids", "names a token twice"),
        ({"topk_ids": [[1, 2], [1, 2], [1, -2]]}, "topk_ids", "negative"),
        ({"topk_ids": [[1.5, 2], [1, 2], [1, 2]]}, "topk_ids", "integers"),
        ({"topk_ids": None}, "teacher_topk_logprobs", "absent"),
        ({"teacher_topk_logprobs": np.zeros((3, 1))}, "teacher_topk_logprobs", "topk_ids has (3, 2)"),
        ({"teacher_topk_logprobs": np.full((3, 2), "x")}, "teacher_topk_logprobs", "numbers"),
        ({"teacher_logprobs": np.zeros(2)}, "teacher_logprobs", "expected (3,)"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict, where: str, says: str) -> None:
    with pytest.raises(DataError) as caught:
        sample(**changes)
    assert caught.value.where == f"sample.{where}"
    assert says in caught.value.message


def test_samples_of_different_width_make_no_batch() -> None:
    with pytest.raises(DataError, match="width"):
        Batch.from_samples([sample(3, width=2), sample(3, width=4)])
