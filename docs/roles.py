"""A griffe extension: docstrings say :class:`~package.module.Name`, the site shows ``Name`` as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|attr|data|mod|exc):`(?P<short>~)?(?P<target>[^`]+)`")


class Roles(griffe.Extension):
    """Rewrites the docstring of each object; a leading ``~`` keeps the last part of the name."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for everything it collects."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(_code, obj.docstring.value)


def _code(match: re.Match[str]) -> str:
    target = match["target"]
    return f"`{target.rsplit('.', 1)[-1] if match['short'] else target}`"
