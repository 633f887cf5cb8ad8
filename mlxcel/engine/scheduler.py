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
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from mlxcel.cache.key import CacheContext
from mlxcel.engine.batch import Outcome, Plan, Prefill, Retire, Start
from mlxcel.engine.model import LoadedModel
from mlxcel.engine.reuse import Reuse
from mlxcel.engine.sequence import Failed, Finished, Generation, Progress, Sequence, State, TokenLogprob
from mlxcel.engine.slots import Slots
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.engine.warmup import Warmups
from mlxcel.errors import ContextExceeded, InvalidRequest, ServerError, Unavailable
from mlxcel.text import TextStream

log = logging.getLogger(__name__)

T = TypeVar("T")

MIN_CHUNK = 32  # below it reading the weights dominates: on a slow CPU 16 tokens take 140 ms, 32 take 190
MAX_FAILED_STEPS = 8  # without a token in between: the engine is broken, let the service manager start a new one


class StepEngine(Protocol):
    """What the scheduler needs of engine.batch.Engine."""

    def step(self, plan: Plan) -> Outcome: ...

    def lend(self, work: Callable[[LoadedModel], T]) -> T: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """`n_ctx` tokens a sequence may have in all; `chunk` tokens of prefill a step; `latency` in seconds;
    `rope_boundary` tokens where a LongRoPE model changes its table (None: it never does); `continuous` False lets a
    sequence join only while none is running; `similarity` as in `Slots`."""

    num_slots: int
    n_ctx: int
    max_queue: int
    chunk: int
    latency: float
    rope_boundary: int | None = None
    continuous: bool = True
    similarity: float = 0.1

    def rope_regime(self, num_tokens: int) -> int | None:
        """The key's tag for KV of a sequence of this length."""
        return None if self.rope_boundary is None else int(num_tokens > self.rope_boundary)


@dataclass(slots=True)
class Totals:
    """Counted since the start. `prompt_tokens` are those computed, `cached_tokens` those adopted."""

    submitted: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_chunks: int = 0
    mixed_steps: int = 0
    decode_steps: int = 0
    busy_slots: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    max_tokens_seen: int = 0


