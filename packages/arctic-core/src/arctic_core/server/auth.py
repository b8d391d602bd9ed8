"""Who asks, and what they may do: bearer tokens, roles and the permissions each holds."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl

from arctic_core.config.server import Role, ServerConfig, TokenConfig
from arctic_core.errors import AuthenticationError, ConfigError, PermissionDeniedError

Permission = Literal["public", "read", "infer", "job"]

GRANTS: dict[Role, frozenset[Permission]] = {
    "admin": frozenset({"public", "read", "infer", "job"}),
    "job": frozenset({"public", "read", "infer", "job"}),
    "infer": frozenset({"public", "infer"}),
    "read": frozenset({"public", "read"}),
}
MIN_TOKEN_CHARACTERS = 16
_IN_QUERY = frozenset({"token", "access_token", "api_key", "apikey", "authorization", "bearer"})
_LOOPBACK_NAMES = frozenset({"localhost", "[::1]"})
_HOW = "send the header `Authorization: Bearer TOKEN`"


@dataclass(frozen=True)
class Principal:
    """Whoever a token belongs to."""

    name: str
    role: Role

    def require(self, permission: Permission) -> None:
        """Raise :class:`PermissionDeniedError` unless the role holds the permission."""
        if permission not in GRANTS[self.role]:
            raise PermissionDeniedError(
                f"the token {self.name!r} has the role {self.role!r}, which does not include {permission!r}",
                remedy="use a token with another role",
            )

    def sees(self, owner: str) -> bool:
        """Whether jobs of this owner exist for it. Tokens that only sample or watch see all; they cannot change any."""
        return self.role != "job" or self.name == owner


ANONYMOUS = Principal("local", "admin")
"""Whoever reaches a server without tokens, which listens on the loopback interface only."""


class Tokens:
    """The server's tokens, kept as digests.

    Raises:
        ConfigError: A token's variable or file is missing, or its text is too short.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._known = [(_digest(_text(token)), Principal(token.name, token.role)) for token in config.tokens]
        if len({digest for digest, _ in self._known}) != len(self._known):
            raise ConfigError("two tokens have the same text", where="tokens")

    def identify(self, headers: Mapping[str, str], query: str) -> Principal:
        """Whose request this is.

        Raises:
            AuthenticationError: There is no token, an unknown one, or one in the query, where logs would keep it.
        """
        if any(key.lower() in _IN_QUERY for key, _ in parse_qsl(query, keep_blank_values=True)):
            raise AuthenticationError("a token in the address ends up in logs, so it does not count there", remedy=_HOW)
        if not self._known:
            return ANONYMOUS
        scheme, _, text = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not text.strip():
            raise AuthenticationError("this server wants a token", remedy=_HOW)
        given = _digest(text.strip())
        found = [who for digest, who in self._known if hmac.compare_digest(digest, given)]  # all, so that time tells nothing
        if not found:
            raise AuthenticationError("the token is not one of this server's", remedy=_HOW)
        return found[0]

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """Without tokens, keep web pages out that make a browser on this machine ask in their name.

        Raises:
            PermissionDeniedError: The request comes from a web page, or for another host's name.
        """
        if self._known:
            return
        host = headers.get("host", "localhost").rsplit("@", 1)[-1]
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if (name.lower() not in _LOOPBACK_NAMES and not name.startswith("127.")) or "origin" in headers:
            raise PermissionDeniedError(
                "a server without tokens answers programs on its own machine only, not web pages",
                where="Origin" if "origin" in headers else "Host",
                remedy="give the server tokens",
            )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _text(token: TokenConfig) -> str:
    where = f"tokens[{token.name}]"
    if token.env is not None:
        text, source = os.environ.get(token.env, ""), f"environment variable {token.env}"
    else:
        source = f"file {token.file}"
        try:
            text = Path(str(token.file)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the {source} cannot be read: {error}", where=where) from None
    text = text.strip()
    if len(text) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"the {source} holds {len(text)} characters; a token has at least {MIN_TOKEN_CHARACTERS}",
            where=where,
            remedy="make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return text
