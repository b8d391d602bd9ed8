"""Scoring of packed rows: candidates beside the response tokens, and the output layer in chunks for any architecture."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from arctic_core.config import ArcticRLClientConfig
from arctic_core.data import Batch, Sample
from arctic_core.errors import DataError
from arctic_core.models.factory import load_causal_lm, manifest_of
from arctic_core.models.scoring import ScoringModule, pack
from arctic_kernels.head import DEFAULT_BUDGET_BYTES

LENGTHS = [(5, 4), (1, 0), (1, 3), (7, 2)]


def make_batch(width: int | None = None, **fields: float) -> Batch:
    rng = np.random.default_rng(0)
    samples = []
    for prompt, response in LENGTHS:
        ids = np.argsort(rng.random((response, 512)), axis=1)[:, :width].astype(np.int32)
        extra = fields if width is None else {**fields, "topk_ids": ids}
        samples.append(Sample(token_ids=rng.integers(0, 512, prompt + response), prompt_length=prompt, **extra))
    return Batch.from_samples(samples)


@pytest.fixture
def scorer(tiny_model: str) -> ScoringModule:
    return ScoringModule(load_causal_lm(tiny_model, dtype="float32", device="cpu"))


def row_logits(scorer: ScoringModule, batch: Batch) -> torch.Tensor:
    """Logits of one ordinary forward, at the rows that predict response tokens, divided by the temperature."""
    inputs = pack(batch, "cpu")
    output = scorer.model(
        input_ids=inputs.token_ids_T, position_ids=inputs.position_ids_T, cu_seqlens=inputs.cu_seqlens, use_cache=False
    )
    return output.logits[0, inputs.rows_P].double() / inputs.temperatures_R.double()[:, None]


def test_given_candidates_in_value_and_gradient(scorer: ScoringModule) -> None:
    batch = make_batch(5, temperature=0.6)
    weights = torch.linspace(-0.2, 0.2, 9 * 5).reshape(9, 5)

    def gradients(candidates_RK: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad((weights * candidates_RK).sum(), list(scorer.parameters())))

    logprobs_R, entropy_R, candidates_RK, ids_RK = scorer(pack(batch, "cpu", topk_ids=True), True)
    expected_RV = row_logits(scorer, batch).log_softmax(-1)
    assert torch.equal(ids_RK, torch.from_numpy(batch.topk_ids).long())
    expected_RK = expected_RV.gather(1, ids_RK)
    torch.testing.assert_close(candidates_RK.double(), expected_RK, rtol=0, atol=1e-5)
    for mine, theirs in zip(gradients(candidates_RK), gradients(expected_RK), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    plain = scorer(pack(batch, "cpu"), True)
    assert plain[2] is None
    assert plain[3] is None
    assert torch.equal(plain[0], logprobs_R)
    assert torch.equal(plain[1], entropy_R)


def test_most_likely_tokens(scorer: ScoringModule) -> None:
    batch = make_batch(temperature=1.4)
    logprobs_R, entropy_R, candidates_RK, ids_RK = scorer(pack(batch, "cpu"), topk=7)
    expected = row_logits(scorer, batch).log_softmax(-1).topk(7, dim=-1)
    assert entropy_R is None
    assert logprobs_R.requires_grad
    assert not candidates_RK.requires_grad
    assert torch.equal(ids_RK, expected.indices)
    torch.testing.assert_close(candidates_RK.double(), expected.values, rtol=0, atol=1e-5)


def test_without_response_tokens_candidates_are_empty(scorer: ScoringModule) -> None:
    inputs = pack(Batch.from_samples([]), "cpu", topk_ids=True)
    _, _, candidates_RK, ids_RK = scorer(inputs)
    assert candidates_RK.shape == ids_RK.shape == (0, 0)
    _, _, candidates_RK, ids_RK = scorer(pack(Batch.from_samples([]), "cpu"), topk=4)
    assert candidates_RK.shape == ids_RK.shape == (0, 4)


def test_refusals(scorer: ScoringModule) -> None:
    with pytest.raises(DataError, match="no candidates"):
        pack(make_batch(), "cpu", topk_ids=True)
    for topk, batch in ((-1, make_batch()), (513, make_batch()), (2, make_batch(5))):
        with pytest.raises(DataError, match="topk"):
            scorer(pack(batch, "cpu", topk_ids=batch.topk_ids is not None), topk=topk)


SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES = {
    "llama": (lambda: transformers.LlamaConfig(**SIZES), 1.0),
    "tied": (lambda: transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True), 1.0),
    "bias": (lambda: transformers.PhiConfig(**SIZES), 1.0),
    "experts": (lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4), 1.0),
    "cohere": (lambda: transformers.CohereConfig(**SIZES, logit_scale=0.25), 0.25),
    "granite": (lambda: transformers.GraniteConfig(**SIZES, logits_scaling=6.0), 1 / 6),
    "soft-capped": (lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=8, final_logit_softcapping=0.2), None),
}


def make_scorer(config: transformers.PretrainedConfig, path: Path, dtype: str = "float32", **options: Any) -> ScoringModule:
    torch.manual_seed(0)
    config.initializer_range = 0.2
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return ScoringModule(load_causal_lm(str(path), dtype=dtype, device="cpu", **options), 2**20)


def gradients(scorer: ScoringModule, logprobs_R: torch.Tensor, entropy_R: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.linspace(-0.2, 0.1, len(logprobs_R))
    return list(torch.autograd.grad((weights * logprobs_R + weights.flip(0) * entropy_R).sum(), list(scorer.parameters())))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_equals_its_own_logits(name: str, checkpointing: bool, tmp_path: Path) -> None:
    """In chunks where the output layer is all there is but for a factor, by its own head elsewhere."""
    config, scale = ARCHITECTURES[name]
    scorer = make_scorer(config(), tmp_path, gradient_checkpointing=checkpointing)
    scorer.train()
    assert (scorer.head and pytest.approx(scorer.head.scale, rel=1e-6)) == scale
    if scorer.head is not None:
        scorer.head.budget_bytes = 3 * 512 * 9  # three rows at a time
    batch = make_batch(temperature=0.6)
    actual = scorer(pack(batch, "cpu"), True)[:2]
    logp_RV = row_logits(scorer, batch).log_softmax(-1)
    expected = (
        logp_RV.gather(1, pack(batch, "cpu").labels_R[:, None])[:, 0],
        torch.special.entr(logp_RV.exp()).sum(-1),
    )
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=2e-5)
    for mine, theirs in zip(gradients(scorer, *actual), gradients(scorer, *expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


def test_which_path_is_used_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="arctic_core.models.head"):
        make_scorer(ARCHITECTURES["granite"][0](), tmp_path / "a")
        make_scorer(ARCHITECTURES["soft-capped"][0](), tmp_path / "b")
    first, second = (record for record in caplog.records if record.name == "arctic_core.models.head")
    assert first.levelno == logging.INFO
    assert "GraniteForCausalLM scores in chunks" in first.getMessage()
    assert "0.166667" in first.getMessage()
    assert second.levelno == logging.WARNING
    assert "Gemma3ForCausalLM scores with whole logits" in second.getMessage()
    assert "multiply" in second.getMessage()


class Shifted(torch.nn.Linear):
    """An output layer that is more than its weight says."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 0.01 * torch.arange(self.out_features)


