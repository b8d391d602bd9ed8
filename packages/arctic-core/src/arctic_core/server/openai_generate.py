"""Generations for OpenAI's routes: what was asked for, carried out by a job's sampler, whole or completion by completion."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from arctic_core import protocol as p
from arctic_core.errors import NonFiniteError, ProtocolError
from arctic_core.server.calls import GRACE_S, describe
from arctic_core.server.jobs import Job, Jobs
from arctic_core.server.openai_errors import Refused
from arctic_core.server.streams import disconnected


@dataclass(frozen=True)
class Ask:
    """One request, ready for the sampler."""

    id: str
    """OpenAI's id of the answer, and the sampler's of the request."""
    created: int
    """Seconds since 1970."""
    job: Job
    request: p.Request
    operation: p.Generate = field(repr=False)


def make_ask(id: str, created: int, job: Job, operation: p.Generate, max_deadline_s: float) -> Ask:
    """The request as the job's service gets it."""
    deadline_s = min(job.config.deadlines.request, max_deadline_s)
    return Ask(id, created, job, p.Request(session=id, sequence=0, operation=operation, deadline_s=deadline_s), operation)


async def generate(jobs: Jobs, ask: Ask, receive: Receive) -> list[list[p.Completion]]:
    """All completions, per prompt. A client that leaves cancels them.

    Raises:
        ArcticError: What the service or the transport says.
        Refused: Generation was aborted.
        ClientDisconnect: The client is gone.
    """
    with ask.job.working("generate", session=ask.id) as outcome:
        working = asyncio.create_task(_send(jobs, ask))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                outcome.error = "Cancelled"
                raise ClientDisconnect
            return working.result()
        finally:
            leaving.cancel()
            working.cancel()
            await asyncio.wait({working, leaving})


async def _send(jobs: Jobs, ask: Ask) -> list[list[p.Completion]]:
    try:
        async with asyncio.timeout(ask.request.deadline_s + GRACE_S):
            reply = await ask.job.transport.send(ask.request)
    except Exception as error:
        raise describe(jobs, ask.job, ask.request, error).to_exception() from error
    result = reply.unwrap()
    if not isinstance(result, p.Generated):
        raise ProtocolError(f"generate was answered with {type(result).__name__}", where=ask.job.name)
    rows = [list(row) for row in result.completions]
    if [len(row) for row in rows] != [ask.operation.n] * len(ask.operation.prompts):
        raise ProtocolError("the sampler returned another number of completions", where=ask.job.name)
    for row in rows:
        for completion in row:
            check(completion)
    return rows


async def stream(jobs: Jobs, ask: Ask) -> AsyncGenerator[p.CompletionReady, None]:
    """Completions in the order of finishing. Closing it cancels what still runs; raises like :func:`generate`."""
    count = 0
    with ask.job.working("generate_stream", session=ask.id) as outcome:
        async with contextlib.aclosing(_replies(jobs, ask)) as replies:
            async for reply in replies:
                ask.job.renew()
                if isinstance(reply.body, p.ErrorInfo):
                    outcome.error = reply.body.kind
                result = reply.unwrap()
                if isinstance(result, p.CompletionReady):
                    count += 1
                    check(result.completion)
                    yield result
    if count != ask.operation.n * len(ask.operation.prompts):
        raise ProtocolError("the sampler returned another number of completions", where=ask.job.name)


async def _replies(jobs: Jobs, ask: Ask) -> AsyncGenerator[p.Reply, None]:
    replies: AsyncIterator[p.Reply] = ask.job.transport.stream(ask.request)
    try:
        async with (
            asyncio.timeout(ask.request.deadline_s + GRACE_S),
            contextlib.aclosing(replies),  # type: ignore[type-var] - all are generators
        ):
            async for reply in replies:
                yield reply
    except Exception as error:
        raise describe(jobs, ask.job, ask.request, error).to_exception() from error


def check(completion: p.Completion) -> None:
    """Refuse to pass on what OpenAI's format cannot say.

    Raises:
        Refused: It was aborted: the format has no such reason to finish, and a client would take it for whole.
        NonFiniteError: A log-prob is NaN or infinite.
    """
    if completion.finish_reason == "abort":
        raise Refused("the generation was aborted on the server; try again", status=503, code="aborted")
    if not np.isfinite(completion.logprobs).all():
        raise NonFiniteError(
            "the model's log-probs are not finite", where="sampler", remedy="load an earlier checkpoint of the policy"
        )
