"""What the OpenAI-compatible routes take. Each field has its effect, or is refused by name; none is taken and ignored.

A field that OpenAI knows and we do not is taken where its value asks for nothing, e.g. ``frequency_penalty=0``.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import Field

from arctic_core.server.openai_errors import Refused

MAX_N = 128
MAX_STOPS = 16
_INT64 = 2**63

T = TypeVar("T", bound="SamplingFields")


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(pydantic.BaseModel):
    """Options of a streamed answer."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    """Send a last chunk with the numbers of tokens."""


class SamplingFields(pydantic.BaseModel):
    """Fields of both kinds of completions."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    model: str
    """Name of a job with a sampler."""
    temperature: float = Field(1.0, ge=0, le=2)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass."""
    n: int = Field(1, ge=1, le=MAX_N)
    """Completions per prompt."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], pydantic.BeforeValidator(_listed)] = Field(
        default=[], max_length=MAX_STOPS
    )
    """Texts that end a completion; they are not part of its text."""
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    """The same seed, prompt and policy version give the same completions."""
    stream: bool = False
    """Answer with server-sent events, one completion at a time."""
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256)
    """Who asks, for the server's log."""
    top_k: int = Field(0, ge=0, lt=2**31)
    """Not OpenAI's: number of most likely tokens kept; 0 keeps all."""
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(default=[], max_length=256)
    """Not OpenAI's: tokens that end a completion."""
    ignore_eos: bool = False
    """Not OpenAI's: go on past the model's end-of-sequence tokens."""
    return_token_ids: bool = False
    """Not OpenAI's: add ``prompt_token_ids`` and ``token_ids`` to each choice."""


class CompletionFields(SamplingFields):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        Any,
        pydantic.WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "items": {"type": "string"}},
                    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                    {"type": "array", "minItems": 1, "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
                ]
            }
        ),
    ]
    """Text, token ids, or a list of either."""
    max_tokens: int | None = Field(None, ge=1)
    """Most new tokens per completion; 16 where absent."""
    logprobs: int | None = Field(None, ge=0, le=5)
    """0: report the log-prob of each token drawn. 1: with ``temperature=0``, where that token is the most likely one."""


class ChatFields(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[
        Any,
        pydantic.WithJsonSchema(
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {"role": {"enum": ["system", "developer", "user", "assistant"]}, "content": {}},
                },
            }
        ),
    ]
    """The conversation; ``content`` is a text, or a list of parts of type ``text``."""
    max_tokens: int | None = Field(None, ge=1)
    """Most new tokens per completion; absent: as many as fit."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of ``max_tokens``."""
    logprobs: bool = False
    """Report the log-prob of each token drawn."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    """With ``logprobs``: 0, or 1 with ``temperature=0``, where the token drawn is the most likely one."""


_NO_CONTROL = "the sampler has no such control"
_NO_TOOLS = "tool calls are not read from the text"
_NOT_KEPT = "nothing is kept of a request"
_NO_CACHE = "the sampler's cache takes no advice"
_TEXT_ONLY = "models read and write text only"

_FOREIGN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "frequency_penalty": (_NO_CONTROL, (0, 0.0)),
    "presence_penalty": (_NO_CONTROL, (0, 0.0)),
    "logit_bias": (_NO_CONTROL, ({},)),
}
COMPLETION_FOREIGN = _FOREIGN | {
    "best_of": ("completions are not ranked; only best_of == n means nothing", ()),
    "echo": ("the prompt is not repeated or scored; prepend it yourself", (False,)),
    "suffix": ("models continue a prompt; they do not fill gaps", ("",)),
}
CHAT_FOREIGN = _FOREIGN | {
    "audio": (_TEXT_ONLY, ()),
    "function_call": (_NO_TOOLS, ("none",)),
    "functions": (_NO_TOOLS, ([],)),
    "metadata": (_NOT_KEPT, ({},)),
    "modalities": (_TEXT_ONLY, (["text"],)),
    "moderation": ("nothing is moderated", ()),
    "parallel_tool_calls": (_NO_TOOLS, ()),
    "prediction": (_NO_CONTROL, ()),
    "prompt_cache_key": (_NO_CACHE, ()),
    "prompt_cache_options": (_NO_CACHE, ()),
    "prompt_cache_retention": (_NO_CACHE, ()),
    "reasoning_effort": (_NO_CONTROL, ()),
    "response_format": ("the text is not constrained", ({"type": "text"},)),
    "safety_identifier": (f"{_NOT_KEPT}; `user` goes to the log", ()),
    "service_tier": ("all requests are served alike", ("auto", "default")),
    "store": (_NOT_KEPT, (False,)),
    "tool_choice": (_NO_TOOLS, ("none",)),
    "tools": (_NO_TOOLS, ([],)),
    "verbosity": (_NO_CONTROL, ()),
    "web_search_options": (_NO_TOOLS, ()),
}
"""Fields of OpenAI's that we do not have: why, and the values that ask for nothing. ``null`` always does."""


