"""One step of the model for everybody: retire, prefill one chunk, start, decode. Runs on the MLX thread only.

It owns every live KV array. Prompts are prefilled alone on plain mlx-lm caches (no padding, so it is right for
every family); decode is mlx-lm's GenerationBatch, one for all sequences that may share it and one each for those
whose cache has no batched form. It does not know the store, HTTP or asyncio: a `Plan` comes in, an `Outcome` of
plain numbers and evaluated segments goes out. A sequence's failure is reported for that sequence alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.generate import StopSequences

from mlxcel.engine.decode import DecodeBatch
from mlxcel.engine.grammar import Constraint
from mlxcel.engine.health import attempt
from mlxcel.engine.kv import leaves
from mlxcel.engine.model import LoadedModel, make_cache
from mlxcel.engine.plan import Outcome, Plan, Prefill, Retire, Start
from mlxcel.engine.sampling import make_bias, make_sampler, token_logprobs
from mlxcel.engine.snapshot import Refused, capture, restore, row_of
from mlxcel.errors import InvalidRequest

T = TypeVar("T")

_NO_STOPS = StopSequences([])
_UNBOUNDED = 1 << 60  # ends are decided by the scheduler, which also sees text


class Engine:
    """See the module. `step` is called from one thread, one call at a time."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._caches: dict[int, list[Any]] = {}
        self._top_logprobs: dict[int, int] = {}
        self._drawing: set[int] = set()
        self._constraints: dict[int, Constraint] = {}
        self._batch: DecodeBatch | None = None
        self._alone: dict[int, DecodeBatch] = {}

    def step(self, plan: Plan) -> Outcome:
        """Do what the plan says, in the order of the module's first line. Raises nothing on a sequence's account."""
        outcome = Outcome()
        for retire in plan.retire:
            self._guard(outcome, (retire.id,), partial(self._detach, retire, outcome))
        self._forget({retire.id for retire in plan.retire})
        began = time.perf_counter()
        for prefill in plan.prefills:
            self._guard(outcome, (prefill.id,), partial(self._prefill, prefill, outcome))
        outcome.prefill_seconds = time.perf_counter() - began
        began = time.perf_counter()
        self._join([s for s in plan.start if s.id not in outcome.failed and s.id in self._caches], outcome)
        if plan.decode:
            for batch in list(self._batches()):
                self._guard(outcome, tuple(batch.uids), partial(self._decode, batch, outcome))
        outcome.decode_seconds = time.perf_counter() - began
        return outcome

    def lend(self, work: Callable[[LoadedModel], T]) -> T:
        """Do something else with the model, on this thread and so between two steps."""
        return work(self._model)

    def release(self) -> None:
        """Give pooled buffers back to the system; for when nothing is left to do."""
        mx.clear_cache()

    def close(self) -> None:
        """Drop all arrays and this thread's streams: without that the process aborts at exit."""
        mx.synchronize()
        self._caches.clear()
        self._alone.clear()
        self._batch = None
        mx.clear_cache()
        mx.clear_streams()

    def _guard(self, outcome: Outcome, ids: tuple[int, ...], work: Callable[[], None]) -> None:
        """What fails takes its own sequences down and nobody else."""
        if (error := attempt(work)) is not None:
            outcome.failed |= dict.fromkeys(ids, error)
            self._forget(set(ids))

    def _batches(self) -> list[DecodeBatch]:
        return ([self._batch] if self._batch else []) + list(self._alone.values())

    # --- prefill

    def _prefill(self, prefill: Prefill, outcome: Outcome) -> None:
        cache = self._caches.get(prefill.id)
        if cache is None:
            cache = make_cache(self._model.net)
            try:
                self._take_up(prefill, cache)
            except Refused as refused:
                outcome.unrestored[prefill.id] = refused.reason
                return
            self._caches[prefill.id] = cache
        if prefill.tokens:
            self._model.net(mx.array(prefill.tokens)[None], cache=cache)
            mx.eval([c.state for c in cache])
        if prefill.donate_from is not None:
            assert self._model.layout is not None
            stop = _length(cache)
            if prefill.donate_from < stop:
                outcome.segments[prefill.id] = self._model.layout.detach(cache, prefill.donate_from, stop)
        if prefill.capture is not None:
            self._capture(prefill.id, cache, prefill.capture, outcome)

    def _take_up(self, prefill: Prefill, cache: list[Any]) -> None:
        if prefill.segments:
            assert self._model.layout is not None
            self._model.layout.attach(prefill.segments, cache)
        if prefill.state is not None:
            assert self._model.shape is not None
            restore(*prefill.state, self._model.shape, cache)

    def _capture(self, id: int, cache: list[Any], length: int, outcome: Outcome) -> None:
        """Copy the whole state; a refusal costs the snapshot, not the sequence."""
        try:
            outcome.states[id] = capture(cache, length, cuttable=self._model.proven.cuts)
        except Refused as refused:
            outcome.refused[id] = refused.reason

    # --- decode

    def _join(self, starts: list[Start], outcome: Outcome) -> None:
        """All that are ready join at once, since every join copies the KV of the whole batch; when that fails, one by
        one, so that it fails only for those whose account it is on."""
        together = self._model.proven.batches and len(starts) > 1
        if together and attempt(partial(self._start, starts)) is None:
            return
        for start in starts:
            self._guard(outcome, (start.id,), partial(self._start, [start]))

    def _start(self, starts: list[Start]) -> None:
        """Nothing has changed for anybody else when it fails."""
        for start in starts:
            if start.top_logprobs is not None:
                self._top_logprobs[start.id] = start.top_logprobs
            if start.of_draw:
                self._drawing.add(start.id)
            if start.grammar is not None:
                self._constraints[start.id] = self._model.grammars.constrain(start.grammar)
        caches = [self._caches[start.id] for start in starts]
        if self._model.proven.batches:
            caches = [[layer[0].merge(list(layer)) for layer in zip(*caches, strict=True)]]
        joining = self._generation(starts, *caches)
        if not self._model.proven.batches:
            self._alone[starts[0].id] = joining
        elif self._batch is None:
            self._batch = joining
        else:
            self._batch.extend(joining)
        for start in starts:
            del self._caches[start.id]

    def _generation(self, starts: list[Start], cache: list[Any]) -> DecodeBatch:
        return DecodeBatch(
            asking=self._top_logprobs,
            drawing=self._drawing,
            constraints=self._constraints,
            model=self._model.net,
            uids=[start.id for start in starts],
            inputs=mx.array([start.prompt[-1] for start in starts]),
            prompt_cache=cache,
            tokens=[start.prompt[:-1] for start in starts],
            samplers=[make_sampler(start.sampling) for start in starts],
            logits_processors=[make_bias(start.sampling) for start in starts],
            stop_sequences=[_NO_STOPS for _ in starts],
            max_tokens=[_UNBOUNDED for _ in starts],
        )

    def _decode(self, batch: DecodeBatch, outcome: Outcome) -> None:
        responses = batch.next()
        outcome.failed |= self._stuck(batch)
        self._forget(set(outcome.failed))
        responses = [r for r in responses if r.uid not in outcome.failed]
        asked = [r for r in responses if r.uid in self._top_logprobs]
        rows = [(r.logprobs, r.token, min(self._top_logprobs[r.uid], self._model.vocab_size)) for r in asked]
        logprobs = dict(zip((r.uid for r in asked), token_logprobs(rows), strict=True)) if rows else {}
        outcome.tokens += [(r.uid, r.token, logprobs.get(r.uid)) for r in responses]

    def _stuck(self, batch: DecodeBatch) -> dict[int, Exception]:
        """Sequences whose grammar cannot be followed any further: their next token would be anything."""
        constraints = {uid: self._constraints[uid] for uid in batch.uids if uid in self._constraints}
        return {
            uid: InvalidRequest(f"cannot be followed any further here: {reason}", param=constraint.kind)
            for uid, constraint in constraints.items()
            if (reason := constraint.error) is not None
        }

    # --- leaving

    def _detach(self, retire: Retire, outcome: Outcome) -> None:
        cache, row = self._live(retire.id)
        if cache is None:
            return
        if retire.donate_from is not None and retire.donate_from < retire.length:
            assert self._model.layout is not None
            outcome.segments[retire.id] = self._model.layout.detach(cache, retire.donate_from, retire.length, row)
        if retire.capture:
            single = cache if row is None else row_of(cache, row)
            self._capture(retire.id, single, retire.length, outcome)

    def _live(self, id: int) -> tuple[list[Any] | None, int | None]:
        """Where a sequence's state is: a cache of its own, or a row of the batch."""
        if self._batch is not None and id in self._batch.uids:
            return self._batch.prompt_cache, self._batch.uids.index(id)
        if id in self._alone:
            return self._alone[id].prompt_cache, None
        return self._caches.get(id), None

    def _forget(self, ids: set[int]) -> None:
        """All that leave go at once: every leave copies the KV of the whole batch."""
        for id in ids:
            self._caches.pop(id, None)
            self._alone.pop(id, None)
            self._top_logprobs.pop(id, None)
            self._drawing.discard(id)
            self._constraints.pop(id, None)
        if self._batch is None or ids.isdisjoint(self._batch.uids):
            return
        keep = [i for i, uid in enumerate(self._batch.uids) if uid not in ids]
        if keep:
            self._batch.filter(keep)
        else:
            self._batch = None


def _length(cache: list[Any]) -> int:
    return int(next(leaves(cache)).offset)
