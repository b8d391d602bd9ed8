"""``use_forest`` as a context: what it changes and restores, checkpointing, and which models and calls it refuses."""

from __future__ import annotations

import gc
import re
import runpy
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from arctic_kernels.zorro.attention.eager import EagerKernel
from arctic_kernels.zorro.errors import UnsupportedLayerError, ZorroError
from arctic_kernels.zorro.forest import PackedForest
from arctic_kernels.zorro.hf import FOREST_ATTENTION, check_model, use_forest
from arctic_kernels.zorro.testing import FAMILIES, gradients, random_samples, score_naive, score_packed, tiny_model
from arctic_kernels.zorro.verify import verify_model

ROOT = Path(__file__).parents[3]

transformers.logging.set_verbosity_error()


def a_forest(depth: int = 3, seed: int = 0, longest: int = 9) -> PackedForest:
    return PackedForest.from_sequences(*random_samples(depth, seed=seed, longest=longest), min_shared_tokens=1)


def state_of(model: nn.Module) -> list[object]:
    """What ``use_forest`` may change."""
    implementations = [x.config._attn_implementation for x in model.modules() if hasattr(x, "config")]
    hooks = [len(x._forward_pre_hooks) for x in model.modules()]
    attributes = [sorted(name for name in vars(x) if name != "_arctic_forest_layers") for x in model.modules()]
    functions = [vars(x).get("_gradient_checkpointing_func") for x in model.modules()]
    return [implementations, hooks, attributes, functions]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_leaving_the_block_restores_the_model_also_after_an_error(family: str) -> None:
    model = tiny_model(family)
    model.gradient_checkpointing_enable()
    before = state_of(model)
    with use_forest(model, a_forest()):
        assert model.config._attn_implementation == FOREST_ATTENTION
        assert state_of(model) != before
    assert state_of(model) == before
    with pytest.raises(RuntimeError, match="on purpose"), use_forest(model, a_forest()):
        raise RuntimeError("on purpose")
    assert state_of(model) == before


def test_a_model_that_ran_on_a_forest_can_be_freed() -> None:
    model = tiny_model("llama")
    with use_forest(model, a_forest()):
        pass
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_blocks_can_be_nested_and_the_inner_forest_counts() -> None:
    model, outer, inner = tiny_model("qwen3_next"), a_forest(2, seed=1), a_forest(3, seed=2)
    with torch.no_grad():
        alone = [score_packed(model, x).logprobs_R for x in (outer, inner)]
        before = state_of(model)
        with use_forest(model, outer):
            nested = score_packed(model, inner).logprobs_R
            again = model(input_ids=outer.token_ids).logits[0, outer.rows_P[outer.row_of_R]]
    torch.testing.assert_close(nested, alone[1], rtol=0, atol=0)
    again = again.log_softmax(-1).gather(1, outer.labels_R.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(again, alone[0], rtol=0, atol=0)
    assert state_of(model) == before


def test_the_decoder_and_wrappers_of_the_model_can_be_called_too() -> None:
    model, forest = tiny_model("llama"), a_forest()
    wrapper = nn.Sequential(model)
    with torch.no_grad():
        expected = score_packed(model, forest)
        with use_forest(wrapper, forest):
            hidden_TD = model.model(input_ids=forest.token_ids).last_hidden_state[0]
    for b, states in enumerate(expected.hidden):
        torch.testing.assert_close(hidden_TD[torch.as_tensor(forest.sample_rows(b))], states, rtol=0, atol=0)


def test_position_ids_are_the_forests_unless_others_are_given() -> None:
    model, forest = tiny_model("llama"), a_forest()
    with torch.no_grad(), use_forest(model, forest):
        left_out = model(input_ids=forest.token_ids).logits
        given = model(input_ids=forest.token_ids, position_ids=forest.position_ids).logits
        shifted = model(input_ids=forest.token_ids, position_ids=2 * forest.position_ids).logits
    torch.testing.assert_close(left_out, given, rtol=0, atol=0)
    assert not torch.allclose(shifted, given, atol=1e-3)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "qwen3_next", "qwen3_5"])