def parse_completion(values: dict[str, Any]) -> CompletionFields:
    """Read the body of a completion.

    Raises:
        Refused: A field is unknown, wrong or not supported.
    """
    values = dict(values)
    if values.get("best_of") is not None and _same(values["best_of"], values.get("n") or 1):
        del values["best_of"]
    fields = _parse(CompletionFields, values, COMPLETION_FOREIGN)
    if fields.logprobs:
        _require_greedy(fields, "logprobs", fields.logprobs)
    return fields


def parse_chat(values: dict[str, Any]) -> ChatFields:
    """Read the body of a chat completion.

    Raises:
        Refused: A field is unknown, wrong or not supported.
    """
    fields = _parse(ChatFields, values, CHAT_FOREIGN)
    if fields.max_tokens is not None and fields.max_completion_tokens is not None:
        raise Refused("max_tokens is the old name of max_completion_tokens; give one", param="max_tokens")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise Refused("top_logprobs goes with logprobs=true", param="top_logprobs")
    if fields.top_logprobs:
        _require_greedy(fields, "top_logprobs", fields.top_logprobs)
    return fields


def _require_greedy(fields: SamplingFields, param: str, count: int) -> None:
    """The sampler reports the token it drew and no other; only of a greedy one is known that it is the most likely."""
    if count > 1 or fields.temperature > 0:
        raise Refused(
            f"{param}={count}: the sampler reports the log-prob of the token it drew; 0 asks for that, and 1 can be had with "
            "temperature=0, where that token is the most likely one",
            param=param,
            code="unsupported_value",
        )


def _parse(kind: type[T], values: dict[str, Any], foreign: dict[str, tuple[str, tuple[Any, ...]]]) -> T:
    given: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        if name not in foreign:
            given[name] = value
        elif not any(_same(value, neutral) for neutral in foreign[name][1]):
            raise Refused(f"{name!r} is not supported: {foreign[name][0]}", param=name, code="unsupported_parameter")
    unknown = [name for name in (*given, *values) if name not in kind.model_fields and name not in foreign]
    if unknown:
        raise Refused(f"there is no field {unknown[0][:64]!r} here", param=unknown[0][:64], code="unknown_parameter")
    try:
        fields = kind.model_validate(given)
    except pydantic.ValidationError as error:
        raise _refusal(error) from None
    if fields.stream_options is not None and not fields.stream:
        raise Refused("stream_options goes with stream=true", param="stream_options")
    for name, texts in (("model", [fields.model]), ("user", [fields.user or ""]), ("stop", fields.stop)):
        for text in texts:
            require_unicode(text, name)
    return fields


def _refusal(error: pydantic.ValidationError) -> Refused:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return Refused(f"{param} is missing", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return Refused(f"{param[:128]!r} is not supported", param=param[:128], code="unknown_parameter")
    return Refused(f"{param}: {first['msg']}", param=param)


def _same(value: Any, neutral: Any) -> bool:
    return type(value) is type(neutral) and value == neutral


def require_unicode(text: str, param: str) -> str:
    """Refuse half of a surrogate pair, which JSON can spell and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused(f"{param} is not valid Unicode: half of a surrogate pair", param=param) from None
    return text
