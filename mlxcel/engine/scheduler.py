"""The scheduler: one coroutine that turns waiting sequences into finished ones.

Theory of operation. One turn of the loop is: wait for work, drop the cancelled, admit, plan, run one step on the
MLX thread, commit. Everything but the step is synchronous code on the event loop, so that cancels, resets and
donations take effect between steps and never inside one. A sequence goes through

    WAITING --admit: lookup, adopt--> PREFILLING --all but the last token--> RUNNING --end--> FINISHED

A step holds at most one prefill budget and one decode of the whole batch. While others decode, the budget is
what measured speed allows in `latency` seconds, so that a long prompt never holds their tokens back for longer;
with nobody decoding it is a full chunk. Prefilling sequences take turns, so that a short one overtakes a long one.

The prompt is donated while it is prefilled, and what was generated at the end, before `Finished` is published: a
client that has read its last byte finds its conversation stored. A waiting sequence whose prefix somebody is
prefilling right now waits for that and adopts it (`_is_coming`): eight requests over one system prompt cost one
prefill of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from itertools import count
from typing import TypeVar

from mlxcel.cache.key import CacheContext
from mlxcel.engine.bounds import Bounds
from mlxcel.engine.health import MAX_FAILED_STEPS, Doubt, EngineFailed, attempt, probe
from mlxcel.engine.model import LoadedModel
from mlxcel.engine.pace import MIN_CHUNK, Pace
from mlxcel.engine.plan import Outcome, Plan, Prefill, Retire, Start, StepEngine
from mlxcel.engine.reuse import Reuse
from mlxcel.engine.sequence import Failed, Finished, Generation, Progress, Sequence, State, StopType, TokenLogprob
from mlxcel.engine.slots import Slots
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.engine.totals import Totals
from mlxcel.engine.warmup import Warming, Warmups
from mlxcel.errors import ServerError, Unavailable
from mlxcel.text import TextStream

log = logging.getLogger(__name__)

T = TypeVar("T")


class Scheduler:
    """See the module. `on_finished` is told of each healthy end."""

    def __init__(
        self,
        engine: StepEngine,
        executor: Executor,
        reuse: Reuse,
        tokenizer: Tokenizer,
        bounds: Bounds,
        *,
        warmups: Warmups | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_finished: Callable[[Sequence, Finished], None] = lambda sequence, finished: None,
    ) -> None:
        self.bounds = bounds
        self.totals = Totals()
        self._engine = engine
        self._executor = executor
        self._tokenizer = tokenizer
        self._clock = clock
        self._on_finished = on_finished
        self.reuse = reuse
        self._ids = count(1)
        self._warming = Warming(warmups, reuse, self._ids) if warmups is not None else None
        self._pace = Pace(bounds.chunk, bounds.latency)
        self.slots = Slots(bounds.num_slots, bounds.similarity)
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._draining = False
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._retiring: list[Sequence] = []
        self._ends: dict[int, Finished] = {}
        self._doubt = Doubt()

    # --- for the API: synchronous, never blocking

    @property
    def n_ctx(self) -> int:
        return self.bounds.n_ctx

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Sequences that hold a slot."""
        return len(self._prefilling) + len(self._running) + len(self._retiring)

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is to be computed ahead."""
        return not (self._waiting or self.num_active or self._warming)

    def active(self) -> list[Sequence]:
        return [*self._prefilling, *self._running.values(), *self._retiring]

    def submit(self, generation: Generation) -> Sequence:
        """Queue a generation. Raises Unavailable when draining or full, ContextExceeded and InvalidRequest."""
        if self._draining:
            raise Unavailable("the server is shutting down", retry_after=5)
        room = self.bounds.room_after(len(generation.prompt))
        if len(self._waiting) >= self.bounds.max_queue + max(self.bounds.num_slots - self.num_active, 0):
            raise Unavailable("all slots are busy and the queue is full, try again later", retry_after=2)
        if generation.ignore_eos:
            generation = generation.banning(sorted(self._tokenizer.eos_ids))
        max_tokens = room if generation.max_tokens is None else min(generation.max_tokens, room)
        decode = self._tokenizer.decode_special if generation.special else self._tokenizer.decode
        text = TextStream(decode, generation.stop, generation.least_indent)
        sequence = Sequence(next(self._ids), generation, text, max_tokens, self._clock())
        self._waiting.append(sequence)
        self.totals.submitted += 1
        self._wake.set()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Let go of a sequence between two steps; nothing happens when it has finished."""
        if sequence.state is not State.FINISHED:
            sequence.cancelled = True
            self._wake.set()

    async def drain(self, timeout: float) -> None:
        """Refuse new work, let what is there finish for `timeout` seconds, then fail the rest."""
        self._draining = True
        self._wake.set()
        try:
            await asyncio.wait_for(self._drained.wait(), timeout)
        except TimeoutError:
            for sequence in [*self._waiting, *self.active()]:
                sequence.publish(Failed(Unavailable("the server is shutting down")))
                self.cancel(sequence)
            await self._drained.wait()

    @property
    def warms(self) -> bool:
        """Whether next turns are computed ahead."""
        return self._warming is not None

    def warm(self, context: CacheContext, tokens: array[int]) -> None:
        """Compute what the session's next turn begins with, when there is time."""
        if self._warming is not None:
            self._warming.offers.offer(context, tokens)
            self._wake.set()

    def drop_warmups(self) -> None:
        """Nothing that was offered is computed any more: the store has been reset."""
        if self._warming is not None:
            self._warming.clear()
            self._wake.set()

    async def on_engine(self, work: Callable[[], T]) -> T:
        """The result of `work`, done on the MLX thread between two steps."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def on_model(self, work: Callable[[LoadedModel], T]) -> T:
        """The same for what needs the network, which may have to be loaded first. Raises Unavailable when draining."""
        if self._drained.is_set():
            raise Unavailable("the server is shutting down", retry_after=5)
        return await self.on_engine(partial(self._engine.lend, work))

    # --- the loop

    async def run(self) -> None:
        """Until drained. Raises EngineFailed when steps fail whatever runs."""
        try:
            while await self._has_work():
                self._drop_cancelled()
                self._admit()
                plan = self._plan()
                if plan:
                    outcome = await self.on_engine(partial(self._engine.step, plan))
                    self._commit(plan, outcome)
                    await self._watch(outcome)
        finally:
            self._draining = True
            for sequence in [*self._waiting, *self.active()]:
                sequence.publish(Failed(Unavailable("the engine has stopped")))
            self._drained.set()

    async def _has_work(self) -> bool:
        while not (self._waiting or self.num_active):
            if self._draining:
                return False
            if self._warming and self._warming.goes_on(self._clock()):
                return True
            await self.on_engine(self._engine.release)
            self._wake.clear()
            if not (self._waiting or self.num_active or self._draining or self._warming):
                await self._wake.wait()
        return True

    async def _watch(self, outcome: Outcome) -> None:
        if not self._doubt.grows(outcome) or self._running:
            return
        error = await asyncio.get_running_loop().run_in_executor(self._executor, probe, self._engine)
        if error is not None:
            raise EngineFailed(
                f"{MAX_FAILED_STEPS} steps in a row failed, and so does a run of the engine's own: {error}"
            )
        log.warning("%d steps in a row failed, but the engine works: the requests are at fault", MAX_FAILED_STEPS)

    def _drop_cancelled(self) -> None:
        for queue in (self._waiting, self._prefilling):
            for sequence in [s for s in queue if s.cancelled]:
                queue.remove(sequence)
                self._cancelled(sequence)
                if queue is self._prefilling:
                    self._retiring.append(sequence)
        for sequence in [s for s in self._running.values() if s.cancelled]:
            del self._running[sequence.id]
            self._cancelled(sequence)
            self._retiring.append(sequence)

    def _cancelled(self, sequence: Sequence) -> None:
        sequence.state = State.FINISHED
        self.totals.cancelled += 1
        log.info("sequence %d cancelled: the client went away", sequence.id)

    # --- admission

    def _admit(self) -> None:
        if self._running and not self.bounds.continuous:
            return
        for sequence in list(self._waiting):
            if self.num_active >= self.bounds.num_slots:
                return
            if (error := attempt(partial(self._begin, sequence))) is not None:
                self._fail(sequence, error)

    def _begin(self, sequence: Sequence) -> None:
        """Give a waiting sequence its slot and what is stored of it, if it need not wait any longer."""
        slot = self.slots.choose(sequence.generation)
        if slot is None or self._is_coming(sequence):
            return
        self.slots.take(slot, sequence)
        self.reuse.adopt(sequence, self._clock())
        self._waiting.remove(sequence)
        sequence.state = State.PREFILLING
        sequence.started_at = self._clock()
        sequence.publish(Progress(sequence.num_cached, sequence.num_prompt, sequence.num_cached))
        self._prefilling.append(sequence)

    def _is_coming(self, sequence: Sequence) -> bool:
        """Whether somebody is prefilling a prefix that this sequence could adopt when it is stored. Without continuous
        batching whoever waited for that would miss the batch."""
        return self.bounds.continuous and any(
            self.reuse.lends(other, sequence) > other.num_stored for other in self._prefilling
        )

    # --- planning

    def _plan(self) -> Plan:
        if self._warming and self._warming.is_under_way and not (self._waiting or self.num_active):
            return self._warming.plan(self._pace.budget(shared=True))
        prefills = tuple(self._prefills())
        sizes = {p.id: len(p.tokens) for p in prefills}
        starting = tuple(
            Start.of(s.id, s.generation)
            for s in self._prefilling
            if s.id in sizes and s.num_prefilled + sizes[s.id] == s.num_prompt - 1 and s.max_tokens > 0
        )
        return Plan(
            retire=tuple(self.reuse.retire(s) for s in self._retiring),
            prefills=prefills,
            start=starting,
            decode=bool(self._running or starting),
        )

    def _prefills(self) -> list[Prefill]:
        """Chunks for this step, within one budget; whoever got a part goes to the end of the line."""
        budget, chosen = self._pace.budget(shared=bool(self._running)), []
        for sequence in list(self._prefilling):
            size = min(self.reuse.split_at(sequence) - sequence.num_prefilled, budget)
            chosen.append(self.reuse.prefill(sequence, sequence.num_prefilled + size, bool(self._waiting)))
            budget -= max(size, MIN_CHUNK)  # a short one is not free either: the weights are read once for each
            self._prefilling.rotate(-1)
            if budget <= 0:
                break
        return chosen

    # --- after the step

    def _commit(self, plan: Plan, outcome: Outcome) -> None:
        now = self._clock()
        self._pace.measure(outcome.num_prefilled(plan), outcome.prefill_seconds)
        if self._warming and self._warming.owns(plan):
            self._warming.commit(plan, outcome, now)
            return
        by_id = {s.id: s for s in self.active()}
        for retire in plan.retire:
            self._retired(by_id[retire.id], retire, outcome, now)
        for prefill in plan.prefills:
            if prefill.id not in outcome.failed:
                self._prefilled(by_id[prefill.id], prefill, outcome, now)
        for start in plan.start:
            if start.id not in outcome.failed and start.id not in outcome.unrestored:
                sequence = by_id[start.id]
                self._prefilling.remove(sequence)
                self._running[start.id] = sequence
                sequence.state = State.RUNNING
        self.totals.count(plan, outcome)
        longest = max((s.num_prompt + len(s.tokens) for s in by_id.values()), default=0)
        self.totals.max_tokens_seen = max(self.totals.max_tokens_seen, longest)
        for id, token, logprob in outcome.tokens:
            if (error := attempt(partial(self._advance, by_id[id], token, logprob, now))) is not None:
                self._fail(by_id[id], error)
                self._retiring.append(by_id[id])  # the engine knows nothing of it
        for id, error in outcome.failed.items():
            self._fail(by_id[id], error)

    def _prefilled(self, sequence: Sequence, prefill: Prefill, outcome: Outcome, now: float) -> None:
        if (reason := outcome.unrestored.get(sequence.id)) is not None:
            self._beside(sequence, partial(self.reuse.unrestored, sequence, reason))
            sequence.num_cached = sequence.num_prefilled = 0
            return
        if prefill.segments or prefill.state:
            self.totals.cached_tokens += sequence.num_cached
        sequence.num_prefilled += len(prefill.tokens)
        self._beside(sequence, partial(self.reuse.prefilled, sequence, prefill, outcome, now))
        sequence.publish(Progress(sequence.num_prefilled, sequence.num_prompt, sequence.num_cached))
        if sequence.num_prefilled == sequence.num_prompt - 1 and sequence.max_tokens == 0:
            self._prefilling.remove(sequence)
            sequence.first_token_at = now
            self._finish(sequence, "limit", now)

    def _advance(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """One generated token: its text if any is certain, and whether it was the last."""
        if not sequence.tokens:
            sequence.first_token_at = now
            sequence.publish(Progress(sequence.num_prompt, sequence.num_prompt, sequence.num_cached))
        sequence.tokens.append(token)
        generation = sequence.generation
        if token in self._tokenizer.eos_ids and (generation.grammar or not generation.ignore_eos):
            if generation.special:
                sequence.say(sequence.text.push(token), token, logprob)
            self._finish(sequence, "eos", now)
            return
        text = sequence.text.push(token)
        sequence.say(text, token, logprob)
        is_late = 0 < generation.max_ms < (now - sequence.first_token_at) * 1000
        if sequence.text.stopped_by is not None:
            self._finish(sequence, "word", now)
        elif len(sequence.tokens) >= sequence.max_tokens or sequence.text.is_outdented or (is_late and "\n" in text):
            self._finish(sequence, "limit", now)

    def _finish(self, sequence: Sequence, stop_type: StopType, now: float) -> None:
        """The end is decided; `Finished` follows when the KV has been donated."""
        self._running.pop(sequence.id, None)
        self._ends[sequence.id] = sequence.end(stop_type, now)
        self._retiring.append(sequence)

    def _retired(self, sequence: Sequence, retire: Retire, outcome: Outcome, now: float) -> None:
        if sequence not in self._retiring:
            return
        self._retiring.remove(sequence)
        self.slots.release(sequence)
        self._beside(sequence, partial(self.reuse.retired, sequence, retire, outcome, now))
        end = self._ends.pop(sequence.id, None)
        if end is None:
            return
        self.totals.completed += 1
        self._beside(sequence, partial(self._on_finished, sequence, end))
        sequence.publish(end)
        log.info(
            "prompt-cache: request completed: cached=%d/%d prompt tokens, %d generated, total %.0fms",
            end.cached_tokens,
            end.prompt_tokens,
            end.completion_tokens,
            (now - sequence.submitted_at) * 1000,
        )

    def _beside(self, sequence: Sequence, work: Callable[[], object]) -> None:
        """What goes wrong in the store or the statistics costs the sequence nothing."""
        if (error := attempt(work)) is not None:
            log.error("sequence %d goes on without what failed: %s", sequence.id, error, exc_info=error)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """This sequence's own failure; what it stored while prefilling stays, it is complete and right."""
        if sequence.state is State.FINISHED:
            return
        if not isinstance(error, ServerError):
            log.error("sequence %d failed: %s", sequence.id, error, exc_info=error)
            error = ServerError("the model failed on this request; see the server's log")
        self._running.pop(sequence.id, None)
        for queue in (self._waiting, self._prefilling):
            if sequence in queue:
                queue.remove(sequence)
        self.reuse.forget(sequence)
        self.slots.release(sequence)
        sequence.state = State.FINISHED
        self.totals.failed += 1
        sequence.publish(Failed(error))
