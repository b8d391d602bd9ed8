"""Prompts and messages of the OpenAI-compatible routes, checked before anything reads them."""

from __future__ import annotations

from typing import Any

from arctic_core.server.openai_errors import Refused
from arctic_core.server.openai_fields import require_unicode

Prompt = str | list[int]
Messages = list[dict[str, str]]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles, and what templates call them: ``developer`` is the newer name of ``system``."""
_NEUTRAL = {"refusal", "audio", "tool_calls", "function_call", "annotations", "name"}
_MAX_ID = 2**31


def read_prompts(value: Any, *, most: int, max_seq_len: int) -> list[Prompt]:
    """The prompts in ``prompt``: each a text or token ids.

    Args:
        value: As it came.
        most: Number of prompts that the service can take at once.
        max_seq_len: Tokens that fit.

    Raises:
        Refused: It is something else, too many or too long.
    """
    if isinstance(value, str):
        return [require_unicode(value, "prompt")]
    if not isinstance(value, list) or not value:
        raise Refused("prompt is a text, token ids, or a list of texts or of token ids, not empty", param="prompt")
    if type(value[0]) is int:
        return [_ids(value, "prompt", max_seq_len)]
    if len(value) > most:
        raise Refused(f"{len(value)} prompts; {most} completions can run or wait at once", param="prompt")
    if isinstance(value[0], list):
        return [_ids(item, f"prompt[{i}]", max_seq_len) for i, item in enumerate(value)]
    return [_text(item, f"prompt[{i}]") for i, item in enumerate(value)]


def read_messages(value: Any) -> Messages:
    """The conversation in ``messages``: role and text of each.

    Raises:
        Refused: It is something else, or holds what models here cannot read: images, sound, tool calls, names.
    """
    if not isinstance(value, list) or not value:
        raise Refused("messages is a list of messages, not empty", param="messages")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(value: Any, param: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Refused(f"{param} is not an object with role and content", param=param)
    role = value.get("role")
    if role in ("tool", "function"):
        raise Refused(f"{param}.role: tools are not supported", param=f"{param}.role", code="unsupported_value")
    if not isinstance(role, str) or role not in ROLES:
        raise Refused(f"{param}.role is one of {', '.join(ROLES)}", param=f"{param}.role")
    for name, given in value.items():
        if name in ("role", "content") or (name in _NEUTRAL and given in (None, [])):
            continue
        code = "unsupported_parameter" if name in _NEUTRAL else "unknown_parameter"
        where = f"{param}.{name[:64]}"
        raise Refused(f"{where} is not supported: a message is a role and a text", param=where, code=code)
    return {"role": ROLES[role], "content": _content(value.get("content"), f"{param}.content")}


def _content(value: Any, param: str) -> str:
    if not isinstance(value, list):
        return _text(value, param)
    if not value:
        raise Refused(f"{param} has no parts", param=param)
    return "\n".join(_part(item, f"{param}[{i}]") for i, item in enumerate(value))


def _part(value: Any, param: str) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise Refused(f"{param} is not an object with a type", param=param)
    if kind != "text":
        raise Refused(
            f"{param}.type {kind[:64]!r} is not supported: models here read text",
            param=f"{param}.type",
            code="unsupported_value",
        )
    extra = sorted(set(value) - {"type", "text"})
    if extra:
        where = f"{param}.{extra[0][:64]}"
        raise Refused(f"{where} is not supported", param=where, code="unknown_parameter")
    return _text(value.get("text"), f"{param}.text")


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{param} is not a text", param=param)
    return require_unicode(value, param)


def _ids(value: Any, param: str, max_seq_len: int) -> list[int]:
    if not isinstance(value, list) or not value:
        raise Refused(f"{param} is not a list of token ids", param=param)
    require_room(len(value), param, max_seq_len)
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token < _MAX_ID:
            raise Refused(f"{param}[{i}] is not a token id", param=f"{param}[{i}]")
    return value


def require_room(tokens: int, param: str, max_seq_len: int) -> None:
    """Refuse a prompt that is empty or leaves no room for a token."""
    if tokens == 0:
        raise Refused(f"{param} has no tokens", param=param)
    if tokens >= max_seq_len:
        raise Refused(
            f"{param} has {tokens} tokens; prompt and completion together may have {max_seq_len}",
            param=param,
            code="context_length_exceeded",
        )
