"""The error tree: drawn as it is, picklable, and the same after a trip over the wire."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

import arctic_core.errors as errors
from arctic_core.errors import ArcticError, error_types
from arctic_core.protocol import ErrorInfo, Reply
from arctic_core.wire import decode, encode

OURS = [getattr(errors, name) for name in errors.__all__ if name != "error_types"]


def drawn() -> dict[str, tuple[str, str]]:
    """Class name → (parent, built-in exception in brackets), read from the picture in the module's docstring."""
    tree: dict[str, tuple[str, str]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    (?P<indent>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: \((?P<builtin>\w+)\))?", line)
        if match:
            depth = len(match["indent"]) // 4
            path[depth:] = [match["name"]]
            tree[match["name"]] = (path[depth - 1] if depth else "Exception", match["builtin"] or "")
    return tree


def real() -> dict[str, tuple[str, str]]:
    def builtin(cls: type) -> str:
        others = [base.__name__ for base in cls.__bases__ if not issubclass(base, ArcticError) and base is not Exception]
        return others[0] if others else ""

    return {cls.__name__: (cls.__bases__[0].__name__, builtin(cls)) for cls in OURS}


def test_the_drawn_tree_is_the_real_one() -> None:
    assert drawn() == real()
    assert len(drawn()) == len(OURS) > 20


def test_every_class_of_the_module_is_exported() -> None:
    defined = {name for name, item in vars(errors).items() if inspect.isclass(item) and issubclass(item, ArcticError)}
    assert defined | {"error_types"} == set(errors.__all__)
    assert all(error_types()[cls.__name__] is cls for cls in OURS)


@pytest.mark.parametrize("cls", OURS)
def test_every_error_pickles(cls: type[ArcticError]) -> None:
    error = pickle.loads(pickle.dumps(cls("what", where="where", remedy="do this")))
    assert type(error) is cls
    assert (error.message, error.where, error.remedy) == ("what", "where", "do this")


@pytest.mark.parametrize("cls", OURS)
def test_every_error_comes_over_the_wire_as_its_own_type(cls: type[ArcticError]) -> None:
    sent = Reply(sequence=1, body=ErrorInfo.of(cls("what", where="where", remedy="do this")))
    with pytest.raises(cls) as caught:
        decode(encode(sent), Reply).unwrap()
    assert type(caught.value) is cls
    assert (caught.value.message, caught.value.where, caught.value.remedy) == ("what", "where", "do this")


@pytest.mark.parametrize("cls", OURS)
def test_every_class_says_what_it_is_for(cls: type[ArcticError]) -> None:
    assert cls.__doc__


def test_the_text_has_what_where_and_remedy() -> None:
    assert str(ArcticError("it broke")) == "it broke"
    assert str(ArcticError("it broke", where="trainer[1]")) == "trainer[1]: it broke"
    assert str(ArcticError("it broke", where="trainer[1]", remedy="fix it")) == "trainer[1]: it broke\n  → fix it"


def test_a_strangers_class_does_not_hide_ours() -> None:
    stranger = type("DataError", (ArcticError,), {})
    assert error_types()["DataError"] is errors.DataError
    assert stranger is not errors.DataError
