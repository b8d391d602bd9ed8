"""Answers of OpenAI's routes, from completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from arctic_core.protocol import Completion
from arctic_core.server.openai_fields import ChatFields, CompletionFields
from arctic_core.server.openai_generate import Ask
from arctic_core.service.tokenizer import INCOMPLETE, Piece

Json = dict[str, Any]
Pieces = list[Piece] | None
"""A completion's tokens as text; ``None`` where no log-probs were asked for."""


class CompletionAnswer:
    """Answers in the format of ``/v1/completions``. A choice of prompt ``i`` and completion ``j`` has index ``i·n + j``."""

    def __init__(self, ask: Ask, fields: CompletionFields) -> None:
        self._ask = ask
        self._fields = fields

    @property
    def wants_pieces(self) -> bool:
        """Whether tokens are needed as text."""
        return self._fields.logprobs is not None

    def whole(self, rows: Sequence[Sequence[Completion]], pieces: Sequence[Pieces]) -> Json:
        """All completions at once; ``pieces`` per choice."""
        choices = [
            self._choice(i, j, completion, pieces[i * self._fields.n + j])
            for i, row in enumerate(rows)
            for j, completion in enumerate(row)
        ]
        completions = [completion for row in rows for completion in row]
        return _envelope(self._ask, "text_completion", choices, completions) | {"usage": usage(self._ask, completions)}

    def chunks(self, prompt: int, index: int, completion: Completion, pieces: Pieces) -> list[Json]:
        """One completion that is ready."""
        return [_envelope(self._ask, "text_completion", [self._choice(prompt, index, completion, pieces)], [completion])]

    def last(self, completions: Sequence[Completion]) -> Json:
        """The chunk that holds the usage."""
        return _envelope(self._ask, "text_completion", [], completions) | {"usage": usage(self._ask, completions)}

    def _choice(self, prompt: int, index: int, completion: Completion, pieces: Pieces) -> Json:
        text = shown(completion, self._fields.stop)
        return {
            "index": prompt * self._fields.n + index,
            "text": text,
            "logprobs": None if pieces is None else self._logprobs(completion, pieces, len(text)),
            "finish_reason": completion.finish_reason,
            **_ids(self._ask, self._fields.return_token_ids, prompt, completion),
        }

    def _logprobs(self, completion: Completion, pieces: Sequence[Piece], length: int) -> Json:
        tokens, logprobs = [piece.text for piece in pieces], completion.logprobs.tolist()
        likely = [{token: value} for token, value in zip(tokens, logprobs, strict=True)] if self._fields.logprobs else None
        offsets = [min(piece.offset, length) for piece in pieces]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likely, "text_offset": offsets}


class ChatAnswer:
    """Answers in the format of ``/v1/chat/completions``."""

    def __init__(self, ask: Ask, fields: ChatFields) -> None:
        self._ask = ask
        self._fields = fields

    @property
    def wants_pieces(self) -> bool:
        """Whether tokens are needed as text."""
        return self._fields.logprobs

    def whole(self, rows: Sequence[Sequence[Completion]], pieces: Sequence[Pieces]) -> Json:
        """All completions at once; ``pieces`` per choice."""
        (row,) = rows
        choices = [
            {
                "index": j,
                "message": {"role": "assistant", "content": shown(completion, self._fields.stop), "refusal": None},
                "logprobs": self._logprobs(completion, pieces[j]),
                "finish_reason": completion.finish_reason,
                **_ids(self._ask, self._fields.return_token_ids, 0, completion),
            }
            for j, completion in enumerate(row)
        ]
        return _envelope(self._ask, "chat.completion", choices, row) | {"usage": usage(self._ask, row)}

    def chunks(self, prompt: int, index: int, completion: Completion, pieces: Pieces) -> list[Json]:
        """One completion that is ready: its message, then why it ended."""
        message = {
            "index": index,
            "delta": {"role": "assistant", "content": shown(completion, self._fields.stop)},
            "logprobs": self._logprobs(completion, pieces),
            "finish_reason": None,
            **_ids(self._ask, self._fields.return_token_ids, prompt, completion),
        }
        end = {"index": index, "delta": {}, "logprobs": None, "finish_reason": completion.finish_reason}
        return [_envelope(self._ask, "chat.completion.chunk", [choice], [completion]) for choice in (message, end)]

    def last(self, completions: Sequence[Completion]) -> Json:
        """The chunk that holds the usage."""
        return _envelope(self._ask, "chat.completion.chunk", [], completions) | {"usage": usage(self._ask, completions)}

    def _logprobs(self, completion: Completion, pieces: Pieces) -> Json | None:
        if pieces is None:
            return None
        entries = [
            {"token": piece.text, "logprob": logprob, "bytes": _bytes(piece.text)}
            for piece, logprob in zip(pieces, completion.logprobs.tolist(), strict=True)
        ]
        likely = bool(self._fields.top_logprobs)
        return {"content": [entry | {"top_logprobs": [entry] if likely else []} for entry in entries], "refusal": None}


Answer = CompletionAnswer | ChatAnswer


def shown(completion: Completion, stops: Iterable[str]) -> str:
    """The text without a stop text, which samplers keep, and what may follow it."""
    text = completion.text
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def usage(ask: Ask, completions: Iterable[Completion]) -> Json:
    """Numbers of tokens. Each prompt counts once; what ended a completion counts too."""
    prompt = sum(len(ids) for ids in ask.operation.prompts)
    drawn = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def _envelope(ask: Ask, kind: str, choices: Sequence[Json], completions: Sequence[Completion]) -> Json:
    version = min(completion.policy_version for completion in completions)
    return {
        "id": ask.id,
        "object": kind,
        "created": ask.created,
        "model": ask.job.name,
        "system_fingerprint": f"policy-{version}",
        "choices": list(choices),
    }


def _ids(ask: Ask, wanted: bool, prompt: int, completion: Completion) -> Json:
    if not wanted:
        return {}
    return {"prompt_token_ids": ask.operation.prompts[prompt].tolist(), "token_ids": completion.token_ids.tolist()}


def _bytes(text: str) -> list[int] | None:
    return None if INCOMPLETE in text else list(text.encode("utf-8", "replace"))
