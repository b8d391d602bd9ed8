"""The page "Losses" says what the library does: its worked example, metrics, defaults and option tables."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from arctic_core.losses.base import LossDefinition, LossInputs, prepare_loss
from arctic_core.losses.value import value_loss
from arctic_core.plugins.builtin import arctic_losses
from arctic_core.protocol import NamedLoss

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "losses.md").read_text()
LOSSES = {definition.name: definition for definition in arctic_losses()}
POLICY = [name for name in LOSSES if name not in ("sft", "distill")]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{Path(path).stem}", DOCS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def section(title: str) -> str:
    found = re.search(rf"^###? `?{re.escape(title)}`?\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, f"losses.md has no section {title}"
    return found[1]


def metrics_named_in(title: str) -> set[str]:
    """What the paragraph "Metrics" of a section puts first in its items."""
    paragraph = re.search(r"^Metrics.*?(?=\n\n)", section(title), re.DOTALL | re.MULTILINE)
    assert paragraph, f"{title} names no metrics"
    return set(re.findall(r"`(\w+)`", paragraph[0]))


def common_metrics() -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", section("Metrics"), re.MULTILINE))


def test_the_worked_example_is_what_the_library_computes() -> None:
    tables = load("figures/example.py").tables()
    assert f"<!-- example -->\n\n{tables}\n<!-- /example -->" in PAGE, "stale: run `python docs/figures/example.py`"


def test_the_worked_example_is_right_by_hand() -> None:
    rows = {token.place: token.values[3:] for token in load("figures/example.py").tokens()}
    root = (1.5 * 0.7) ** (1 / 3)  # of the product of A's ratios
    expected = {  # grpo: by response, then by 2; dapo: by 5 tokens; gspo: root / 3 / 2; cispo; rloo: product / 2; dapo with tis
        "A1": (1 / 6, 1 / 5, root / 6, 1 / 5, 1.05 / 2, 1 / 5),
        "A2": (0, 0, root / 6, 1.28 / 5, 1.05 / 2, 0),
        "A3": (0.7 / 6, 0.7 / 5, root / 6, 0.7 / 5, 1.05 / 2, 2 * 0.7 / 5),
        "B1": (0, 0, 0, -0.6 / 5, 0, 0),
        "B2": (-1.25 / 4, -1.25 / 5, 0, -1.25 / 5, 0, -1.25 / 5),
        "B3": (0,) * 6,
    }
    for place, values in expected.items():
        assert rows[place] == pytest.approx(values, abs=1e-6), place


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_its_row_with_its_defaults(name: str) -> None:
    definition = LOSSES[name]
    section(name)
    (row,) = re.findall(rf"^\| \[`{name}`\].*$", PAGE, re.MULTILINE)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[4] == f"`{definition.normalization}`"
    field = definition.config_model.model_fields.get("sequence_reduction")
    expected = {"rloo": "one action"}.get(name, field.default if field else "sum")
    assert cells[3] == expected


@pytest.mark.parametrize("name", POLICY)
def test_a_policy_loss_reports_the_metrics_that_the_page_names(name: str) -> None:
    options: list[dict[str, Any]] = [{"kl_coef": 0.1, "entropy_coef": 0.1, "mismatch": "tis"}]
    options += [{"mismatch": "mis"}]
    assert reported(LOSSES[name], options) == common_metrics() | metrics_named_in(name) & {"clip_fraction", "gate"}


def test_sft_distill_and_the_value_loss_report_the_metrics_that_the_page_names() -> None:
    assert reported(LOSSES["sft"], [{}]) == {"loss"} <= metrics_named_in("sft")
    sources: list[dict[str, Any]] = [{}, {"source": "sampled", "on_policy": False}]
    assert reported(LOSSES["distill"], sources) == metrics_named_in("distill") - {"K", "topk", "sampled", "on_policy"}
    ones, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    config = load("generate.py").pkgutil.resolve_name("arctic_core.config.losses:ValueLossConfig")()
    found = value_loss(ones.clone().requires_grad_(), ones, ones, mask, config).metrics
    assert set(found) == metrics_named_in("Value loss") - {"R"}


def reported(definition: LossDefinition, options: list[dict[str, Any]]) -> set[str]:
    names: set[str] = set()
    for chosen in options:
        prepared = prepare_loss(definition, NamedLoss(definition.name, chosen, "constant", 1.0))
        logp = torch.tensor([-1.0, -2.0])
        inputs = LossInputs(
            logprobs_R=logp.clone().requires_grad_(),
            entropy_R=torch.ones(2) if prepared.needs_entropy else None,
            mask_R=torch.tensor([True, True]),
            cu_seqlens_B=torch.tensor([0, 1, 2]),
            advantages_R=torch.ones(2),
            old_logprobs_R=logp,
            ref_logprobs_R=logp,
            sampler_logprobs_R=logp,
            teacher_logprobs_R=logp,
            topk_logprobs_RK=logp[:, None].clone().requires_grad_(),
            teacher_topk_logprobs_RK=logp[:, None],
        )
        output = prepared.compute(inputs)
        assert math.isfinite(output.loss.item())
        names |= set(output.metrics)
    return names


@pytest.mark.parametrize("page", ["losses.md", "configuration.md"])
def test_option_tables_expand(page: str) -> None:
    text = (DOCS / page).read_text()
    expanded = load("generate.py").on_page_markdown(text)
    assert text.count("<!-- config:") > 0
    assert "<!-- config:" not in expanded
    assert expanded.count("| key | type | default | meaning |") >= text.count("<!-- config:")


def test_members_of_a_union_are_told_apart() -> None:
    expanded = load("generate.py").on_page_markdown((DOCS / "configuration.md").read_text())
    for heading in ("algorithm.advantage (name: rloo)", "training.schedule (type: cosine)"):
        assert f"### `{heading}`" in expanded
