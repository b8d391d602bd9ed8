"""``/v1``: what OpenAI's clients speak. A model is a job with a sampler, and answers come from the policy as last synced."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Literal

import fastapi
import numpy as np
import pydantic
from starlette.requests import Request
from starlette.responses import Response

from arctic_core import protocol as p
from arctic_core.errors import JobNotFoundError
from arctic_core.server.body import read_json
from arctic_core.server.jobs import Job, Jobs
from arctic_core.server.observe import REQUEST_ID
from arctic_core.server.openai_answers import Answer, ChatAnswer, CompletionAnswer
from arctic_core.server.openai_errors import Refused, openai_error, openai_headers
from arctic_core.server.openai_fields import ChatFields, CompletionFields, SamplingFields, parse_chat, parse_completion
from arctic_core.server.openai_generate import Ask, generate, make_ask, stream
from arctic_core.server.openai_prompts import read_messages, read_prompts, require_room
from arctic_core.server.openai_stream import DONE, EventStream
from arctic_core.server.openai_text import Tokenizers
from arctic_core.server.routes import job_of, jobs_of, json_body, principal
from arctic_core.server.status import json_response

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, of completions."""


class OpenAIErrorBody(pydantic.BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field it is about."""
    code: str | None


class OpenAIError(pydantic.BaseModel):
    """Body of every response that reports an error."""

    error: OpenAIErrorBody


class Model(pydantic.BaseModel):
    """A job with a sampler."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(pydantic.BaseModel):
    """All jobs with a sampler."""

    object: Literal["list"] = "list"
    data: list[Model]


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OpenAIError, "description": "Refused; the body says why."},
    "5XX": {"model": OpenAIError, "description": "Failed; the body says why."},
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "In OpenAI's format; events with `stream`.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}},
    }
}

router = fastapi.APIRouter(tags=["OpenAI"], responses=_ERRORS)


def mount_openai(app: fastapi.FastAPI, jobs: Jobs) -> None:
    """Add the routes to an application whose state holds these jobs and their calls."""
    assert app.state.jobs is jobs
    app.state.tokenizers = Tokenizers()
    app.include_router(router)
    app.add_exception_handler(Refused, _refused)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return openai_error(error)


# --- models ----------------------------------------------------------------------------------------------------------------


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """Jobs that can be asked for completions."""
    visible = jobs_of(request).visible(principal(request))
    return ModelList(data=[_model(job) for job in visible if job.state == "ready" and job.config.sampling_gpus])


@router.get("/v1/models/{model}")
async def get_model(request: Request, model: str) -> Model:
    """One of them."""
    return _model(_job(request, model))


def _model(job: Job) -> Model:
    return Model(id=job.name, created=int(job.created), owned_by=job.owner)


def _job(request: Request, name: str) -> Job:
    """The job behind a model's name.

    Raises:
        JobNotFoundError: There is none for this caller, it ended, or it has no sampler.
        Refused: It is not ready yet.
    """
    job = job_of(request, name)
    if job.state == "starting":
        raise Refused(f"the model {name!r} is being loaded; try again soon", status=503, param="model", code="model_loading")
    if job.state != "ready":
        raise JobNotFoundError(f"the job {name!r} is {job.state}", remedy="list what there is: GET /v1/models")
    if not job.config.sampling_gpus:
        raise JobNotFoundError(f"the job {name!r} has no sampler", remedy="start it with sampling_gpus=1 or more")
    return job


# --- completions -----------------------------------------------------------------------------------------------------------


@router.post("/v1/completions", responses=_ANSWERS, openapi_extra=json_body(CompletionFields), response_class=Response)
async def completions(request: Request) -> Response:
    """Continue prompts."""
    fields = parse_completion(await _read(request))
    job = _admit(request, fields)
    limit = job.config.max_seq_len
    given = read_prompts(fields.prompt, most=job.config.sampling.max_waiting, max_seq_len=limit)
    prompts = await _tokenizers(request).encode(job, given)
    for i, prompt in enumerate(prompts):
        require_room(len(prompt), "prompt" if len(prompts) == 1 else f"prompt[{i}]", limit)
    _require_tokens(fields.max_tokens, "max_tokens", max(map(len, prompts)), limit)
    ask = _ask(request, job, fields, prompts, fields.max_tokens or DEFAULT_MAX_TOKENS)
    return await _respond(request, ask, CompletionAnswer(ask, fields), fields)