class EngineFailed(Exception):
    """Steps keep failing; the process should end with a non-zero status."""


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
        self._warmups = warmups
        self._warming: Sequence | None = None
        self.slots = Slots(bounds.num_slots, bounds.similarity)
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._draining = False
        self._next_id = 0
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._retiring: list[Sequence] = []
        self._ends: dict[int, Finished] = {}
        self._seconds_per_token = 0.0
        self._failed_steps = 0

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
        return not (self._waiting or self.num_active or self._warming or self._warmups)

    def active(self) -> list[Sequence]:
        return [*self._prefilling, *self._running.values(), *self._retiring]

    def submit(self, generation: Generation) -> Sequence:
        """Queue a generation. Raises Unavailable when draining or full, ContextExceeded and InvalidRequest."""
        if self._draining:
            raise Unavailable("the server is shutting down", retry_after=5)
        n = len(generation.prompt)
        if n == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if n >= self.bounds.n_ctx:
            raise ContextExceeded(n, self.bounds.n_ctx)
        if len(self._waiting) >= self.bounds.max_queue + max(self.bounds.num_slots - self.num_active, 0):
            raise Unavailable("all slots are busy and the queue is full, try again later", retry_after=2)
        if generation.ignore_eos:
            banned = tuple((token, float("-inf")) for token in sorted(self._tokenizer.eos_ids))
            sampling = replace(generation.sampling, logit_bias=generation.sampling.logit_bias + banned)
            generation = replace(generation, sampling=sampling)
        room = self.bounds.n_ctx - n
        max_tokens = room if generation.max_tokens is None else min(generation.max_tokens, room)
        self._next_id += 1
        decode = self._tokenizer.decode_special if generation.special else self._tokenizer.decode
        text = TextStream(decode, generation.stop, generation.least_indent)
        sequence = Sequence(self._next_id, generation, text, max_tokens, self._clock())
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
        return self._warmups is not None

    def warm(self, context: CacheContext, tokens: array[int]) -> None:
        """Compute what the session's next turn begins with, when there is time."""
        if self._warmups is not None:
            self._warmups.offer(context, tokens)
            self._wake.set()

    def drop_warmups(self) -> None:
        """Nothing that was offered is computed any more: the store has been reset."""
        if self._warmups is not None:
            self._warmups.clear()
        if self._warming is not None:
            self._warming.cancelled = True
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
        """Until drained. Raises EngineFailed when steps keep failing."""
        try:
            while await self._has_work():
                self._drop_cancelled()
                self._admit()
                plan = self._plan()
                if plan:
                    outcome = await self._step(plan)
                    self._commit(plan, outcome)
                    self._watch(outcome)
        finally:
            self._draining = True
            for sequence in [*self._waiting, *self.active()]:
                sequence.publish(Failed(Unavailable("the engine has stopped")))
            self._drained.set()

    async def _has_work(self) -> bool:
        while not (self._waiting or self.num_active):
            if self._draining:
                return False
            if self._takes_warmup():
                return True
            await asyncio.get_running_loop().run_in_executor(self._executor, self._engine.release)
            self._wake.clear()
            if not (self._waiting or self.num_active or self._draining or self._warmups):
                await self._wake.wait()
        return True

    def _takes_warmup(self) -> bool:
        """Whether there is a next turn to compute: the one under way, if it is still of use, or a new one."""
        if self._warmups is None:
            return False
        if self._warming is None:
            generation = self._warmups.take()
            if generation is None:
                return False
            self._next_id += 1
            text = TextStream(self._tokenizer.decode, ())
            self._warming = Sequence(self._next_id, generation, text, 0, self._clock(), state=State.PREFILLING)
            self.reuse.resume(self._warming)
        generation = self._warming.generation
        assert generation.cache is not None
        if not self._warmups.is_worth_it(generation.cache, generation.prompt[:-1]):
            self._warming.cancelled = True
        return True

    async def _step(self, plan: Plan) -> Outcome:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._engine.step, plan)

    def _watch(self, outcome: Outcome) -> None:
        if any(not isinstance(error, ServerError) for error in outcome.failed.values()):
            self._failed_steps += 1
        elif outcome.tokens:
            self._failed_steps = 0
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineFailed(f"{MAX_FAILED_STEPS} steps in a row failed, last: {next(iter(outcome.failed.values()))}")

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
            slot = self.slots.choose(sequence.generation)
            if slot is None or self._is_coming(sequence):
                continue
            self._waiting.remove(sequence)
            self.slots.take(slot, sequence)
            self.reuse.adopt(sequence, self._clock())
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
        if self._warming is not None and not (self._waiting or self.num_active):
            return self._warming_plan(self._warming)
        prefills = tuple(self._prefills())
        done = {p.id for p in prefills}
        starting = tuple(
            Start.of(s.id, s.generation)
            for s in self._prefilling
            if s.id in done and self._end_of(prefills, s) == s.num_prompt - 1 and s.max_tokens > 0
        )
        return Plan(
            retire=tuple(self.reuse.retire(s) for s in self._retiring),
            prefills=prefills,
            start=starting,
            decode=bool(self._running or starting),
        )

    def _warming_plan(self, warming: Sequence) -> Plan:
        left = warming.num_prompt - 1 - warming.num_prefilled
        if warming.cancelled or not left:
            return Plan(retire=(Retire(warming.id),))
        end = warming.num_prefilled + min(left, self._budget(shared=True))
        return Plan(prefills=(self.reuse.prefill(warming, end, wanted=False),))

    @staticmethod
    def _end_of(prefills: tuple[Prefill, ...], sequence: Sequence) -> int:
        return sequence.num_prefilled + next(len(p.tokens) for p in prefills if p.id == sequence.id)

    def _prefills(self) -> list[Prefill]:
        """Chunks for this step, within one budget; whoever got a part goes to the end of the line."""
        budget, chosen = self._budget(shared=bool(self._running)), []
        for sequence in list(self._prefilling):
            size = min(self.reuse.split_at(sequence) - sequence.num_prefilled, budget)
            chosen.append(self.reuse.prefill(sequence, sequence.num_prefilled + size, bool(self._waiting)))
            budget -= max(size, MIN_CHUNK)  # a short one is not free either: the weights are read once for each
            self._prefilling.rotate(-1)
            if budget <= 0:
                break
        return chosen

    def _budget(self, shared: bool) -> int:
        """Tokens of prefill in a step; `shared` when somebody may be waiting for the step to end."""
        if not shared or not self._seconds_per_token:
            return min(self.bounds.chunk, 64) if shared else self.bounds.chunk
        fits = int(self.bounds.latency / self._seconds_per_token) // 16 * 16
        return max(min(MIN_CHUNK, self.bounds.chunk), min(fits, self.bounds.chunk))

    # --- after the step

    def _commit(self, plan: Plan, outcome: Outcome) -> None:
        now = self._clock()
        if self._warming is not None and self._warming.id in plan.ids:
            self._warmed(self._warming, plan, outcome, now)
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
        self._count(plan, outcome)
        for id, token, logprob in outcome.tokens:
            self._advance(by_id[id], token, logprob, now)
        for id, error in outcome.failed.items():
            self._fail(by_id[id], error)

    def _warmed(self, warming: Sequence, plan: Plan, outcome: Outcome, now: float) -> None:
        """A chunk of a warm-up is done, or it has left the engine. What fails is dropped: nobody waits for it."""
        if plan.prefills and not (outcome.failed or outcome.unrestored):
            warming.num_prefilled += len(plan.prefills[0].tokens)
            self.reuse.prefilled(warming, plan.prefills[0], outcome, now)
            self._measure(len(plan.prefills[0].tokens), outcome)
            if warming.num_prefilled == warming.num_prompt - 1 and self._warmups is not None:
                self._warmups.ran()
            return
        if self._warmups is not None and (outcome.failed or outcome.unrestored or warming.cancelled):
            self._warmups.skip()
        self.reuse.forget(warming)
        self._warming = None

    def _prefilled(self, sequence: Sequence, prefill: Prefill, outcome: Outcome, now: float) -> None:
        if (reason := outcome.unrestored.get(sequence.id)) is not None:
            self.reuse.unrestored(sequence, reason)
            sequence.num_cached = sequence.num_prefilled = 0
            return
        if prefill.segments or prefill.state:
            self.totals.cached_tokens += sequence.num_cached
        sequence.num_prefilled += len(prefill.tokens)
        self.reuse.prefilled(sequence, prefill, outcome, now)
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

    def _finish(self, sequence: Sequence, stop_type: str, now: float) -> None:
        """The end is decided: say the rest of the text; `Finished` follows when the KV has been donated."""
        self._running.pop(sequence.id, None)
        sequence.state = State.FINISHED
        if stop_type != "word":
            sequence.say_rest(sequence.text.flush())
            if sequence.text.stopped_by is not None:
                stop_type = "word"
        wanted, is_full = sequence.generation.max_tokens, len(sequence.tokens) >= sequence.max_tokens
        self._ends[sequence.id] = Finished(
            stop_type=stop_type,  # type: ignore[arg-type]
            stopping_word=sequence.text.stopped_by or "",
            prompt_tokens=sequence.num_prompt,
            completion_tokens=len(sequence.tokens),
            cached_tokens=sequence.num_cached,
            truncated=stop_type == "limit" and is_full and (wanted is None or wanted > sequence.max_tokens),
            prompt_ms=(sequence.first_token_at - sequence.started_at) * 1000,
            predicted_ms=(now - sequence.first_token_at) * 1000,
            slot=-1 if sequence.slot is None else sequence.slot,
        )
        self._retiring.append(sequence)

    def _retired(self, sequence: Sequence, retire: Retire, outcome: Outcome, now: float) -> None:
        if sequence not in self._retiring:
            return
        self._retiring.remove(sequence)
        self.slots.release(sequence)
        self.reuse.retired(sequence, retire, outcome, now)
        end = self._ends.pop(sequence.id, None)
        if end is None:
            return
        self.totals.completed += 1
        self._on_finished(sequence, end)
        sequence.publish(end)
        log.info(
            "prompt-cache: request completed: cached=%d/%d prompt tokens, %d generated, total %.0fms",
            end.cached_tokens,
            end.prompt_tokens,
            end.completion_tokens,
            (now - sequence.submitted_at) * 1000,
        )

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """This sequence's own failure; what it stored while prefilling stays, it is complete and right."""
        if sequence.state is State.FINISHED:
            return
        if not isinstance(error, ServerError):
            log.error("sequence %d failed: %s", sequence.id, error, exc_info=error)
            error = ServerError("the model failed on this request; see the server's log")
        self._running.pop(sequence.id, None)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self.reuse.forget(sequence)
        self.slots.release(sequence)
        sequence.state = State.FINISHED
        self.totals.failed += 1
        sequence.publish(Failed(error))

    def _count(self, plan: Plan, outcome: Outcome) -> None:
        totals, tokens = self.totals, sum(len(p.tokens) for p in plan.prefills)
        totals.prefill_chunks += len(plan.prefills)
        totals.prompt_tokens += tokens + len(plan.start)
        totals.prefill_seconds += outcome.prefill_seconds
        totals.decode_seconds += outcome.decode_seconds
        totals.completion_tokens += len(outcome.tokens)
        totals.decode_steps += plan.decode
        totals.busy_slots += len(outcome.tokens)
        totals.mixed_steps += bool(plan.prefills and outcome.tokens)
        totals.max_tokens_seen = max(totals.max_tokens_seen, *(s.num_prompt + len(s.tokens) for s in self.active()), 0)
        self._measure(tokens, outcome)

    def _measure(self, tokens: int, outcome: Outcome) -> None:
        if tokens:
            measured = outcome.prefill_seconds / tokens
            self._seconds_per_token = (self._seconds_per_token + measured) / 2 if self._seconds_per_token else measured
