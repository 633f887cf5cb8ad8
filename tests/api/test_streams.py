"""What is kept of streamed replies, of how many and for how long."""

import asyncio
import gc
import weakref

import pytest

from mlxcel.api import streams as module
from mlxcel.api.streams import MAX_BYTES, MAX_FINISHED, MAX_FINISHED_BYTES, Recording, Streams
from mlxcel.errors import Unavailable


def replying(*pieces, then=None):
    """A generation that says the pieces and then ends, waits or fails."""

    async def generate(send):
        for piece in pieces:
            await send(piece)
        if isinstance(then, Exception):
            raise then
        if then is not None:
            await then.wait()

    return generate


async def told(recording, offset=0):
    """All that a reader from `offset` on gets, at the end."""
    whole = b""
    while piece := await recording.read(offset + len(whole)):
        whole += piece
    return whole


async def finished(streams, name, *pieces):
    recording = streams.begin(name, replying(*pieces), lambda: None)
    await told(recording, 1 << 60)
    return recording


async def test_a_reader_gets_what_was_said_before_it_came_and_what_is_said_after():
    more = asyncio.Event()
    recording = Streams().begin("a", replying(b"one ", b"two", then=more), lambda: None)
    early = asyncio.create_task(told(recording))
    assert await recording.read(0) == b"one two"
    late = asyncio.create_task(told(recording, 4))
    await recording.send(b" three")
    more.set()
    assert (await early, await late) == (b"one two three", b"two three")


async def test_beyond_its_bound_a_reply_loses_its_beginning():
    recording = await finished(Streams(), "a", b"x" * MAX_BYTES, b"12345")
    assert (recording.num_bytes, recording.num_dropped) == (MAX_BYTES + 5, 5)
    assert await recording.read(4) is None, "a reader that far behind cannot be told the rest"
    assert (await told(recording, 5))[-6:] == b"x12345"


async def test_one_event_beyond_the_bound_is_kept_by_its_end():
    recording = Recording("a")
    await recording.send(b"y" + b"x" * MAX_BYTES)
    assert (recording.num_dropped, bytes(recording.kept)) == (1, b"x" * MAX_BYTES)


async def test_a_finished_reply_is_forgotten_after_its_lifetime():
    streams = Streams(lifetime=0)
    await finished(streams, "a", b"x")
    async with asyncio.timeout(5):
        while streams.find("a"):
            await asyncio.sleep(0)


async def test_the_oldest_finished_replies_go_when_there_are_too_many():
    streams = Streams()
    running = streams.begin("running", replying(b"x", then=asyncio.Event()), lambda: None)
    for i in range(MAX_FINISHED + 2):
        await finished(streams, str(i), b"x")
    assert [streams.find(str(i)) is not None for i in range(4)] == [False, False, True, True]
    assert streams.find("running") is running
    streams.stop("running")


async def test_the_oldest_finished_replies_go_when_they_hold_too_much():
    streams = Streams()
    fitting = MAX_FINISHED_BYTES // MAX_BYTES
    for i in range(fitting + 1):
        await finished(streams, str(i), b"x" * MAX_BYTES)
    assert streams.find("0") is None and streams.find("1") is not None


async def test_what_is_forgotten_is_held_by_nothing(monkeypatch):
    monkeypatch.setattr(module, "MAX_FINISHED", 1)
    streams = Streams()
    recordings = [
        await finished(streams, "many", b"x"),
        await finished(streams, "replaced", b"x"),
        streams.begin("replaced", replying(b"x", then=asyncio.Event()), lambda: None),
    ]
    held = [weakref.ref(recording) for recording in recordings]
    streams.stop("replaced")
    del recordings
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]


async def test_one_that_is_replaced_before_it_ran_is_let_go_of_too():
    streams, let_go = Streams(), []
    streams.begin("a", replying(b"never"), lambda: let_go.append("first"))
    second = streams.begin("a", replying(b"x"), lambda: let_go.append("second"))
    assert await told(second) == b"x"
    assert let_go == ["first", "second"]
    assert streams.find("a") is second


async def test_stopping_ends_readers_where_the_reply_is():
    streams = Streams()
    recording = streams.begin("a", replying(b"so far", then=asyncio.Event()), lambda: None)
    reader = asyncio.create_task(told(recording))
    assert await recording.read(0) == b"so far"
    streams.stop("a")
    assert await reader == b"so far"
    streams.stop("a")


@pytest.mark.parametrize("error", [Unavailable("full"), ZeroDivisionError("secret")])
async def test_a_failure_in_the_middle_is_an_event_and_before_the_first_byte_nothing_is_kept(error):
    streams = Streams()
    begun = streams.begin("begun", replying(b"data: 1\n\n", then=error), lambda: None)
    whole = await told(begun)
    assert whole.startswith(b'data: 1\n\ndata: {"error":') and b"secret" not in whole
    never = streams.begin("never", replying(then=error), lambda: None)
    assert await told(never) == b""
    assert never.failure is not None and "secret" not in never.failure.message
    assert streams.find("never") is None and streams.find("begun") is begun
