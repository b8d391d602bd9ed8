"""Set-up and checks. ``nox -l`` lists the sessions; ``./dev`` runs them on a machine without nox.

Two environments, both under ``.nox``: ``cpu`` is the whole stack (torch, DeepSpeed, vLLM, Ray) from
``requirements/cpu.lock``, shared by all sessions that run engines; ``dev`` holds the tools and our packages' base
dependencies, and no torch. An environment is made anew when its lock changes, and reused otherwise.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
LIGHT = """
import importlib.util
import arctic_core
from arctic_core.plugins.manager import PluginRegistry

assert importlib.util.find_spec("torch") is None, "torch is installed here, so this would prove nothing"
for name in arctic_core.__all__:
    getattr(arctic_core, name)
PluginRegistry().require_healthy()
"""
PYTHON = "3.11"  # of cpu.lock: wheels of torch and vLLM are chosen for it

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "imports", "docs", "build", "tests", "e2e"]


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train SmolLM2-135M with GRPO on this machine: DeepSpeed, vLLM and Ray on CPU. Extra arguments go to `arctic train`."""
    cpu(session).run("arctic", "train", "quickstart", *session.posargs)


@nox.session
def doctor(session: nox.Session) -> None:
    """Say what is installed, which devices and plugins there are, and what to fix."""
    cpu(session).run("arctic", "doctor", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Unit and engine tests on CPU, a few minutes. Extra arguments go to pytest."""
    cpu(session).run("pytest", "-m", "not e2e and not gpu", *session.posargs)


@nox.session
def e2e(session: nox.Session) -> None:
    """End-to-end tests with real DeepSpeed, vLLM and Ray on CPU. Extra arguments go to pytest."""
    cpu(session).run("pytest", "-m", "e2e and not gpu", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and format. `-- --fix` repairs what can be."""
    env = dev(session)
    fix = "--fix" in session.posargs
    env.run("ruff", "check", *(["--fix"] if fix else []))
    env.run("ruff", "format", *([] if fix else ["--check"]))


@nox.session
def types(session: nox.Session) -> None:
    """Types: pyright over the packages, against the real torch, vLLM, DeepSpeed and Ray."""
    stack = cpu(session)
    dev(session).run("pyright", "--pythonpath", str(stack.python), *session.posargs)


@nox.session
def imports(session: nox.Session) -> None:
    """Borders between packages and layers, and a client that works where torch is not installed."""
    env = dev(session)
    env.run("lint-imports")
    env.run("python", "-c", LIGHT)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, strict: a broken link or reference fails. `-- serve` shows it while you write."""
    env = dev(session)
    session.env["NO_MKDOCS_2_WARNING"] = "1"  # an announcement on every run
    env.run("mkdocs", *(session.posargs or ["build", "--strict"]))


@nox.session
def build(session: nox.Session) -> None:
    """Wheels and sdists of all packages into dist/, a look into each wheel, and arctic-core's base install tried out."""
    env = dev(session)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for package in PACKAGES:
        env.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", str(package))
    env.run("python", "requirements/check_wheels.py", "dist")
    fresh = Environment(session, ROOT / ".nox" / "wheel")
    create(fresh)
    fresh.install(*map(str, (ROOT / "dist").glob("arctic_core-*.whl")), "--constraint", "requirements/dev.lock")
    fresh.run("python", "-c", LIGHT)


@nox.session
def lock(session: nox.Session) -> None:
    """Resolve requirements/*.in anew, keeping versions that still fit. `-- --upgrade` takes the newest. Needs uv."""
    for name, options in (
        ("cpu", ["--python-version", PYTHON, "--excludes", "requirements/cpu-excludes.txt", *torch_source(session, uv=True)]),
        ("dev", ["--python-version", PYTHON, "--universal"]),
    ):
        arguments = [f"requirements/{name}.in", "-o", f"requirements/{name}.lock", "--no-header", "--no-annotate", "--quiet"]
        session.run("uv", "pip", "compile", *arguments, *options, *session.posargs, env=find_links(session), silent=True)


# --- environments -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """A virtual environment under ``.nox`` and a session that runs commands in it."""

    session: nox.Session
    path: Path

    @property
    def bin(self) -> Path:
        return self.path / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> Path:
        return self.bin / "python"

    def run(self, *command: str) -> None:
        """Run a command with the environment's programs first on the path."""
        path = f"{self.bin}{os.pathsep}{os.environ.get('PATH', '')}"
        # A job has half a dozen processes; without byte code on disk each would compile torch and vLLM for itself.
        env = {"PATH": path, "VIRTUAL_ENV": str(self.path), "PYTHONDONTWRITEBYTECODE": None}
        self.session.run(str(self.bin / command[0]), *command[1:], env=env, external=True)

    def install(self, *arguments: str, torch: bool = False) -> None:
        """Install with uv where it is at hand, else with pip."""
        uv = shutil.which("uv")
        tool = [uv, "pip", "install", "--python", str(self.python)] if uv else [str(self.python), "-m", "pip", "install"]
        source = torch_source(self.session, uv=bool(uv)) if torch else []
        self.session.run(*tool, "--quiet", *arguments, *source, env=find_links(self.session), external=True)


def cpu(session: nox.Session) -> Environment:
    """The whole stack, without a GPU."""
    return prepare(session, "cpu", torch=True)


def dev(session: nox.Session) -> Environment:
    """The tools."""
    return prepare(session, "dev")


def prepare(session: nox.Session, name: str, *, torch: bool = False) -> Environment:
    """Make or reuse an environment. The lock lists everything, so nothing is resolved (``--no-deps``)."""
    env = Environment(session, ROOT / ".nox" / name)
    lock = ROOT / "requirements" / f"{name}.lock"
    locked, ours = digest([lock]), digest([package / "pyproject.toml" for package in PACKAGES])
    if not stamped(env, "lock", locked):
        session.log(f"making {env.path.relative_to(ROOT)} from requirements/{name}.lock (once; takes a minute or two)")
        create(env)
        env.install("--no-deps", "-r", str(lock), torch=torch)
        stamp(env, "lock", locked)
    if not stamped(env, "packages", ours):
        editable = [item for package in PACKAGES for item in ("--editable", str(package))]
        env.install("--no-deps", "--no-build-isolation", *editable)
        stamp(env, "packages", ours)
    return env


def create(env: Environment) -> None:
    """An empty environment with the Python that the locks are for."""
    shutil.rmtree(env.path, ignore_errors=True)
    if uv := shutil.which("uv"):
        env.session.run(uv, "venv", "--quiet", "--seed", "--python", PYTHON, str(env.path), external=True)
        return
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = sys.executable if this == PYTHON else shutil.which(f"python{PYTHON}")
    if not python:
        env.session.error(f"the locks are for Python {PYTHON}: install it, or uv, which fetches it")
    env.session.run(python, "-m", "venv", str(env.path), external=True)


def digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def stamped(env: Environment, what: str, value: str) -> bool:
    file = env.path / f"{what}.sha256"
    return file.exists() and file.read_text() == value


def stamp(env: Environment, what: str, value: str) -> None:
    (env.path / f"{what}.sha256").write_text(value)


# --- where wheels come from ---------------------------------------------------------------------------------------------


def wheel_folders(session: nox.Session) -> list[str]:
    """Folders of local wheels that pip was told of; uv does not look there by itself."""
    if folders := os.environ.get("UV_FIND_LINKS"):
        return folders.split(",")
    if folders := os.environ.get("PIP_FIND_LINKS"):
        return folders.split()
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    found = session.run(*command, silent=True, log=False, external=True, success_codes=[0, 1], stderr=None)
    return found.split() if isinstance(found, str) and not found.startswith("ERROR") else []


def find_links(session: nox.Session) -> dict[str, str]:
    """Tell uv about them."""
    folders = wheel_folders(session)
    return {"UV_FIND_LINKS": ",".join(folders)} if folders else {}


def torch_source(session: nox.Session, *, uv: bool) -> list[str]:
    """Where the CPU build of torch comes from: a local wheel, else PyTorch's own index (PyPI's is built for CUDA)."""
    if any(list(Path(folder).glob("torch-*+cpu-*.whl")) for folder in wheel_folders(session)):
        return []
    return ["--torch-backend", "cpu"] if uv else ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