def wrong_rows(model: transformers.PreTrainedModel) -> None:
    """Feeds its output layer with more than the rows that are asked for."""
    inner = type(model).forward

    def forward(*args: Any, logits_to_keep: Any = slice(None), **kwargs: Any) -> Any:
        output = inner(model, *args, logits_to_keep=0, **kwargs)
        output.logits = output.logits[:, logits_to_keep]
        return output

    model.forward = forward


def hook(model: transformers.PreTrainedModel) -> None:
    """Changes what the output layer returns, unless it is the numbers of a probe: only a comparison of scores can notice."""
    head = model.lm_head
    head.register_forward_hook(
        lambda module, args, output: output.flip(-1) if output.shape[-1] == 512 and output.abs().max() < 1e3 else output
    )


def subclass(model: transformers.PreTrainedModel) -> None:
    model.lm_head.__class__ = Shifted


def masked(model: transformers.PreTrainedModel) -> None:
    """Forbids tokens after the output layer."""
    inner = type(model).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = inner(model, *args, **kwargs)
        output.logits = output.logits.index_fill(-1, torch.tensor([2, 3]), -1e9)
        return output

    model.forward = forward


@pytest.mark.parametrize("change", [wrong_rows, hook, subclass, masked])
def test_a_model_that_does_more_keeps_its_own_head(
    change: Callable[[transformers.PreTrainedModel], None], tiny_model: str
) -> None:
    model = load_causal_lm(tiny_model, dtype="float32", device="cpu")
    change(model)
    scorer = ScoringModule(model)
    assert scorer.head is None
    batch = make_batch()
    expected = row_logits(scorer, batch).log_softmax(-1).gather(1, pack(batch, "cpu").labels_R[:, None])[:, 0]
    torch.testing.assert_close(scorer(pack(batch, "cpu"))[0].double(), expected, rtol=0, atol=1e-5)