def test_gradients_with_checkpointing_are_the_same_when_backward_comes_after_the_block(family: str, reentrant: bool) -> None:
    model = tiny_model(family)
    samples, prompts = random_samples(3, seed=3)
    forest = PackedForest.from_sequences(samples, prompts, min_shared_tokens=1)
    _, plain = gradients(model, lambda: score_packed(model, forest))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    _, recomputed = gradients(model, lambda: score_packed(model, forest))  # backward runs outside the block
    assert plain.keys() == recomputed.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(recomputed[name], grad, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def scored(model: nn.Module, forest: PackedForest, *, keep: bool) -> torch.Tensor:
    """A loss whose gradients reach every parameter."""
    with use_forest(model, forest, "eager", keep_attention=keep):
        return model(input_ids=forest.token_ids).logits.square().mean()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss", "qwen3_next"])
def test_kept_attention_is_computed_once_and_changes_no_gradient(
    family: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    compute = EagerKernel.forward
    monkeypatch.setattr(EagerKernel, "forward", lambda *args: calls.append(1) or compute(*args))
    model, forest = tiny_model(family), a_forest(3, seed=3)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    counts, found = [], []
    for keep in (False, True):
        calls.clear()
        model.zero_grad(set_to_none=True)
        scored(model, forest, keep=keep).backward()
        counts.append(len(calls))
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert counts[0] == 2 * counts[1] > 0
    for kept, computed in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(kept, computed, rtol=0, atol=0)


def test_kept_attention_may_be_differentiated_again_and_belongs_to_one_forward_pass() -> None:
    model, forest = tiny_model("qwen3"), a_forest(3, seed=3)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    first, second = scored(model, forest, keep=True), scored(model, forest, keep=True)
    parameter = model.model.layers[0].self_attn.q_proj.weight
    once = torch.autograd.grad(first, parameter, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(first, parameter)[0], once, rtol=0, atol=0)
    torch.testing.assert_close(torch.autograd.grad(second, parameter)[0], once, rtol=0, atol=0)


def test_layers_in_torchs_checkpoint_wrapper_are_recomputed_on_the_forest() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    model, forest = tiny_model("llama"), a_forest()
    _, plain = gradients(model, lambda: score_packed(model, forest))
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(
            layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, checkpoint_fn=checkpoint, use_reentrant=False
        )
    _, recomputed = gradients(model, lambda: score_packed(model, forest))
    for name, grad in recomputed.items():
        torch.testing.assert_close(grad, plain[name.replace("_checkpoint_wrapped_module.", "")], rtol=0, atol=1e-6)


def saved_bytes(model: nn.Module, forest: PackedForest) -> int:
    """Bytes of distinct storages that the forward pass keeps for the backward pass, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), x)
        return x

    with saved_tensors_hooks(pack, lambda x: x), use_forest(model, forest, "eager"):
        model(input_ids=forest.token_ids)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_checkpointing_keeps_less_for_the_backward_pass(family: str) -> None:
    changes = {"layer_types": ["linear_attention", "full_attention"] * 3} if family == "qwen3_next" else {}
    model, forest = tiny_model(family, num_hidden_layers=6, **changes), a_forest(3, longest=30)
    whole = saved_bytes(model, forest)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert saved_bytes(model, forest) < 0.25 * whole


def test_packing_keeps_less_for_the_backward_pass_than_samples_alone() -> None:
    model = tiny_model("llama")
    samples = [torch.cat([torch.arange(3, 53), torch.arange(4) + 7 * i]) for i in range(8)]
    shared = PackedForest.from_sequences(samples, [50] * 8, min_shared_tokens=1)
    alone = PackedForest.from_sequences(samples, [50] * 8, share="none")
    assert (shared.num_tokens, alone.num_tokens) == (50 + 8 * 4, 8 * 54)
    assert saved_bytes(model, shared) < 0.3 * saved_bytes(model, alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": True}, "attention_mask under use_forest"),
        ({"use_cache": True}, "use_cache=True"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values under use_forest"),
    ],
)
def test_calls_with_padding_or_a_cache_are_refused(options: dict[str, object], message: str) -> None:
    model, forest = tiny_model("llama"), a_forest()
    if "attention_mask" in options:
        options = {"attention_mask": torch.ones_like(forest.token_ids)}
    with pytest.raises(ZorroError, match=message), use_forest(model, forest):
        model(input_ids=forest.token_ids, **options)


def test_inputs_of_another_shape_than_the_forest_are_refused() -> None:
    model, forest = tiny_model("llama"), a_forest()
    with pytest.raises(ZorroError, match=r"pass forest\.token_ids"), use_forest(model, forest):
        model(input_ids=forest.token_ids[:, 1:])


def test_attention_dropout_is_refused() -> None:
    model, forest = tiny_model("llama", attention_dropout=0.5), a_forest()
    with pytest.raises(UnsupportedLayerError, match="drops attention weights"), use_forest(model, forest):
        model(input_ids=forest.token_ids)
    model.eval()
    with torch.no_grad(), use_forest(model, forest):
        model(input_ids=forest.token_ids)


SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}
REFUSED = [
    ("Mamba", {**SMALL, "state_size": 4}, "MambaMixer.*carries a state"),
    ("Mamba2", {**SMALL, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}, "Mamba2Mixer.*carries a state"),
    ("Bloom", {**SMALL, "n_head": 4, "n_layer": 2}, "BloomAttention.*ALiBi"),
    ("Llama4", {**HEADS, "head_dim": 8}, "chunked_attention"),
    (
        "Lfm2",
        {**HEADS, "layer_types": ["conv", "full_attention"]},
        "Lfm2ShortConv.*carries a state",
    ),
    ("RecurrentGemma", {**SMALL, "num_attention_heads": 4, "lru_width": 32}, "carries a state"),
    ("MiniMax", {**HEADS}, "MiniMaxLightningAttention.*AttentionInterface"),
]


@pytest.mark.parametrize(("prefix", "options", "message"), REFUSED, ids=[x[0] for x in REFUSED])
def test_models_with_other_layers_are_refused_by_name(prefix: str, options: dict[str, object], message: str) -> None:
    config = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    model = getattr(transformers, f"{prefix}ForCausalLM")(config(**options))
    with pytest.raises(UnsupportedLayerError, match=message):
        check_model(model)


def test_bidirectional_models_are_refused() -> None:
    model = transformers.BertModel(
        transformers.BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    )
    with pytest.raises(UnsupportedLayerError, match=r"BertSelfAttention.*bidirectional"):
        check_model(model)


def test_encoder_decoder_models_and_models_of_other_libraries_are_refused() -> None:
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    )
    with pytest.raises(UnsupportedLayerError, match="encoder-decoder"):
        check_model(t5)
    with pytest.raises(UnsupportedLayerError, match="holds no transformers model"):
        check_model(nn.Linear(2, 2))


def test_a_model_without_use_forest_still_runs_as_before() -> None:
    model = tiny_model("qwen3_next")
    samples, prompts = random_samples(2, seed=6)
    with torch.no_grad():
        before = score_naive(model, samples, prompts).logprobs_R
        score_packed(model, PackedForest.from_sequences(samples, prompts, min_shared_tokens=1))
        after = score_naive(model, samples, prompts).logprobs_R
    torch.testing.assert_close(before, after, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next"])
def test_verification_of_a_model_passes_and_leaves_it_as_it_was(family: str) -> None:
    model = tiny_model(family, max_position_embeddings=512)
    model.lm_head.eval()
    assert verify_model(model) < 1e-5
    assert model.training
    assert not model.lm_head.training


def test_verification_finds_a_layer_that_mixes_tokens_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    norm = model.model.layers[0].input_layernorm
    original = norm.forward
    monkeypatch.setattr(norm, "forward", lambda x: original(x + x.roll(1, dims=1)))
    check_model(model)
    with pytest.raises(ZorroError, match="LlamaModel gives other hidden states"):
        verify_model(model)


def test_the_example_prints_savings_and_small_differences(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("arctic_kernels.zorro.head")
    runpy.run_path(str(ROOT / "examples" / "zorro" / "standalone.py"), run_name="__main__")
    printed = capsys.readouterr().out
    saved, logprob, gradient = printed.splitlines()
    assert saved == (ROOT / "docs" / "kernels" / "zorro_example.txt").read_text().splitlines()[0]
    assert float(logprob.split()[-1]) < 1e-5
    assert float(gradient.split()[-1]) < 1e-5


def test_the_table_of_models_in_the_documentation_is_the_list_that_is_tested() -> None:
    page = (ROOT / "docs" / "kernels" / "zorro.md").read_text()
    table = page.split("| model | layers |")[1].split("\n\n")[0]
    names = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")]
    assert sorted(names) == sorted(FAMILIES)
