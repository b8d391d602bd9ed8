"""The receiver's transaction: every mismatch is named before a weight changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_core.errors import WeightSyncError
from arctic_core.sync.file import FileCarrier
from arctic_core.sync.plan import BucketRef, TensorMeta, WeightPlan
from arctic_core.sync.receiver import BucketStage, check_plan

EMBED = TensorMeta("embed", (4, 3), "float32")
HEAD = TensorMeta("head", (4, 3), "float32")
NORM = TensorMeta("norm", (3,), "float32")


def plan_of(*metas: TensorMeta, ties=(), bucket_bytes=64) -> WeightPlan:
    return WeightPlan.build(metas, ties, bucket_bytes)


def refusal(plan: WeightPlan, expected, ties=()) -> str:
    with pytest.raises(WeightSyncError) as caught:
        check_plan(plan, expected, ties)
    return caught.value.message


def test_a_matching_plan_maps_every_tensor():
    assert check_plan(plan_of(NORM, EMBED), (EMBED, NORM), ()) == (("norm", 0), ("embed", 1))


def test_everything_wrong_is_listed_at_once():
    plan = plan_of(
        dataclasses.replace(EMBED, shape=(3, 4)),
        dataclasses.replace(NORM, dtype="bfloat16"),
        TensorMeta("stranger", (1,), "float32"),
    )
    message = refusal(plan, (EMBED, NORM, HEAD))
    assert "embed: shape [3, 4], expected [4, 3]" in message
    assert "norm: dtype bfloat16, expected float32" in message
    assert "head: missing" in message
    assert "stranger: unexpected" in message


def test_a_long_list_is_cut_and_counted():
    expected = [TensorMeta(f"t{i}", (1,), "float32") for i in range(25)]
    assert "and 5 more" in refusal(plan_of(), expected)


@pytest.mark.parametrize(
    ("sent", "plan_ties"),
    [((EMBED,), (("head", "embed"),)), ((EMBED,), ()), ((HEAD,), (("embed", "head"),)), ((HEAD,), ())],
)
def test_a_tied_weight_may_travel_under_either_name(sent, plan_ties):
    assert check_plan(plan_of(*sent, ties=plan_ties), (EMBED,), (("head", "embed"),)) == (("embed", 0),)


def test_a_tie_only_the_sender_knows_serves_both_names():
    plan = plan_of(EMBED, ties=(("head", "embed"),))
    assert check_plan(plan, (EMBED, HEAD), ()) == (("embed", 0), ("head", 0))


def test_a_plan_that_lacks_both_names_of_a_tie_is_refused():
    assert "embed: missing (tied to head)" in refusal(plan_of(NORM), (EMBED, NORM), (("head", "embed"),))


def test_two_tensors_for_one_tied_weight_are_refused():
    message = refusal(plan_of(EMBED, HEAD), (EMBED,), (("head", "embed"),))
    assert message.endswith("embed: tied here, but sent as separate tensors embed, head")


def test_duplicates_and_broken_buckets_are_refused():
    assert "norm: sent twice" in refusal(plan_of(NORM, NORM), (NORM,))
    broken = dataclasses.replace(plan_of(NORM, EMBED), buckets=((0,),))
    assert "every tensor exactly once" in refusal(broken, (NORM, EMBED))


# --- the stage ----------------------------------------------------------------------------------------------------------


class Sender:
    """Publishes a plan's tensors through a file carrier, as a trainer does."""

    def __init__(self, folder, tensors: dict[str, torch.Tensor], bucket_bytes: int) -> None:
        self.tensors = list(tensors.values())
        metas = [
            TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()
        ]
        self.plan = WeightPlan.build(metas, (), bucket_bytes)
        self.carrier = FileCarrier(str(folder))

    def publish(self, index: int, *, checksums: bool = True) -> BucketRef:
        views = [memoryview(self.tensors[i].contiguous().flatten().view(torch.uint8).numpy()) for i in self.plan.buckets[index]]
        return self.carrier.publish(index, views, checksums=checksums)

    def stage(self) -> BucketStage:
        return BucketStage(self.plan, check_plan(self.plan, self.plan.tensors, ()), lambda name: FileCarrier())


@pytest.fixture
def sender(tmp_path):
    torch.manual_seed(0)
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(7).bfloat16(), "c": torch.randn(2, 2), "empty": torch.zeros(0, 4)}
    made = Sender(tmp_path, tensors, bucket_bytes=80)
    yield made
    made.carrier.release()


def test_a_stage_yields_the_senders_tensors_bit_for_bit(sender):
    assert len(sender.plan.buckets) == 2
    stage = sender.stage()
    for index in (1, 0):
        stage.push(sender.publish(index))
    stage.complete()
    got = dict(stage.tensors())
    assert list(got) == ["a", "b", "c", "empty"]
    for meta, tensor in zip(sender.plan.tensors, sender.tensors, strict=True):
        assert got[meta.name].dtype == tensor.dtype
        assert torch.equal(got[meta.name], tensor)
    del got
    stage.close()
    stage.close()


def test_tensors_stay_readable_after_the_sender_released(sender):
    stage = sender.stage()
    for index in (0, 1):
        stage.push(sender.publish(index))
    sender.carrier.release()
    assert torch.equal(dict(stage.tensors())["a"], sender.tensors[0])


def test_a_missing_bucket_is_named_with_its_tensors(sender):
    stage = sender.stage()
    stage.push(sender.publish(0))
    with pytest.raises(WeightSyncError, match=r"1 of 2 buckets never arrived \(\[1\]\), with c, empty"):
        stage.complete()


def test_unknown_and_repeated_buckets_are_refused(sender):
    stage = sender.stage()
    ref = sender.publish(0)
    stage.push(ref)
    with pytest.raises(WeightSyncError, match="pushed twice"):
        stage.push(ref)
    with pytest.raises(WeightSyncError, match="not in the plan"):
        stage.push(dataclasses.replace(ref, index=2))


def test_a_truncated_bucket_is_refused(sender):
    stage = sender.stage()
    short = sender.carrier.publish(1, [memoryview(b"1234567")], checksums=False)
    with pytest.raises(WeightSyncError, match="bucket 1 has 7 bytes, 16 were planned"):
        stage.push(short)


def test_a_wrong_checksum_names_the_tensor_and_stages_nothing(sender):
    stage = sender.stage()
    ref = sender.publish(0)
    assert ref.checksums is not None
    with pytest.raises(WeightSyncError, match="b: CRC-32"):
        stage.push(dataclasses.replace(ref, checksums=(ref.checksums[0], ref.checksums[1] ^ 1)))
    stage.push(ref)
    with pytest.raises(WeightSyncError, match="1 checksums for 2 tensors"):
        sender.stage().push(dataclasses.replace(ref, checksums=ref.checksums[:1]))


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["float32", "bfloat16", "int64", "bool"])), min_size=1, max_size=6
    ),
    bucket_bytes=st.integers(1, 64),
)
def test_any_mix_of_types_and_bucket_sizes_crosses(tmp_path_factory, shapes, bucket_bytes):
    tensors = {f"t{i}": torch.randint(0, 2, (size, 3)).to(getattr(torch, dtype)) for i, (size, dtype) in enumerate(shapes)}
    sender = Sender(tmp_path_factory.mktemp("any"), tensors, bucket_bytes)
    stage = sender.stage()
    for index in range(len(sender.plan.buckets)):
        stage.push(sender.publish(index))
    stage.complete()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in stage.tensors())
    sender.carrier.release()