def test_bfloat16_scores(tmp_path: Path) -> None:
    """Against float64 log-probs of the hidden states that the bfloat16 model computes."""
    scorer = make_scorer(ARCHITECTURES["llama"][0](), tmp_path, "bfloat16")
    seen = []
    scorer.model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    batch = make_batch(temperature=0.5)
    with torch.no_grad():
        logprobs_R, entropy_R, *_ = scorer(pack(batch, "cpu"), True)
    logp_RV = (seen[0][0].double() @ scorer.model.lm_head.weight.double().T / 0.5).log_softmax(-1)
    expected = logp_RV.gather(1, pack(batch, "cpu").labels_R[:, None])[:, 0]
    torch.testing.assert_close(logprobs_R.double(), expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(entropy_R.double(), torch.special.entr(logp_RV.exp()).sum(-1), rtol=0, atol=1e-3)
    assert logprobs_R.dtype == torch.float32


def test_names_and_the_model_itself_stay(tiny_model: str) -> None:
    model = load_causal_lm(tiny_model, dtype="float32", device="cpu")
    before = manifest_of(model, "float32"), list(model.state_dict())
    inputs = pack(make_batch(), "cpu")
    scorer = ScoringModule(model)
    scorer(inputs)
    assert (manifest_of(model, "float32"), list(model.state_dict())) == before
    assert row_logits(scorer, make_batch()).shape == (9, 512)
    with pytest.raises(IndexError):  # also after a failure
        scorer.model(input_ids=inputs.token_ids_T + 10_000, position_ids=inputs.position_ids_T, cu_seqlens=inputs.cu_seqlens)
    assert "forward" not in vars(model.lm_head)


def test_the_budget_is_configured() -> None:
    config = ArcticRLClientConfig(model_name="m", training_gpus=1)
    assert config.training.head_budget_bytes == config.log_prob.head_budget_bytes == DEFAULT_BUDGET_BYTES


def test_whole_logits_never_exist(tmp_path: Path) -> None:
    """512 response tokens of a vocabulary of 8,000 make 16 MB of logits; nothing above the budget of 1 MiB is allocated."""
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 8_000, "hidden_size": 8, "num_hidden_layers": 1})
    scorer = make_scorer(config, tmp_path)
    batch = Batch.from_samples([Sample(token_ids=np.arange(129), prompt_length=1)] * 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        logprobs_R, entropy_R, *_ = scorer(pack(batch, "cpu"), True)
        (logprobs_R.sum() + entropy_R.sum()).backward()
    results: Any = profile.profiler
    sizes = [event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]"]
    assert 8_000 * 8 * 4 in sizes  # the gradient of the output layer: the measure sees what it should
    assert max(sizes) <= 2**20
