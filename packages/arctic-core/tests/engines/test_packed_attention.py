"""Packed attention and scoring against ordinary forwards, one per sample, in value and gradient."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3Config, Qwen3ForCausalLM

from arctic_core.data import Batch, Sample
from arctic_core.errors import UnsupportedModelError
from arctic_core.models.factory import load_causal_lm
from arctic_core.models.packed_attention import PACKED_ATTENTION, packed_attention
from arctic_core.models.scoring import ScoringModule, pack

SHAPES = [(5, 4), (1, 0), (1, 1), (3, 17), (7, 0), (2, 1)]


def make_batch(shapes: list[tuple[int, int]] = SHAPES, seed: int = 0, **fields: float) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch.from_samples(
        Sample(token_ids=rng.integers(0, 512, prompt + response), prompt_length=prompt, **fields) for prompt, response in shapes
    )


def dense_scores(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies from one ordinary forward per sample."""
    logprobs, entropies = [], []
    for sample in batch.samples():
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        scores = (model(ids).logits[0] / sample.temperature).log_softmax(-1)
        rows = slice(sample.prompt_length - 1, len(sample.token_ids) - 1)
        logprobs.append(scores[rows].gather(1, ids[0, sample.prompt_length :, None])[:, 0])
        entropies.append(-(scores[rows].exp() * scores[rows]).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradient(model: torch.nn.Module, scores: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 2, len(scores[0]), dtype=torch.float64)
    model.zero_grad()
    (weights * scores[0] + weights.flip(0) * scores[1]).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def pair(directory: str, config_changes: dict) -> tuple[Qwen3ForCausalLM, Qwen3ForCausalLM]:
    """The same weights in float64 with packed attention and with transformers' own (whose eager form rounds to float32)."""
    config = Qwen3Config.from_pretrained(directory)
    for name, value in config_changes.items():
        setattr(config, name, value)
    models = []
    for implementation in (PACKED_ATTENTION, "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=torch.float64, attn_implementation=implementation
        )
        models.append(model)
    return models[0], models[1]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
    ],
    ids=["full", "sliding"],
)
def test_equals_one_forward_per_sample_in_value_and_gradient(tiny_model: str, changes: dict, checkpointing: bool) -> None:
    packed, plain = pair(tiny_model, changes)
    if checkpointing:
        packed.gradient_checkpointing_enable({"use_reentrant": False})
    packed.train()
    batch = make_batch(temperature=0.7)
    actual, expected = ScoringModule(packed)(pack(batch, "cpu"), True)[:2], dense_scores(plain, batch)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)
    mine, theirs = gradient(packed, actual), gradient(plain, expected)
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-8, msg=name)


def test_the_sliding_window_matters(tiny_model: str) -> None:
    """Guards the test above: a window of 6 does change the scores of a sample of 20 tokens."""
    full, _ = pair(tiny_model, {})
    sliding, _ = pair(
        tiny_model, {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
    )
    inputs = pack(make_batch(), "cpu")
    assert (ScoringModule(full)(inputs)[0] - ScoringModule(sliding)(inputs)[0]).abs().max() > 1e-3


def test_float32_scores_agree_with_eager(tiny_tied_model: str) -> None:
    model = load_causal_lm(tiny_tied_model, dtype="float32", device="cpu")
    eager = AutoModelForCausalLM.from_pretrained(tiny_tied_model, dtype=torch.float32, attn_implementation="eager")
    batch = make_batch()
    with torch.no_grad():
        logprobs_R, entropy_R, *_ = ScoringModule(model)(pack(batch, "cpu"), True)
        expected = dense_scores(eager, batch)
    torch.testing.assert_close(logprobs_R, expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy_R, expected[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shapes", [[], [(4, 0), (1, 0)]], ids=["no samples", "no responses"])
def test_without_response_tokens_every_parameter_gets_a_zero_gradient(tiny_model: str, shapes: list) -> None:
    """ZeRO-3 needs a backward pass on every rank, also on one without work."""
    model = load_causal_lm(tiny_model, dtype="float32", device="cpu")
    logprobs_R, entropy_R, *_ = ScoringModule(model)(pack(make_batch(shapes), "cpu"), True)
    assert logprobs_R.shape == entropy_R.shape == (0,)
    (logprobs_R.sum() + entropy_R.sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_temperature_override_replaces_the_samples_own(tiny_model: str) -> None:
    scorer = ScoringModule(load_causal_lm(tiny_model, dtype="float32", device="cpu"))
    warm = scorer(pack(make_batch(temperature=1.7), "cpu"))[0]
    assert torch.equal(scorer(pack(make_batch(temperature=0.3), "cpu", temperature=1.7))[0], warm)
    assert not torch.equal(scorer(pack(make_batch(temperature=0.3), "cpu"))[0], warm)


def test_attention_refuses_what_it_cannot_do() -> None:
    layer = torch.nn.Module()
    q = torch.randn(1, 4, 6, 8)
    for extra, text in (
        ({}, "offsets"),
        ({"cu_seqlens": (0, 6), "s_aux": torch.zeros(4)}, "attention sinks"),
        ({"cu_seqlens": (0, 6), "softcap": 50.0}, "soft-capped"),
        ({"cu_seqlens": (0, 6), "dropout": 0.1}, "dropout"),
        ({"cu_seqlens": (0, 6), "is_causal": False}, "not causal"),
    ):
        with pytest.raises(UnsupportedModelError, match=text):
            packed_attention(layer, q, q, q, None, **extra)


def test_attention_sinks_are_refused_at_load(tmp_path: object) -> None:
    """gpt-oss passes sinks to its attention function; the load itself finds out."""
    config = GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="attention sinks"):
        load_causal_lm(str(tmp_path), dtype="float32", device="cpu")
