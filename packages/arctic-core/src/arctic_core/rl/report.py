"""The files of a run: one folder with configuration, metrics, samples, summary, plot, checkpoints and model.

Lines are flushed as they are written, so a killed run keeps what it measured. Resuming after step ``k`` drops the lines
of later steps (they will be written again) and a last line that was cut short.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from arctic_core.errors import ConfigError, DataError
from arctic_core.rl.config import FREE_ON_RESUME, TrainJobConfig
from arctic_core.rl.config_file import dump_yaml, job_values, parse_yaml

Status = Literal["finished", "interrupted", "failed"]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``metrics.jsonl``."""

    step: int
    """Rollout steps completed, from 1."""
    policy_version: int
    """Version the sampler serves after the step."""
    metrics: dict[str, float]
    """By name; units: nats, tokens, seconds, bytes. ``docs/quickstart.md`` lists them."""


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``samples.jsonl``."""

    step: int
    group: int
    index: int
    """Place within the group."""
    prompt: str
    """Last message of the conversation."""
    completion: str
    answer: str
    reward: float | None
    """``None`` for a sample that failed."""
    advantage: float | None
    """Mean over the trained tokens; ``None`` for a sample that was not trained on."""
    tokens: int
    finish_reason: str
    policy_version: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``summary.json``."""

    status: Status
    steps: int
    """Steps completed, those before a resumption included."""
    reward_first: float | None
    """Mean reward of the first five steps (fewer in a short run: the first half)."""
    reward_last: float | None
    """Mean reward of the last five steps."""
    seconds: float
    """Wall-clock time of this invocation, engine start included."""
    seconds_to_first_step: float | None
    """From the start of this invocation to the end of its first step."""
    seconds_per_step: float | None
    """Median over all steps but the first."""
    peak_memory_bytes: float | None
    """Largest ``memory/total_bytes``."""
    max_mismatch: float | None
    """Largest ``mismatch/max_abs_diff`` (nats)."""
    model: str
    backend: str
    seed: int
    packages: dict[str, str]
    """Versions of the packages that computed."""
    error: str | None = None


class RunFolder:
    """Paths and writers of one run. Make one with :func:`open_run`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.summary = path / "summary.json"
        self.plot = path / "plot.png"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"

    def write_step(self, record: StepRecord, samples: Sequence[SampleRecord]) -> None:
        """Append a step's lines; numbers that are not finite become ``null``."""
        line = {"step": record.step, "policy_version": record.policy_version, **record.metrics}
        _append(self.samples, samples)
        _append(self.metrics, [{key: _finite(value) for key, value in line.items()}])

    def write_summary(self, summary: Summary) -> None:
        """Replace ``summary.json``."""
        _replace(self.summary, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")

    def read_steps(self) -> list[StepRecord]:
        """All complete lines of ``metrics.jsonl``; ``null`` reads as NaN."""
        return [_step_record(line) for line in _lines(self.metrics)]

    def rewind(self, step: int) -> None:
        """Forget lines of steps after ``step``."""
        for path in (self.metrics, self.samples):
            kept = [line for line in _lines(path) if line["step"] <= step]
            _replace(path, b"".join(msgspec.json.encode(line) + b"\n" for line in kept))


def open_run(path: str | Path, config: TrainJobConfig, *, resume: bool) -> RunFolder:
    """Create the folder of a new run, or open that of a run to resume.

    Raises:
        ConfigError: The folder holds a run already and ``resume`` is off; there is nothing to resume; or a key that shapes
            the run changed since it started.
    """
    folder = RunFolder(Path(path))
    if not resume and (folder.metrics.exists() or folder.checkpoints.exists()):
        raise ConfigError(
            f"{folder.path} holds a run already", where="output", remedy="go on with --resume, or choose another --output"
        )
    if resume:
        if not folder.config.exists():
            raise ConfigError(f"{folder.path} holds no run to resume", where="output", remedy="start one without --resume")
        _check_same_run(folder, config)
    folder.path.mkdir(parents=True, exist_ok=True)
    _replace(folder.config, dump_yaml(job_values(config)).encode())
    return folder


def summarize(
    records: Sequence[StepRecord],
    config: TrainJobConfig,
    *,
    status: Status,
    seconds: float,
    seconds_to_first_step: float | None,
    packages: Mapping[str, str],
    error: str | None = None,
) -> Summary:
    """Figures of the whole run."""
    rewards = [record.metrics["reward/mean"] for record in records]
    window = min(5, max(1, len(rewards) // 2))
    times = sorted(record.metrics["seconds/total"] for record in records[1:])
    return Summary(
        status=status,
        steps=records[-1].step if records else 0,
        reward_first=_mean(rewards[:window]),
        reward_last=_mean(rewards[-window:]),
        seconds=seconds,
        seconds_to_first_step=seconds_to_first_step,
        seconds_per_step=times[len(times) // 2] if times else None,
        peak_memory_bytes=max((record.metrics["memory/total_bytes"] for record in records), default=None),
        max_mismatch=max((record.metrics["mismatch/max_abs_diff"] for record in records), default=None),
        model=config.model,
        backend=config.backend,
        seed=config.seed,
        packages=dict(packages),
        error=error,
    )


def _check_same_run(folder: RunFolder, config: TrainJobConfig) -> None:
    stored = parse_yaml(folder.config.read_text(encoding="utf-8"), where=str(folder.config))
    before = _flatten(job_values(TrainJobConfig.parse(stored, where=str(folder.config))))
    now = _flatten(job_values(config))
    changed = sorted(
        key
        for key in before.keys() | now.keys()
        if key.split(".")[0] not in FREE_ON_RESUME
        and not key.startswith("client.deadlines")
        and before.get(key) != now.get(key)
    )
    if changed:
        raise ConfigError(
            f"the run in {folder.path} was started with other values of: {', '.join(changed)}",
            where="resume",
            remedy=f"only {', '.join(sorted(FREE_ON_RESUME))} and client.deadlines may change; or start a new run",
        )


def _flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {
        key: value
        for name, inner in values.items()
        for key, value in _flatten(inner, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def _step_record(line: dict[str, Any]) -> StepRecord:
    step, version = line.pop("step"), line.pop("policy_version")
    return StepRecord(
        step=step, policy_version=version, metrics={key: math.nan if value is None else value for key, value in line.items()}
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _append(path: Path, records: Iterable[Any]) -> None:
    with path.open("ab") as stream:
        stream.write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Decoded lines; a last line without its newline was cut short by a kill and is left out."""
    if not path.exists():
        return []
    complete = path.read_bytes().split(b"\n")[:-1]
    try:
        return [msgspec.json.decode(line, type=dict[str, Any]) for line in complete]
    except msgspec.DecodeError as error:
        raise DataError(f"a line is not JSON: {error}", where=str(path)) from error


def _replace(path: Path, content: bytes) -> None:
    """Write all of a file or nothing."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_bytes(content)
    os.replace(scratch, path)
