"""Reads pydantic models: one entry per key with its type, default and docstring."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_NAMES = {str: "text", bool: "true | false", Any: "any"}


@dataclass(frozen=True)
class KeyInfo:
    """One configuration key."""

    path: str
    type: str
    default: str
    required: bool
    doc: str


def explain_model(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[KeyInfo]:
    """All leaf keys of a model, depth first. A key that is one of several models lists each one's keys, marked by its type."""
    for name, field in model.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        nested = _models(field.annotation)
        if not nested:
            yield _leaf(path, field)
        for inner in nested:
            label = path if len(nested) == 1 else f"{path}({_tag(inner)})"
            yield from explain_model(inner, label)


def describe_type(annotation: Any) -> str:
    """A type as a person would write it: ``int``, ``"a" | "b"``, ``list of str``."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Annotated, dict):
        return "mapping" if origin is dict else describe_type(args[0])
    if origin is Literal:
        return " | ".join(repr(arg) if not isinstance(arg, str) else arg for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join("null" if arg is type(None) else describe_type(arg) for arg in args)
    if origin in (list, tuple, set, frozenset):
        if len(args) > 1 and args[-1] is not Ellipsis:
            return f"[{', '.join(describe_type(arg) for arg in args)}]"
        return f"list of {describe_type(args[0])}" if args else "list"
    return _NAMES.get(annotation, getattr(annotation, "__name__", "any"))


def _leaf(path: str, field: FieldInfo) -> KeyInfo:
    required = field.default is PydanticUndefined and field.default_factory is None
    bounds = _bounds(field)
    kind = describe_type(field.annotation) + (f" ({bounds})" if bounds else "")
    return KeyInfo(path, kind, "" if required else _show(field.get_default(call_default_factory=True)), required, _doc(field))


def _doc(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split())
    return re.sub(r":\w+:`(?:~[\w.]*\.)?([^`]+)`", r"\1", text).replace("``", "")


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [f"{sign} {getattr(item, key):g}" for item in field.metadata for key, sign in signs.items() if hasattr(item, key)]
    return ", ".join(found)


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_show, value))}]"
    return str(value)


def _models(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """The models an annotation can hold directly."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return [model for arg in typing.get_args(annotation) for model in _models(arg)]
    return []


def _tag(model: type[pydantic.BaseModel]) -> str:
    for name in ("type", "name"):
        tag = model.model_fields.get(name)
        if tag is not None and typing.get_origin(tag.annotation) is Literal:
            return str(typing.get_args(tag.annotation)[0])
    return model.__name__
