"""Who may do what: every route has its permission, every token its role, and nobody gets in otherwise."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
from fastapi.routing import APIRoute

from arctic_core.config.server import ServerConfig
from arctic_core.errors import ConfigError
from arctic_core.server.app import create_app
from arctic_core.server.auth import GRANTS, Tokens
from arctic_core.server.routes import PERMISSIONS

from .support import done, request, serving

TOKENS = {role: f"{role}-token-0123456789abcdef" for role in ("admin", "job", "infer", "read")}


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """One token of each role, and a second job's; half of them in files."""
    entries = []
    for role, text in {**TOKENS, "job2": "job2-token-0123456789abcdef"}.items():
        entry = {"name": role, "role": role.rstrip("2")}
        if role in ("job", "read"):
            (tmp_path / role).write_text(f"{text}\n")
            entry["file"] = str(tmp_path / role)
        else:
            monkeypatch.setenv(f"TOKEN_{role.upper()}", text)
            entry["env"] = f"TOKEN_{role.upper()}"
        entries.append(entry)
    return tuple(entries)


def bearer(text):
    return {"Authorization": f"Bearer {text}"}


def routes_of(app):
    found = set()
    for route in app.routes:
        found |= {
            (method, route.path) for method in route.methods if not (method == "HEAD" and not isinstance(route, APIRoute))
        }
    return found


def test_the_table_of_permissions_is_the_list_of_routes(tmp_path):
    app = create_app(ServerConfig(engines="local", data_root=str(tmp_path)))
    assert routes_of(app) == set(PERMISSIONS)
    assert {path for (_, path), permission in PERMISSIONS.items() if permission == "public"} == {"/healthz", "/readyz"}
    assert all(permission == "job" for (method, _), permission in PERMISSIONS.items() if method in ("DELETE", "PUT"))


def test_each_role_reaches_exactly_the_routes_of_its_permissions(tmp_path, tokens):
    async def main():
        async with serving(tmp_path, answer=done, tokens=tokens) as api:
            for (method, path), permission in PERMISSIONS.items():
                url = re.sub(r"\{\w+(:\w+)?\}", "1", path)
                for role, text in TOKENS.items():
                    response = await api.http.request(method, url, headers=bearer(text))
                    refused = response.status_code == 403
                    assert refused == (permission not in GRANTS[role]), (method, path, role, response.text)
                response = await api.http.request(method, url)
                assert (response.status_code == 401) == (permission != "public"), (method, path, response.text)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ({}, ""),
        (bearer("wrong-token-0123456789abcdef"), ""),
        (bearer(TOKENS["admin"][:-1]), ""),
        (bearer(TOKENS["admin"] + "x"), ""),
        (bearer(""), ""),
        ({"Authorization": TOKENS["admin"]}, ""),
        ({"Authorization": f"Basic {TOKENS['admin']}"}, ""),
        ({"X-Api-Key": TOKENS["admin"]}, ""),
        ({"Cookie": f"token={TOKENS['admin']}"}, ""),
        ({}, f"?token={TOKENS['admin']}"),
        (bearer(TOKENS["admin"]), f"?access_token={TOKENS['admin']}"),
        (bearer(TOKENS["admin"]), "?Token"),
    ],
)
def test_without_a_token_in_its_place_nobody_gets_in(tmp_path, tokens, headers, query, caplog):
    async def main():
        async with serving(tmp_path, answer=done, tokens=tokens) as api:
            for path in ("/arctic/v1/server", "/arctic/v1/jobs", "/openapi.json", "/no/such/path"):
                response = await api.http.get(path + query, headers=headers)
                assert response.status_code == 401, (path, response.text)
                assert response.json()["error"]["kind"] == "AuthenticationError"
                assert response.headers["www-authenticate"] == "Bearer"
                assert TOKENS["admin"] not in response.text
            response = await api.http.post("/arctic/v1/jobs" + query, headers=headers, json={"config": {}})
            assert response.status_code == 401
            assert not list(api.app.state.jobs)

    with caplog.at_level(logging.DEBUG, logger="arctic_core"):
        asyncio.run(main())
    assert "0123456789abcdef" not in caplog.text


