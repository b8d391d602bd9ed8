"""Whole models on packed forests equal each sample alone: hidden states, log-probs, entropy and every parameter's gradient."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from arctic_kernels.zorro.forest import PackedForest
from arctic_kernels.zorro.hf_layers import find_layers
from arctic_kernels.zorro.testing import (
    FAMILIES,
    Float64Throughout,
    Scores,
    gradients,
    random_samples,
    score_naive,
    score_packed,
    tiny_model,
)

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
DEPTHS = {family: 1 + i % 4 for i, family in enumerate(FAMILIES)}  # every depth for several families; Llama has all four

transformers.logging.set_verbosity_error()


def eager(family: str, dtype: torch.dtype) -> nn.Module:
    """With transformers' own plain attention, which samples alone are computed with."""
    try:
        model = tiny_model(family, dtype)
    except LookupError as error:
        pytest.skip(str(error))
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # grouped matrix products take no float64
    return model


def pack(samples: list[torch.Tensor], prompts: list[int]) -> PackedForest:
    return PackedForest.from_sequences(samples, prompts, min_shared_tokens=1)


def assert_same(
    naive: tuple[Scores, dict[str, torch.Tensor]], packed: tuple[Scores, dict[str, torch.Tensor]], atol: float
) -> None:
    (a, grads_a), (b, grads_b) = naive, packed
    for x, y in zip([*a.hidden, a.logprobs_R, a.entropy_R], [*b.hidden, b.logprobs_R, b.entropy_R], strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=atol)
    assert grads_a.keys() == grads_b.keys()
    for name in grads_a:
        torch.testing.assert_close(grads_b[name], grads_a[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def compare_exactly(model: nn.Module, samples: list[torch.Tensor], prompts: list[int], atol: float = 1e-10) -> PackedForest:
    forest = pack(samples, prompts)
    with Float64Throughout():
        naive = gradients(model, lambda: score_naive(model, samples, prompts))
        packed = gradients(model, lambda: score_packed(model, forest, "eager"))
    assert naive[1].keys() == {name for name, _ in model.named_parameters()}
    assert all(float(x.abs().max()) > 0 for x in naive[1].values())
    assert_same(naive, packed, atol)
    return forest


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_equals_each_sample_alone_in_float64(family: str) -> None:
    model = eager(family, torch.float64)
    forest = compare_exactly(model, *random_samples(DEPTHS[family], seed=1))
    assert forest.depth >= DEPTHS[family]
    assert (forest.tokens_saved > 0) == (DEPTHS[family] > 1)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next"])
def test_every_depth_of_forest_is_exact(family: str, depth: int) -> None:
    compare_exactly(eager(family, torch.float64), *random_samples(depth, seed=depth + 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_equals_transformers_own_eager_attention_in_float32(family: str) -> None:
    model = eager(family, torch.float32)
    samples, prompts = random_samples(3, seed=2)
    naive = gradients(model, lambda: score_naive(model, samples, prompts))
    packed = gradients(model, lambda: score_packed(model, pack(samples, prompts)))
    assert_same(naive, packed, 1e-5)


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_are_exact_for_nodes_longer_and_shorter_than_a_chunk_and_the_convolution(family: str) -> None:
    g = torch.Generator().manual_seed(3)
    one, two, long, short = (torch.randint(3, 61, (n,), generator=g) for n in (130, 64, 70, 1))
    samples = [torch.cat([one, x]) for x in (long, short, two[:1], torch.cat([two, short]), torch.cat([two, long]))]
    compare_exactly(eager(family, torch.float64), samples, [130, 130, 129, 130, 194])


def recurrent_rule(query, key, value, g, beta, initial_state):
    """The gated delta rule of one sequence, token by token."""
    query, key = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    state = value.new_zeros(1, *value.shape[2:3], key.shape[-1], value.shape[-1]) if initial_state is None else initial_state
    outs = []
    for t in range(value.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        change = (value[:, t] - torch.einsum("bhk,bhkv->bhv", key[:, t], state)) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], change)
        outs.append(torch.einsum("bhk,bhkv->bhv", query[:, t] * query.shape[-1] ** -0.5, state))
    return torch.stack(outs, dim=1), state


def exchange_rule(monkeypatch: pytest.MonkeyPatch, model: nn.Module, rule) -> None:
    """Where the layers find their chunked rule: on themselves or in their module."""
    for layer in find_layers(model).deltas:
        if hasattr(layer, "chunk_gated_delta_rule"):
            monkeypatch.setattr(layer, "chunk_gated_delta_rule", rule)
        else:
            monkeypatch.setattr(sys.modules[type(layer).__module__], "torch_chunk_gated_delta_rule", rule)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_delta_rule_for_variable_lengths_gives_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for kernels that take ``cu_seqlens``: one call for each level, nodes side by side without padding."""
    calls = []

    def variable_lengths(query, key, value, *, g, beta, cu_seqlens, initial_state, output_final_state, use_qk_l2norm_in_kernel):
        assert use_qk_l2norm_in_kernel
        calls.append(len(cu_seqlens) - 1)
        outs, states = [], []
        for i, (a, b) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
            initial = None if initial_state is None else initial_state[i : i + 1]
            out, state = recurrent_rule(*(x[:, a:b] for x in (query, key, value, g, beta)), initial)
            outs.append(out)
            states.append(state)
        return torch.cat(outs, dim=1), torch.cat(states) if output_final_state else None

    model = eager(family, torch.float64)
    samples, prompts = random_samples(3, seed=4)
    forest = pack(samples, prompts)
    with Float64Throughout():
        naive = gradients(model, lambda: score_naive(model, samples, prompts))
        exchange_rule(monkeypatch, model, variable_lengths)
        packed = gradients(model, lambda: score_packed(model, forest, "eager"))
    assert_same(naive, packed, 1e-10)
    assert len(calls) == 2 * forest.depth
    assert sum(calls) == 2 * forest.num_nodes


@settings(max_examples=15, deadline=None)
@given(data=st.data(), depth=st.integers(1, 4), seed=st.integers(0, 10_000), longest=st.integers(1, 6))
def test_any_forest_is_exact(data: st.DataObject, depth: int, seed: int, longest: int) -> None:
    family = data.draw(st.sampled_from(["qwen3", "qwen3_next", "gemma2"]))
    compare_exactly(eager(family, torch.float64), *random_samples(depth, seed=seed, longest=longest))


def test_samples_that_are_equal_are_computed_once_and_scored_twice() -> None:
    samples = [torch.arange(3, 20), torch.arange(3, 20), torch.arange(3, 12)]
    forest = compare_exactly(eager("qwen3_next", torch.float64), samples, [5, 9, 9])
    assert forest.num_tokens == 17
    assert forest.labels_R.shape == (12 + 8 + 0,)


def test_a_model_trains_on_packed_logits_of_the_predicting_rows_only() -> None:
    """``logits_to_keep`` takes the rows of the forest, so that logits of prompt tokens are never made."""
    from arctic_kernels.zorro.hf import use_forest

    model = eager("llama", torch.float64)
    samples, prompts = random_samples(2, seed=5)
    forest = pack(samples, prompts)
    with torch.no_grad(), Float64Throughout():
        whole = score_packed(model, forest, "eager")
        with use_forest(model, forest, "eager"):
            logits_PV = model(input_ids=forest.token_ids, logits_to_keep=forest.rows_P).logits[0]
    assert len(logits_PV) == len(forest.rows_P) < forest.num_tokens
    logprobs_R = logits_PV.log_softmax(-1)[forest.row_of_R, forest.labels_R]
    torch.testing.assert_close(logprobs_R, whole.logprobs_R, rtol=0, atol=1e-12)
