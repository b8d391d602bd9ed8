"""The generated parts of the documentation.

As an mkdocs hook it replaces ``<!-- config: module:Class -->`` in a page by tables of that configuration model's keys
(``without key`` leaves the tables below that key out). Run by itself (``python docs/generate.py``) it writes the version
table into ``compatibility.md``; that one is kept in the repository, where it can be read without building the site, and a
test fails when it is stale.
"""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
MARKER = re.compile(r"<!-- config: (?P<model>[\w.:]+)(?: without (?P<without>\w+))? -->")
TABLE = re.compile(r"(?<=<!-- versions -->\n\n).*?(?=\n<!-- /versions -->)", re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the configuration tables (called by mkdocs for every page)."""
    return MARKER.sub(lambda match: config_tables(pkgutil.resolve_name(match["model"]), match["without"]), markdown)


def config_tables(model: type[BaseModel], without: str | None = None) -> str:
    """A table of a model's keys, followed by one for each model inside it, named by their dotted path."""
    sections = []
    for path, nested in walk(model, ""):
        if without and path.split(".")[0] == without:
            continue
        title = f"### `{path}`\n\n" if path else ""
        summary = plain((nested.__doc__ or "").split("\n\n")[0])
        rows = [row(name, field) for name, field in nested.model_fields.items()]
        sections.append(f"{title}{summary}\n\n" + "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(sections) + "\n"


def walk(model: type[BaseModel], path: str) -> list[tuple[str, type[BaseModel]]]:
    """The model and those inside it, depth first; members of a union carry the key that tells them apart in the path."""
    found = [(path, model)]
    for name, field in model.model_fields.items():
        nested = models_in(field.annotation)
        for inner in nested:
            found += walk(inner, f"{path}.{name}{tag(inner, field) if len(nested) > 1 else ''}".lstrip("."))
    return found


def tag(model: type[BaseModel], union: FieldInfo) -> str:
    """What a member of a union says of itself, e.g. `` (name: rloo)``."""
    key = union.discriminator
    if not isinstance(key, str):
        raise ValueError(f"{model.__name__} is one of several models that no key tells apart: give the union a discriminator")
    return f" ({key}: {get_args(model.model_fields[key].annotation)[0]})"


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The configuration models an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def row(name: str, field: FieldInfo) -> str:
    """One line of the table."""
    return f"| `{name}` | {escape(kind(field))} | {escape(default(field))} | {escape(plain(field.description or ''))} |"


def plain(text: str) -> str:
    """One line of Markdown from a docstring."""
    return re.sub(r":\w+:(?=`)", "", " ".join(text.split()).replace("``", "`"))


def kind(field: FieldInfo) -> str:
    """Type and bounds, as a reader would say them."""
    bounds = [f"{sign} {getattr(item, key)}" for item in field.metadata for key, sign in BOUNDS.items() if hasattr(item, key)]
    return f"`{readable(field.annotation)}`" + (f", {' and '.join(bounds)}" if bounds else "")


def readable(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(repr(value) for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(readable(argument) for argument in get_args(annotation))
    if isinstance(annotation, type) and not get_args(annotation):
        return "None" if annotation is type(None) else annotation.__name__
    return str(annotation).replace("typing.", "")


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=False)
    if value is PydanticUndefined:
        return "computed"
    return "below" if isinstance(value, BaseModel) else f"`{value!r}`"


def escape(text: str) -> str:
    return text.replace("|", "\\|")


def write_versions() -> None:
    """Bring the table of ``compatibility.md`` up to date."""
    from arctic_kernels.versions import table

    page = Path(__file__).parent / "compatibility.md"
    page.write_text(TABLE.sub(lambda _: table(), page.read_text()))


if __name__ == "__main__":
    write_versions()