@router.post("/v1/chat/completions", responses=_ANSWERS, openapi_extra=json_body(ChatFields), response_class=Response)
async def chat_completions(request: Request) -> Response:
    """Answer in a conversation, in the model's own chat template."""
    fields = parse_chat(await _read(request))
    job = _admit(request, fields)
    limit = job.config.max_seq_len
    prompt = await _tokenizers(request).encode_chat(job, read_messages(fields.messages))
    require_room(len(prompt), "messages", limit)
    param = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    wanted = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    _require_tokens(wanted, param, len(prompt), limit)
    ask = _ask(request, job, fields, [prompt], wanted or limit - len(prompt))
    return await _respond(request, ask, ChatAnswer(ask, fields), fields)


async def _read(request: Request) -> dict[str, Any]:
    return await read_json(request, pause_s=jobs_of(request).config.body_timeout_s)


def _tokenizers(request: Request) -> Tokenizers:
    return request.app.state.tokenizers


def _admit(request: Request, fields: SamplingFields) -> Job:
    """The job, if the server takes work for it now."""
    jobs_of(request).require_open()
    job = _job(request, fields.model)
    request.app.state.calls.require_room()
    job.renew()
    return job


def _require_tokens(wanted: int | None, param: str, prompt: int, limit: int) -> None:
    if wanted is not None and prompt + wanted > limit:
        raise Refused(
            f"{param}={wanted} after a prompt of {prompt} tokens; together they may have {limit}",
            param=param,
            code="context_length_exceeded",
        )


def _ask(request: Request, job: Job, fields: SamplingFields, prompts: list[np.ndarray], max_tokens: int) -> Ask:
    most = job.config.sampling.max_waiting
    if len(prompts) * fields.n > most:
        raise Refused(f"{len(prompts) * fields.n} completions at once; at most {most} can run or wait", param="n")
    id = f"{'chatcmpl' if isinstance(fields, ChatFields) else 'cmpl'}-{uuid.uuid4().hex}"
    if fields.user is not None:
        logger.info("%s (request %s) is for user %r", id, REQUEST_ID.get(), fields.user)
    sampling = p.SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        stop=tuple(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        seed=fields.seed,
    )
    operation = p.Generate(prompts=tuple(prompts), sampling=sampling, n=fields.n, request_id=id)
    return make_ask(id, int(time.time()), job, operation, jobs_of(request).config.max_deadline_s)


async def _respond(request: Request, ask: Ask, answer: Answer, fields: SamplingFields) -> Response:
    if fields.stream:
        usage = fields.stream_options is not None and fields.stream_options.include_usage
        return EventStream(_events(request, ask, answer, usage))
    rows = await generate(jobs_of(request), ask, request.receive)
    pieces: list[Any] = [None] * sum(map(len, rows))
    if answer.wants_pieces:
        pieces = list(await _tokenizers(request).pieces(ask.job, [c.token_ids for row in rows for c in row]))
    return json_response(answer.whole(rows, pieces), headers=openai_headers())


async def _events(request: Request, ask: Ask, answer: Answer, usage: bool) -> AsyncGenerator[Any, None]:
    ready: list[p.Completion] = []
    async with contextlib.aclosing(stream(jobs_of(request), ask)) as items:
        async for item in items:
            ready.append(item.completion)
            pieces = None
            if answer.wants_pieces:
                (pieces,) = await _tokenizers(request).pieces(ask.job, [item.completion.token_ids])
            for chunk in answer.chunks(item.prompt, item.index, item.completion, pieces):
                yield chunk | ({"usage": None} if usage else {})
    if usage:
        yield answer.last(ready)
    yield DONE
