"""Reads a job file (YAML or TOML), applies the backend choice and ``key.sub=value`` overrides, and validates the whole.

YAML is read by version 1.2's rules for scalars: ``1e-5`` is a number, ``on`` is a string, and a key given twice is an error.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from arctic_core.errors import ConfigError, MissingExtraError
from arctic_core.rl.config import LOCAL_BACKEND, RAY_BACKEND, Backend, TrainJobConfig


def shipped_configs() -> dict[str, Path]:
    """Job files that come with the package, by name."""
    folder = resources.files("arctic_core.rl") / "configs"
    return {entry.name.removesuffix(".yaml"): Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".yaml")}


def load_job(source: str, overrides: Sequence[str] = (), backend: Backend | None = None) -> TrainJobConfig:
    """The job described by a file (or a shipped one's name), a backend and overrides; later ones win.

    Raises:
        ConfigError: The file is missing or malformed, an override has no ``=``, or a key is unknown or wrong.
    """
    values, name = read_values(source)
    if backend is not None:
        _merge(values, {"client": LOCAL_BACKEND if backend == "local" else RAY_BACKEND})
    for override in overrides:
        apply_override(values, override)
    return TrainJobConfig.parse(values, where=name)


def read_values(source: str) -> tuple[dict[str, Any], str]:
    """The raw tree of a job file, and its name for error messages."""
    path = Path(source)
    shipped = shipped_configs()
    if not path.exists():
        if source not in shipped:
            raise ConfigError(
                f"there is no file {source!r}",
                remedy=f"give a YAML or TOML file, or a shipped job: {', '.join(sorted(shipped))}",
            )
        path = shipped[source]
    if path.suffix == ".toml":
        try:
            values: Any = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not valid TOML: {error}", where=str(path)) from None
    elif path.suffix in (".yaml", ".yml"):
        values = parse_yaml(path.read_text(encoding="utf-8"), where=str(path))
    else:
        raise ConfigError("a job file ends in .yaml, .yml or .toml", where=str(path))
    if not isinstance(values, dict):
        raise ConfigError("the file does not hold a mapping of keys to values", where=str(path))
    return values, str(path)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set ``key.sub=value`` in a tree, in place. The value is a YAML scalar, list or mapping.

    Raises:
        ConfigError: There is no ``=``, a part of the key is empty, or the path runs through a value that is not a mapping.
    """
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form key.sub=value")
    node = values
    for depth, part in enumerate(parts[:-1]):
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(parts[: depth + 1])} is {child!r}, not a mapping")
        node = child
    node[parts[-1]] = parse_yaml(text, where=f"override {key}")


def parse_yaml(text: str, *, where: str) -> Any:
    """Plain values from YAML text."""
    yaml = _yaml()
    try:
        return yaml.load(text, Loader=_loader(yaml))  # a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}", where=where) from None


def dump_yaml(values: Any) -> str:
    """Readable YAML of plain values, keys in the order given."""
    return _yaml().safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def job_values(config: TrainJobConfig) -> dict[str, Any]:
    """A job as the plain tree a file would hold; ``load_job`` of it gives the same job."""
    values = config.model_dump(mode="json")
    for derived in ("model_name", "seed"):
        del values["client"][derived]
    return values


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        present = into.get(key)
        if isinstance(value, dict) and value and isinstance(present, dict | None):
            into[key] = present or {}
            _merge(into[key], value)
        else:
            into[key] = value


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise MissingExtraError("YAML job files need the package 'pyyaml'", remedy='pip install "arctic-core[cli]"') from error
    return yaml


def _loader(yaml: Any) -> Any:
    """PyYAML's safe loader with YAML 1.2's numbers and booleans, refusing duplicate keys."""

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = {str(key) for key in keys if keys.count(key) > 1}
            if twice:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key given twice: {', '.join(sorted(twice))}", node.start_mark
                )
            return super().construct_mapping(node, deep=deep)

    kept = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in kept]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
    number = r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(number), list("-+0123456789."))
    return Loader
