"""A model's tokenizer, for whoever serves text: prompts and chats to token ids, tokens to their pieces of text.

Imports transformers when built. Methods may be called from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arctic_core.errors import DataError, MissingExtraError, ModelNotFoundError, UnsupportedModelError
from arctic_core.models.resolve import resolve_model

INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are no whole character."""
_MAX_SPLIT = 4  # a character has at most so many bytes, so it is in at most so many tokens


@dataclass(frozen=True)
class Piece:
    """One token as text."""

    text: str
    """Special tokens are written out; parts of a character are :data:`INCOMPLETE`."""
    offset: int
    """Where it begins in the decoded text of all tokens, in characters."""


class ModelTokenizer:
    """The tokenizer of one model.

    Args:
        model: Hub id, local folder, or GGUF file.

    Raises:
        ModelNotFoundError: There is no such model, or it has no tokenizer that can be loaded. Code that comes with a model is
            not run.
    """

    def __init__(self, model: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                "tokenizing needs the package 'transformers'", remedy='pip install "arctic-core[train]"'
            ) from error
        folder = resolve_model(model)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the Rust library raises plain ones
            raise ModelNotFoundError(f"no tokenizer can be loaded: {error}", where=folder) from error
        self._lock = threading.Lock()  # the Rust library refuses some uses at the same time
        self._special = frozenset(self._tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}
        # Some decoders drop the space before the first token, so a token is decoded behind another.
        self._anchor: list[int] = self._tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_length = len(self._decode(self._anchor))

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts before and after."""
        with self._lock:
            return self._tokenizer.encode(text, verbose=False)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to where the assistant speaks.

        Raises:
            UnsupportedModelError: The model has no chat template.
            DataError: The template refuses the messages; the message holds its reason.
        """
        if not self.can_chat:
            raise UnsupportedModelError("the model has no chat template", where="messages", remedy="send it a prompt instead")
        try:
            with self._lock:
                return self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program of the model's author, run on what a client sent
            raise DataError(
                f"the model's chat template refuses these messages: {type(error).__name__}: {error}", where="messages"
            ) from error

    def pieces(self, token_ids: Sequence[int]) -> list[Piece]:
        """Each token's text and place."""
        with self._lock:
            return self._pieces(token_ids)

    def _pieces(self, token_ids: Sequence[int]) -> list[Piece]:
        pieces: list[Piece] = []
        shown = 0
        part: list[int] = []  # tokens of a character that is not whole yet
        for token in token_ids:
            text = self._text(token)
            if not pieces and token not in self._special:
                shown = len(self._decode([token])) - len(text)
            pieces.append(Piece(text, max(shown, 0)))
            if token in self._special:  # it is not in the text
                continue
            part.append(token)
            together = text if len(part) == 1 else self._behind_anchor(part)
            if not together.endswith(INCOMPLETE) or len(part) == _MAX_SPLIT:
                shown += len(together)
                part = []
        return pieces

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._behind_anchor([token])
        return self._texts[token]

    def _behind_anchor(self, token_ids: Sequence[int]) -> str:
        return self._decode([*self._anchor, *token_ids])[self._anchor_length :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
