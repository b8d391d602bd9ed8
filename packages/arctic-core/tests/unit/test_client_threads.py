"""The synchronous client's event loop: threads, running loops, Ctrl-C, failed starts and the end of the process."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator

import pytest

from arctic_core import protocol as p
from arctic_core.client import ArcticRLClient, create_arctic_rl_client
from arctic_core.config import ArcticRLClientConfig
from arctic_core.errors import DeadlineExceeded, EngineStartError, InvalidStateError, TransportClosedError
from arctic_core.transports.base import Transport
from arctic_core.transports.mock import MockTransport

CONFIG = ArcticRLClientConfig(model_name="m", training_gpus=1, job="threads", deadlines={"stop": 2.0})
STEPPED = p.Stepped(grad_norm=1.0, lr=0.1, step=1, policy_version=1)


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "arctic-threads"]


def test_it_works_inside_a_running_loop() -> None:
    async def main() -> p.Stepped:
        with create_arctic_rl_client(CONFIG, transport=MockTransport(lambda request: STEPPED)) as client:
            return client.step()

    assert asyncio.run(main()).step == 1
    assert loop_threads() == []


def test_calls_of_many_threads_run_at_the_same_time() -> None:
    everyone = threading.Barrier(4, timeout=10)

    async def handler(request: p.Request) -> p.Result:
        await asyncio.to_thread(everyone.wait)
        return STEPPED

    with create_arctic_rl_client(CONFIG, transport=MockTransport(handler)) as client:
        results: list[p.Stepped] = []
        threads = [threading.Thread(target=lambda: results.append(client.step())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
    assert len(results) == 4


def test_a_call_from_its_own_loop_is_refused_instead_of_hanging() -> None:
    holder: list[ArcticRLClient] = []

    def handler(request: p.Request) -> p.Result:
        holder[0].info()
        return STEPPED

    with create_arctic_rl_client(CONFIG, transport=MockTransport(handler)) as client:
        holder.append(client)
        with pytest.raises(InvalidStateError, match="its own event loop"):
            client.step()


def test_closing_ends_calls_in_flight_on_other_threads() -> None:
    entered = threading.Event()
    caught: list[BaseException] = []

    async def handler(request: p.Request) -> p.Result:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    def call(client: ArcticRLClient) -> None:
        try:
            client.step()
        except TransportClosedError as error:
            caught.append(error)

    client = create_arctic_rl_client(CONFIG, transport=MockTransport(handler))
    thread = threading.Thread(target=call, args=(client,))
    thread.start()
    assert entered.wait(5)
    client.close()
    thread.join(5)
    assert [type(error) for error in caught] == [TransportClosedError]
    assert loop_threads() == []


class FailsToOpen(Transport):
    """Raises when opened."""

    async def open(self) -> None:
        raise EngineStartError("no such model")

    async def send(self, request: p.Request) -> p.Reply:
        raise AssertionError

    async def stream(self, request: p.Request) -> AsyncIterator[p.Reply]:
        raise AssertionError
        yield

    async def close(self, shutdown: bool) -> None:
        raise AssertionError("there is nothing to close")

    def reconnect_config(self) -> None:
        return None


def test_a_failed_start_leaves_no_thread() -> None:
    with pytest.raises(EngineStartError):
        create_arctic_rl_client(CONFIG, transport=FailsToOpen())
    assert loop_threads() == []


class FailsToClose(MockTransport):
    """Runs into its deadline when closed."""

    async def close(self, shutdown: bool) -> None:
        raise DeadlineExceeded("still there")


def test_a_failed_close_is_told_and_leaves_no_thread() -> None:
    client = create_arctic_rl_client(CONFIG, transport=FailsToClose(lambda request: STEPPED))
    with pytest.raises(DeadlineExceeded):
        client.close()
    assert loop_threads() == []
    client.close()


# --- processes ------------------------------------------------------------------------------------------------------------

PRELUDE = """
import asyncio, os, sys, time
from arctic_core import ArcticRLClientConfig, MockTransport, Stepped, create_arctic_rl_client
config = ArcticRLClientConfig(model_name="m", training_gpus=1)
stepped = Stepped(grad_norm=1.0, lr=0.1, step=1, policy_version=1)

def say(text):
    os.write(1, f"{text}\\n".encode())  # one write, or lines of two threads would mix
"""


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def interrupted(program: str) -> tuple[int, str, str, float]:
    """Send Ctrl-C once the program says "waiting"; its exit status, output, errors, and seconds until its end."""
    process = start(program)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err, time.monotonic() - begin
    finally:
        process.kill()


def test_ctrl_c_cancels_the_operation_and_the_client_lives_on() -> None:
    status, out, err, seconds = interrupted("""
        hang = True
        async def handler(request):
            if not hang:
                return stepped
            say("waiting")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                say("cancelled")
                raise
        with create_arctic_rl_client(config, transport=MockTransport(handler)) as client:
            try:
                client.step()
            except KeyboardInterrupt:
                say("interrupted")
            hang = False
            say(client.step().step)
    """)
    assert (status, sorted(out.split())) == (0, ["1", "cancelled", "interrupted"]), err
    assert seconds < 5


def test_ctrl_c_while_starting_cleans_up_before_it_is_raised() -> None:
    status, out, err, seconds = interrupted("""
        class Slow(MockTransport):
            async def open(self):
                say("waiting")
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.2)
                    say("cleaned")
        try:
            create_arctic_rl_client(config, transport=Slow(lambda request: stepped))
        except KeyboardInterrupt:
            say("interrupted")
    """)
    assert (status, out.split()) == (0, ["cleaned", "interrupted"]), err
    assert seconds < 5


def test_ctrl_c_in_a_stream_ends_it() -> None:
    status, out, err, seconds = interrupted("""
        class Endless(MockTransport):
            async def stream(self, request):
                say("waiting")
                try:
                    await asyncio.Event().wait()
                    yield
                finally:
                    say("ended")
        with create_arctic_rl_client(config, transport=Endless(lambda request: stepped)) as client:
            try:
                list(client.generate_stream([[1]]))
            except KeyboardInterrupt:
                say("interrupted")
    """)
    assert (status, sorted(out.split())) == (0, ["ended", "interrupted"]), err
    assert "never retrieved" not in err
    assert seconds < 5


def test_a_client_that_was_not_closed_is_closed_at_the_end_of_the_process() -> None:
    process = start("""
        class Closing(MockTransport):
            async def close(self, shutdown):
                await asyncio.to_thread(time.sleep, 0.1)
                say(f"closed {shutdown}")
        client = create_arctic_rl_client(config, transport=Closing(lambda request: stepped))
        say(client.step().step)
    """)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "1\nclosed False\n"), err
    assert err == ""
