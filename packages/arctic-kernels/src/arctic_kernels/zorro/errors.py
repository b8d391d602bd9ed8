"""Errors of the packed-forest package; all are ``ValueError``."""

from __future__ import annotations


class ZorroError(ValueError):
    """A forest, or a request on one, that cannot be computed. The message says what, where, and what to do."""


class UnsupportedLayerError(ZorroError):
    """A model has a layer that cannot run on a packed forest.

    Attributes:
        layer: Class of the layer, and where it is in the model.
        missing: What is missing.
    """

    def __init__(self, layer: str, missing: str, remedy: str = "train this model without shared prompts (zorro: off)") -> None:
        super().__init__(f"{layer} cannot run on a packed forest: {missing}. Instead, {remedy}.")
        self.layer, self.missing, self.remedy = layer, missing, remedy

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.layer, self.missing, self.remedy)


class UnsupportedAttentionError(ZorroError):
    """No backend, or not the one asked for, computes this attention.

    Attributes:
        what: The feature, with its value.
        backend: The backend that lacks it.
        remedy: What to do instead.
    """

    def __init__(self, what: str, backend: str, remedy: str) -> None:
        super().__init__(f"The forest attention backend {backend!r} does not support {what}: {remedy}")
        self.what, self.backend, self.remedy = what, backend, remedy

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.what, self.backend, self.remedy)
