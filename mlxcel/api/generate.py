"""The one way from generations to an answer, for every dialect, streamed or not.

It submits all sequences of a request or none, folds their events, and whatever happens lets go of them at the end:
a client that leaves, a write that fails and a healthy end all pass through the same `finally`; a reply that outlives
its connection is let go of by `streams`. It does not know how an event looks on the wire (a shape does) nor how a
sequence is computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from mlxcel.api.conversation import Conversation
from mlxcel.api.fields import invalid
from mlxcel.api.options import Options
from mlxcel.api.prepare import next_prefix, off_loop
from mlxcel.api.promptlog import log_prompts
from mlxcel.api.responses import Choice, Shape, Timings, sse
from mlxcel.api.services import SERVICES, Services
from mlxcel.api.sse import PING, STREAM, EventStream, Send
from mlxcel.api.streams import conversation_id, follow
from mlxcel.cache.key import CacheContext
from mlxcel.engine.sequence import Delta, Event, Failed, Finished, Generation, Progress
from mlxcel.engine.sequence import Sequence as Running
from mlxcel.errors import ServerError
from mlxcel.prompt.reply import Plain, ReplyParser

if TYPE_CHECKING:
    from mlxcel.engine.scheduler import Scheduler


def json_response(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = orjson.dumps(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json", charset="utf-8")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for, and the form in which it wants the answer; `conversation` is that of a chat, `parser` makes
    what tells the parts of one choice."""

    options: Options
    generations: Sequence[Generation]
    shape: Shape
    conversation: Conversation | None = None
    parser: Callable[[], ReplyParser] = Plain


async def answer(request: web.Request, prepare: Callable[[Services, bytes], Asked]) -> web.StreamResponse:
    """Do what the body asks and say so. Raises ServerError as long as nothing was sent."""
    services = request.app[SERVICES]
    scheduler = services.live.scheduler
    try:
        conversation = conversation_id(request)
        asked = await off_loop(prepare, services, await request.read())
        sequences = _submit(scheduler, asked.generations)
    except ServerError:
        services.num_refused += 1
        raise
    log_prompts(services, sequences)

    def let_go() -> None:
        for sequence in sequences:
            scheduler.cancel(sequence)

    generate = partial(_generate, services, asked, sequences)
    timeout = services.settings.timeout
    if asked.options.stream and conversation:
        return await follow(request, services.streams.begin(conversation, generate, let_go), timeout)
    try:
        if not asked.options.stream:
            return json_response(asked.shape.body(await generate(None)))
        stream = request[STREAM] = EventStream(request, timeout)
        await generate(stream.send)
        await stream.close()
        return stream.response
    finally:
        let_go()


async def _generate(services: Services, asked: Asked, sequences: Sequence[Running], send: Send | None) -> list[Choice]:
    """All choices, whole; sent meanwhile, if they are to be."""
    num = asked.options.num_choices
    choices = [Choice(i, i // num, s.num_prompt, asked.parser()) for i, s in enumerate(sequences)]
    feed = Feed(sequences)
    try:
        if send is None:
            await _collect(feed, choices)
        else:
            await _stream(send, feed, choices, sequences, asked)
    finally:
        feed.close()
    warm_next(services, asked, choices)
    return choices


def warm_next(services: Services, asked: Asked, choices: Sequence[Choice]) -> None:
    """After a chat's one whole reply: offer what its next turn will begin with. Nobody waits for it."""
    conversation, context = asked.conversation, asked.generations[0].cache
    if conversation is None or context is None or len(choices) != 1 or not services.live.scheduler.warms:
        return
    reply = choices[0].text
    if not reply or conversation.continue_final:
        return
    task = asyncio.create_task(_offer(services, conversation, context, reply))
    services.background.add(task)
    task.add_done_callback(services.background.discard)


async def _offer(services: Services, conversation: Conversation, context: CacheContext, reply: str) -> None:
    try:
        tokens = await asyncio.to_thread(next_prefix, services, conversation, reply)
    except ServerError:
        return  # a template that refuses the follow-up will say so when it comes
    if tokens is not None:
        services.live.scheduler.warm(context, tokens)


async def run_to_end(services: Services, generation: Generation) -> Finished:
    """One generation whose text nobody wants. Raises ServerError."""
    scheduler = services.live.scheduler
    sequence = scheduler.submit(generation)
    try:
        async for event in sequence.events():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                return event
        raise RuntimeError("the events of a sequence ended without an end")
    finally:
        scheduler.cancel(sequence)


def _submit(scheduler: Scheduler, generations: Sequence[Generation]) -> list[Running]:
    """All or none."""
    room = scheduler.bounds.num_slots + scheduler.bounds.max_queue
    if len(generations) > room:
        raise invalid("n", f"{len(generations)} generations in one request are more than this server holds ({room})")
    sequences: list[Running] = []
    with ExitStack() as undo:
        for generation in generations:
            sequences.append(scheduler.submit(generation))
            undo.callback(scheduler.cancel, sequences[-1])
        undo.pop_all()
    return sequences


class Feed:
    """The events of several sequences, in the order in which they happen."""

    def __init__(self, sequences: Sequence[Running]) -> None:
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._pump(i, s)) for i, s in enumerate(sequences)]

    async def _pump(self, index: int, sequence: Running) -> None:
        async for event in sequence.events():
            self._queue.put_nowait((index, event))

    async def next(self, patience: float | None = None) -> tuple[int, Progress | Delta | Finished] | None:
        """The next event, or None after `patience` seconds of silence. Raises the error of a sequence that failed."""
        try:
            async with asyncio.timeout(patience):
                index, event = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(event, Failed):
            raise event.error
        return index, event

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


async def _collect(feed: Feed, choices: list[Choice]) -> None:
    while any(choice.finished is None for choice in choices):
        if (item := await feed.next()) is not None:
            choices[item[0]].add(item[1])


async def _stream(send: Send, feed: Feed, choices: list[Choice], sequences: Sequence[Running], asked: Asked) -> None:
    interval = asked.options.ping_interval
    while any(choice.finished is None for choice in choices):
        item = await feed.next(interval if interval > 0 else None)
        if item is None:
            await send(PING)
            continue
        index, event = item
        choices[index].add(event)
        timings = _live_timings(sequences[index], choices[index], event, asked.options)
        if chunks := asked.shape.chunks(choices[index], event, timings):
            await send(b"".join(map(sse, chunks)))
    await send(asked.shape.tail(choices))


def _live_timings(
    sequence: Running, choice: Choice, event: Event, options: Options, clock: Callable[[], float] = time.monotonic
) -> Timings | None:
    """So far. The scheduler's own times end with `Finished`; in between they are read off its sequence."""
    if isinstance(event, Progress) and options.return_progress:
        return Timings(event.cached, event.processed - event.cached, (clock() - sequence.started_at) * 1e3, 0, 0.0)
    if isinstance(event, Delta) and options.timings_per_token:
        cached, prompt_ms = sequence.num_cached, (sequence.first_token_at - sequence.started_at) * 1e3
        predicted_ms = (clock() - sequence.first_token_at) * 1e3
        return Timings(cached, sequence.num_prompt - cached, prompt_ms, len(choice.tokens), predicted_ms)
    return None
