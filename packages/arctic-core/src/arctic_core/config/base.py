"""The base of all configuration models: unknown keys are errors, and errors read like sentences."""

from __future__ import annotations

from typing import Any, Self

import pydantic

from arctic_core.errors import ConfigError


class ConfigModel(pydantic.BaseModel):
    """Frozen, strict about keys. Construct through :meth:`parse` to get :class:`ConfigError` instead of pydantic's error."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    @classmethod
    def parse(cls, values: dict[str, Any], *, where: str = "") -> Self:
        """Validate plain values.

        Raises:
            ConfigError: One line for each bad key: its dotted path, what is wrong, and for an unknown key the known ones.
        """
        try:
            return cls.model_validate(values)
        except pydantic.ValidationError as error:
            raise config_error(error, cls, where=where) from None


def config_error(error: pydantic.ValidationError, model: type[pydantic.BaseModel], *, where: str = "") -> ConfigError:
    """Turn pydantic's report into one :class:`ConfigError`."""
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "(top level)"
        if item["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown key")
        else:
            lines.append(f"{path}: {item['msg'].removeprefix('Value error, ')} (got {item['input']!r})")
    known = ", ".join(sorted(model.model_fields))
    return ConfigError("; ".join(lines), where=where or model.__name__, remedy=f"known keys at the top level: {known}")