def test_a_job_token_sees_its_own_jobs_only(tmp_path, tokens):
    async def main():
        async with serving(tmp_path, answer=done, tokens=tokens) as api:
            config = {"model_name": "hub/any", "training_gpus": 1}
            await api.post_job("mine", config, headers=bearer(TOKENS["job"]))
            other = bearer("job2-token-0123456789abcdef")
            paths = [(method, path) for method, path in PERMISSIONS if "{job}" in path]
            assert len(paths) >= 7
            for method, path in paths:
                url = path.format(job="mine", session="s", sequence=1)
                body = request_bytes() if path.endswith(("/call", "/stream")) else b"{}"
                kind = "application/vnd.arctic.frame" if path.endswith(("/call", "/stream")) else "application/json"
                response = await api.http.request(method, url, headers={**other, "Content-Type": kind}, content=body)
                assert response.status_code == 404, (method, path, response.text)
                assert response.json()["error"]["kind"] == "JobNotFoundError"
            assert (await api.http.get("/arctic/v1/jobs", headers=other)).json() == []
            for role in ("job", "admin", "read"):
                listed = (await api.http.get("/arctic/v1/jobs", headers=bearer(TOKENS[role]))).json()
                assert [view["owner"] for view in listed] == ["job"]
            assert api.app.state.jobs.get("mine").state in ("starting", "ready")
            taken = await api.post_job("mine", config, headers=other)
            assert (taken.status_code, taken.json()["error"]["kind"]) == (409, "InvalidStateError")
            assert (await api.http.delete("/arctic/v1/jobs/mine", headers=bearer(TOKENS["admin"]))).status_code == 202

    def request_bytes():
        from arctic_core import protocol as p
        from arctic_core import wire

        return wire.encode(request(p.Generate(prompts=(), sampling=p.SamplingParams()), 1))

    asyncio.run(main())


def test_a_web_page_cannot_use_a_server_without_tokens(tmp_path):
    async def main():
        async with serving(tmp_path, answer=done) as api:
            for headers in ({"Host": "evil.example"}, {"Host": "evil.example:8520"}, {"Origin": "http://evil.example"}):
                response = await api.http.get("/arctic/v1/jobs", headers=headers)
                assert (response.status_code, response.json()["error"]["kind"]) == (403, "PermissionDeniedError")
            for host in ("localhost", "localhost:8520", "127.0.0.1:1", "[::1]:8520"):
                assert (await api.http.get("/arctic/v1/jobs", headers={"Host": host})).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": "example.org"},
        {"tokens": ({"name": "a", "role": "job"},)},
        {"tokens": ({"name": "a", "role": "job", "env": "A", "file": "b"},)},
        {"tokens": ({"name": "a", "role": "root", "env": "A"},)},
        {"tokens": ({"name": "a", "role": "job", "env": "A"}, {"name": "a", "role": "read", "env": "B"})},
        {"host": "0.0.0.0", "tokens": ({"name": "a", "role": "job", "env": "A"},), "unrestricted_paths": True},
        {"tls_cert": "a.pem"},
        {"max_body_bytes": 2**40},
        {"default_lease_s": 10.0, "max_lease_s": 5.0},
        {"engines": "local", "ray": {"dashboard": True}},
        {"nothing": 1},
    ],
)
def test_a_server_that_would_be_unsafe_or_contradicts_itself_is_refused(settings):
    with pytest.raises(ConfigError):
        ServerConfig(**settings)


@pytest.mark.parametrize("text", ["", "short", "   \n"])
def test_a_token_that_is_missing_or_short_keeps_the_server_from_starting(monkeypatch, tmp_path, text):
    monkeypatch.setenv("A_TOKEN", text)
    (tmp_path / "token").write_text(text)
    for source in ({"env": "A_TOKEN"}, {"file": str(tmp_path / "token")}, {"env": "NO_SUCH"}, {"file": str(tmp_path / "none")}):
        with pytest.raises(ConfigError, match=r"tokens\[a\]"):
            Tokens(ServerConfig(tokens=({"name": "a", "role": "job", **source},)))


def test_neither_the_configuration_nor_its_digests_show_a_token(tmp_path, tokens):
    config = ServerConfig(tokens=tokens)
    shown = f"{config!r} {config.model_dump_json()} {Tokens(config).__dict__!r}"
    assert not any(text in shown for text in TOKENS.values())
