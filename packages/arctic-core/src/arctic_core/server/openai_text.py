"""Tokenizers of the jobs that OpenAI's routes serve: one per job, loaded when it is first asked for, used in threads."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from arctic_core.errors import ArcticError, DeadlineExceeded, UnsupportedModelError
from arctic_core.server.jobs import Job
from arctic_core.server.openai_errors import Refused
from arctic_core.server.openai_prompts import Messages, Prompt
from arctic_core.service.tokenizer import ModelTokenizer, Piece

T = TypeVar("T")

THREADS = 4
"""Tokenizing holds no lock of the interpreter for long, but must not take all threads from what else needs them."""
DEADLINE_S = 120.0
"""What loading a tokenizer, or one use of it, may take."""


class Tokenizers:
    """All tokenizers of a server. Methods run on one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="arctic-tokenizer")
        self._loading: weakref.WeakKeyDictionary[Job, asyncio.Future[ModelTokenizer]] = weakref.WeakKeyDictionary()

    async def encode(self, job: Job, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Token ids of each prompt, int32."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded: list[list[int]] = []
        if texts:
            tokenizer = await self._of(job)
            encoded = await self._run(lambda: [tokenizer.encode(text) for text in texts])
        rest = iter(encoded)
        return [np.asarray(next(rest) if isinstance(prompt, str) else prompt, np.int32) for prompt in prompts]

    async def encode_chat(self, job: Job, messages: Messages) -> np.ndarray:
        """Token ids of a conversation, int32."""
        tokenizer = await self._of(job)
        try:
            return np.asarray(await self._run(lambda: tokenizer.encode_chat(messages)), np.int32)
        except UnsupportedModelError:
            raise Refused(
                f"the model of {job.name!r} has no chat template; send a prompt to /v1/completions",
                param="messages",
                code="no_chat_template",
            ) from None

    async def pieces(self, job: Job, completions: Sequence[np.ndarray]) -> list[list[Piece]]:
        """Each completion's tokens as text."""
        tokenizer = await self._of(job)
        return await self._run(lambda: [tokenizer.pieces(ids.tolist()) for ids in completions])

    async def _of(self, job: Job) -> ModelTokenizer:
        loading = self._loading.get(job)
        if loading is None:
            loading = asyncio.ensure_future(self._run(lambda: ModelTokenizer(job.config.model_name)))
            self._loading[job] = loading
        try:
            return await asyncio.shield(loading)  # others wait for it, too
        except ArcticError:
            if self._loading.get(job) is loading:  # what was missing may come
                del self._loading[job]
            raise

    async def _run(self, function: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except TimeoutError as error:
            if isinstance(error, ArcticError):
                raise
            raise DeadlineExceeded(f"tokenizing took longer than {DEADLINE_S:g} s", remedy="send less at once") from None
