"""What names a loss: built-in and plugin names, options, and dotted names where they are allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from arctic_core.config import ArcticRLClientConfig
from arctic_core.config.losses import GRPOLossConfig
from arctic_core.errors import ConfigError, DataError
from arctic_core.losses.base import prepare_loss
from arctic_core.losses.named import find_loss, named_loss
from arctic_core.plugins.manager import PluginRegistry
from arctic_core.protocol import NamedLoss

MODULE = """
from arctic_core.config import ConfigModel
from arctic_core.losses.base import LossDefinition, LossOutput

class Options(ConfigModel):
    weight: float = 1.0

def plain(inputs, config):
    return LossOutput(-inputs.logprobs_R[inputs.mask_R].sum())

def weighted(inputs, config):
    return LossOutput(-config.weight * inputs.logprobs_R[inputs.mask_R].sum())

defined = LossDefinition("defined", Options, weighted, requires=("advantages",), normalization="sequence")
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_losses.py").write_text(MODULE)
    (tmp_path / "broken_losses.py").write_text("raise RuntimeError('at import')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_losses", raising=False)
    return "users_losses"


def test_operators_must_allow_imports() -> None:
    assert not ArcticRLClientConfig(model_name="m", training_gpus=1).training.allow_loss_import


def test_a_dotted_name_is_not_imported_unless_allowed(module: str) -> None:
    with pytest.raises(ConfigError, match="does not import losses by dotted name") as caught:
        find_loss(f"{module}:plain")
    assert "training.allow_loss_import" in caught.value.remedy
    assert "users_losses:plain" in caught.value.where
    assert module not in sys.modules


def test_a_function_and_a_definition_by_dotted_name(module: str) -> None:
    plain = find_loss(f"{module}:plain", allow_import=True)
    assert plain.name == "users_losses:plain"
    assert prepare_loss(plain, NamedLoss(name=plain.name)).normalization == "token"
    with pytest.raises(ConfigError, match="weight: unknown key"):
        prepare_loss(plain, NamedLoss(name=plain.name, options={"weight": 2.0}))
    defined = find_loss(f"{module}:defined", allow_import=True)
    prepared = prepare_loss(defined, NamedLoss(name=f"{module}:defined", options={"weight": 2.0}))
    assert (prepared.config.weight, prepared.required, prepared.normalization) == (2.0, ("advantages",), "sequence")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("users_losses:number", "is a int, neither"),
        ("users_losses:Options", "is a .*, neither"),
        ("users_losses:", "is a module, neither"),
        ("users_losses:absent", "has no attribute 'absent'"),
        ("no_such_module:loss", "No module named"),
        ("broken_losses:loss", "RuntimeError: at import"),
        (":loss", "cannot be imported"),
        ("a b:loss", "cannot be imported"),
    ],
)
def test_what_is_no_loss_is_named(module: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        find_loss(name, allow_import=True)
    assert name in caught.value.where


def test_other_names_are_the_registrys(module: str) -> None:
    assert find_loss("grpo").name == "grpo"
    with pytest.raises(ConfigError, match="no loss named 'grpo'"):
        find_loss("grpo", registry=PluginRegistry([]))
    with pytest.raises(ConfigError, match=r"no loss named 'users_losses\.plain'"):
        find_loss("users_losses.plain", allow_import=True)


def test_names_and_options_become_messages() -> None:
    whole = NamedLoss(name="sft", normalization="sequence")
    assert named_loss(whole) is whole
    assert named_loss("sapo").name == "sapo"
    config = GRPOLossConfig(clip_high=0.4)
    message = named_loss(config)
    assert prepare_loss(find_loss(message.name), message).config == config
    for wrong in (3, GRPOLossConfig, ArcticRLClientConfig(model_name="m", training_gpus=1)):
        with pytest.raises(DataError, match="expected a NamedLoss") as caught:
            named_loss(wrong, "here")  # type: ignore[arg-type]
        assert caught.value.where == "here"
        assert ("got the class GRPOLossConfig" in str(caught.value)) == (wrong is GRPOLossConfig)


def test_naming_and_finding_losses_needs_no_torch() -> None:
    program = "import sys; from arctic_core.losses.named import find_loss; find_loss('grpo'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
