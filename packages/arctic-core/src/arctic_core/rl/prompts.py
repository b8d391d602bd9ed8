"""From a task's messages to token ids and back, with the model's own chat template. Imports transformers when built."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arctic_core.errors import DataError, MissingExtraError, ModelNotFoundError, UnsupportedModelError
from arctic_core.rl.tasks import ChatMessage

PACKAGE_PREFIX = "package:"


def locate_model(name: str) -> str:
    """Turn ``package:NAME/FILE`` into the path of that file inside an installed package; other names pass unchanged.

    Raises:
        ModelNotFoundError: The package is not installed, or has no such file.
    """
    if not name.startswith(PACKAGE_PREFIX):
        return name
    package, _, inner = name.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError(
            f"no package {package!r} is installed", where=name, remedy=f"pip install {package.replace('_', '-')}"
        )
    for folder in spec.submodule_search_locations:
        path = (Path(folder) / inner).resolve()
        if path.exists() and path.is_relative_to(Path(folder).resolve()):
            return str(path)
    raise ModelNotFoundError(f"the package {package!r} holds no file {inner!r}", where=name)


class ChatTokenizer:
    """The tokenizer of one model.

    Args:
        folder: Local model folder.
        max_tokens: Longest prompt accepted.
    """

    def __init__(self, folder: str, max_tokens: int) -> None:
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                "tokenizing prompts needs the package 'transformers'", remedy='pip install "arctic-core[train]"'
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelNotFoundError(f"no tokenizer can be loaded: {error}", where=folder) from error
        if not self._tokenizer.chat_template:
            raise UnsupportedModelError(
                "the tokenizer has no chat template", where=folder, remedy="use an instruct or chat model"
            )
        self._max_tokens = max_tokens

    def encode(self, messages: Sequence[ChatMessage]) -> np.ndarray:
        """Token ids of a conversation, up to where the assistant speaks, int32.

        Raises:
            DataError: The prompt is longer than the limit.
        """
        ids = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        if len(ids) > self._max_tokens:
            raise DataError(
                f"a prompt has {len(ids)} tokens, more than the {self._max_tokens} that client.max_seq_len leaves",
                where=f"prompt {messages[-1]['content'][:60]!r}",
                remedy="raise client.max_seq_len or lower rollouts.max_tokens",
            )
        return np.asarray(ids, np.int32)

    def decode(self, token_ids: np.ndarray) -> str:
        """Text of a response without special tokens."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
