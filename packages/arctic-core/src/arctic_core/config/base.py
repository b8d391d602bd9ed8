"""The base of all configuration models: unknown keys are errors, and errors read like sentences."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, Self, get_args

import pydantic

from arctic_core.errors import ConfigError

NO_EFFECT = "no_effect"
"""Type of the error that :mod:`arctic_core.config.effects` raises in a validator."""


class _RaisesConfigError(type(pydantic.BaseModel)):
    """Turns pydantic's error into ours where a user constructs a model; models nested in it are built without this."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except pydantic.ValidationError as error:
            raise config_error(error, cls) from None  # type: ignore[arg-type] - cls is the model


class ConfigModel(pydantic.BaseModel, metaclass=_RaisesConfigError):
    """Frozen, strict about keys, finite numbers only.

    Raises:
        ConfigError: One line for each bad key: its dotted path, what is wrong, and for an unknown key the nearest known one.
    """

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    @classmethod
    def parse(cls, values: dict[str, Any], *, where: str = "") -> Self:
        """Validate plain values, as read from a file; ``where`` names it in the error."""
        try:
            return cls.model_validate(values)
        except pydantic.ValidationError as error:
            raise config_error(error, cls, where=where) from None


def config_error(error: pydantic.ValidationError, model: type[pydantic.BaseModel], *, where: str = "") -> ConfigError:
    """Turn pydantic's report into one :class:`ConfigError`."""
    lines, remedies = [], []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "(top level)"
        if item["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown key")
            remedies.append(_known_keys(model, item["loc"]))
        elif item["type"] == "missing":
            lines.append(f"{path}: required, but missing")
        elif item["type"] == NO_EFFECT:
            inside = "".join(f"{part}." for part in item["loc"])
            for settings, why, remedy in item.get("ctx", {})["lines"]:
                lines.append(f"{', '.join(inside + setting for setting in settings)}: {why}")
                remedies.append(remedy)
        else:
            got = "" if item["loc"] == () else f" (got {item['input']!r})"
            lines.append(f"{path}: {item['msg'].removeprefix('Value error, ')}{got}")
    return ConfigError("; ".join(lines), where=where or model.__name__, remedy="; ".join(dict.fromkeys(remedies)))


def _known_keys(model: type[pydantic.BaseModel], loc: Sequence[int | str]) -> str:
    """What could have been meant by the unknown key at ``loc``."""
    owners = [model]
    for part in loc[:-1]:
        fields = [owner.model_fields[part] for owner in owners if part in owner.model_fields]
        # A part that is no field is the tag that chose one model of a union.
        owners = [m for f in fields for m in _models_in(f.annotation)] or [m for m in owners if _tagged(m, part)] or owners
    known = sorted({name for owner in owners for name in owner.model_fields})
    close = difflib.get_close_matches(str(loc[-1]), known, n=1)
    inside = ".".join(str(part) for part in loc[:-1])
    guess = f"did you mean {close[0]}? " if close else ""
    return f"{guess}known keys{f' of {inside}' if inside else ''}: {', '.join(known)}"


def _models_in(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _tagged(model: type[pydantic.BaseModel], tag: int | str) -> bool:
    return any(tag in get_args(field.annotation) for field in model.model_fields.values())
