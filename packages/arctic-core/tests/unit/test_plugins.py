"""Plugins: what loads, what is refused and why, and how names are looked up."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from arctic_core.config import ConfigModel
from arctic_core.errors import ConfigError, PluginError
from arctic_core.losses.base import LossDefinition, LossOutput
from arctic_core.plugins import hookspecs
from arctic_core.plugins.hookspecs import ModelPatch, hookimpl
from arctic_core.plugins.manager import GROUP, HOOKS, PluginRegistry


class NoOptions(ConfigModel):
    """A loss without options."""


def make_loss(name: str) -> LossDefinition:
    return LossDefinition(name, NoOptions, lambda inputs, config: LossOutput(loss=inputs.logprobs_R.sum()))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Make an importable module of some attributes and return an entry point to it."""

    def put(name: str, **attributes: object) -> EntryPoint:
        module = types.ModuleType(f"plugin_{name}")
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return EntryPoint(name, module.__name__, GROUP)

    return put


def losses_hook(*names: str):
    @hookimpl
    def arctic_losses():
        return [make_loss(name) for name in names]

    return arctic_losses


def error_of(point: EntryPoint, *others: EntryPoint) -> str:
    """Why a plugin failed; it must have provided nothing, and the others all they have."""
    registry = PluginRegistry([*others, point])
    record = next(p for p in registry.plugins if p.name == point.name)
    assert record.provides == {}
    assert all(p.error is None for p in registry.plugins if p.name != point.name)
    assert record.error is not None
    return record.error


def test_every_hook_has_a_spec_and_a_definition_type():
    specs = {name for name, value in vars(hookspecs).items() if name.startswith("arctic_") and callable(value)}
    assert specs == set(HOOKS)


def test_the_built_in_parts_come_through_the_same_hooks():
    registry = PluginRegistry()
    builtin = next(p for p in registry.plugins if p.name == "builtin")
    assert builtin.error is None
    assert builtin.distribution.startswith("arctic-core ")
    assert {"torch", "deepspeed"} <= set(registry.names("arctic_trainers"))
    assert {"transformers", "vllm"} <= set(registry.names("arctic_samplers"))
    assert registry.trainer("torch").name == "torch"


def test_a_plugin_is_found_by_name(install):
    registry = PluginRegistry([install("good", arctic_losses=losses_hook("mine", "other"))])
    assert registry.plugins[0].provides == {"arctic_losses": ("mine", "other")}
    assert registry.loss("mine").name == "mine"
    registry.require_healthy()


def test_an_unknown_hook_is_refused(install):
    @hookimpl
    def arctic_looses():
        return []

    assert "arctic_looses" in error_of(install("typo", arctic_looses=arctic_looses))


def test_a_wrong_argument_is_refused(install):
    @hookimpl
    def arctic_losses(model):
        return []

    error = error_of(install("argument", arctic_losses=arctic_losses))
    assert "arctic_losses" in error
    assert "model" in error


def test_a_hook_without_the_mark_is_refused(install):
    def arctic_losses():
        return [make_loss("mine")]

    assert "not marked with @hookimpl" in error_of(install("unmarked", arctic_losses=arctic_losses))


@pytest.mark.parametrize("returned", [None, "mine", 3])
def test_a_hook_that_returns_no_sequence_is_refused(install, returned):
    @hookimpl
    def arctic_losses():
        return returned

    assert f"arctic_losses returned {returned!r}" in error_of(install("shape", arctic_losses=arctic_losses))


def test_a_definition_of_another_hook_is_refused(install):
    @hookimpl
    def arctic_losses():
        return [ModelPatch("patch", lambda model: True, lambda model: None)]

    assert "is not a LossDefinition" in error_of(install("kind", arctic_losses=arctic_losses))


def test_a_name_taken_by_another_plugin_is_refused_with_its_owner(install):
    first = install("a_first", arctic_losses=losses_hook("mine"))
    error = error_of(install("b_second", arctic_losses=losses_hook("new", "mine")), first)
    assert "'mine' is taken by plugin 'a_first'" in error
    registry = PluginRegistry([first, install("b_second", arctic_losses=losses_hook("new", "mine"))])
    assert registry.names("arctic_losses") == ("mine",)  # a refused plugin leaves nothing behind, "new" neither


def test_a_name_given_twice_by_one_plugin_is_refused(install):
    assert "'mine' twice" in error_of(install("twice", arctic_losses=losses_hook("mine", "mine")))


def test_a_plugin_that_raises_at_import_is_recorded_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "plugin_import.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "plugin_exit.py").write_text("raise SystemExit('no licence')\n")
    registry = PluginRegistry([EntryPoint("import", "plugin_import", GROUP), EntryPoint("exit", "plugin_exit", GROUP)])
    errors = {p.name: p.error for p in registry.plugins}
    assert "a_package_that_nobody_has" in str(errors["import"])
    assert errors["exit"] == "SystemExit: no licence"


def test_a_hook_that_raises_does_not_take_the_other_plugins_along(install):
    @hookimpl
    def arctic_losses():
        raise RuntimeError("out of luck")

    other = install("other", arctic_losses=losses_hook("mine"))
    assert error_of(install("raises", arctic_losses=arctic_losses), other) == "RuntimeError: out of luck"


def test_strict_mode_names_every_failed_plugin(install):
    registry = PluginRegistry([install("one", arctic_losses=losses_hook("x", "x")), EntryPoint("two", "plugin_two", GROUP)])
    with pytest.raises(PluginError, match=r"one \(unknown\).*'x' twice.*two \(unknown\).*plugin_two"):
        registry.require_healthy()


def test_a_lookup_lists_what_is_known_and_what_failed(install):
    registry = PluginRegistry([install("good", arctic_losses=losses_hook("b", "a")), EntryPoint("bad", "plugin_bad", GROUP)])
    with pytest.raises(ConfigError, match="no loss named 'c'") as caught:
        registry.loss("c")
    assert "known: a, b" in caught.value.remedy
    assert "bad: ModuleNotFoundError" in caught.value.remedy
    with pytest.raises(ConfigError, match="no training engine named 'x'") as caught:
        registry.trainer("x")
    assert "known: none" in caught.value.remedy


def test_model_patches_come_in_order_of_priority_then_name(install):
    @hookimpl
    def arctic_model_patches():
        return [ModelPatch(n, lambda model: True, lambda model: None, p) for n, p in [("c", 10), ("b", 100), ("a", 100)]]

    registry = PluginRegistry([install("patches", arctic_model_patches=arctic_model_patches)])
    assert [patch.name for patch in registry.model_patches()] == ["c", "a", "b"]
