"""An engine that says what a test tells it to, under the real scheduler, store and HTTP code.

Its KV is the list of tokens it has been fed (tests/segments.py), so every adoption is checked against the prompt:
a wrong prefix fails the step. `say` maps the text of a prompt's end to the tokens to generate; hooks let a test
hold a step back (`gate`), make every step fail (`faults`), or only those that prefill a certain token (`poison`).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable

from mlxcel.engine.plan import Outcome, Plan, Prefill
from mlxcel.engine.sequence import TokenLogprob
from tests.segments import TokenSegment, joined


class ScriptedEngine:
    """`script(prompt)` gives the tokens that follow a prompt; when they run out, `filler` repeats."""

    def __init__(self, script: Callable[[array], Iterable[int]], filler: int = 0) -> None:
        self.script = script
        self.filler = filler
        self.gate = threading.Event()
        self.gate.set()
        self.faults: dict[str, Exception] = {}
        self.poison: int | None = None
        self.plans: list[Plan] = []
        self.num_prefilled = 0
        self._kv: dict[int, array] = {}
        self._running: dict[int, tuple[array, list[int], int | None]] = {}

    def step(self, plan: Plan) -> Outcome:
        assert self.gate.wait(30), "a test left the gate closed"
        self.plans.append(plan)
        outcome = Outcome()
        for retire in plan.retire:
            kv = self._kv.pop(retire.id, None)
            self._running.pop(retire.id, None)
            if retire.donate_from is not None and kv is not None and retire.donate_from < retire.length:
                assert len(kv) == retire.length, "an entry must be as long as its KV"
                outcome.segments[retire.id] = TokenSegment(kv[retire.donate_from :])
        for prefill in plan.prefills:
            self._prefill(prefill, outcome)
        for start in plan.start:
            if start.id in outcome.failed:
                continue
            kv = self._kv.setdefault(start.id, array("i"))
            assert kv == start.prompt[:-1], "all but the last prompt token must be in the KV"
            kv.append(start.prompt[-1])
            script = list(self.script(start.prompt))
            self._running[start.id] = (start.prompt, script, start.top_logprobs)
        if plan.decode:
            self._decode(outcome)
        return outcome

    def _prefill(self, prefill: Prefill, outcome: Outcome) -> None:
        error = self.faults.get("prefill")
        if self.poison in prefill.tokens:
            error = RuntimeError("poisoned")
        if error:
            outcome.failed[prefill.id] = error
            self._kv.pop(prefill.id, None)
            return
        kv = self._kv.setdefault(prefill.id, joined(prefill.segments))
        kv.extend(prefill.tokens)
        self.num_prefilled += len(prefill.tokens)
        outcome.prefill_seconds += 0.001 * len(prefill.tokens)
        if prefill.donate_from is not None and prefill.donate_from < len(kv):
            outcome.segments[prefill.id] = TokenSegment(kv[prefill.donate_from :])

    def _decode(self, outcome: Outcome) -> None:
        if error := self.faults.get("decode"):
            outcome.failed |= dict.fromkeys(self._running, error)
            self._running.clear()
            return
        for id, (_, script, top) in self._running.items():
            token = script.pop(0) if script else self.filler
            self._kv[id].append(token)
            logprob = None
            if top is not None:
                logprob = TokenLogprob(token, -0.5, tuple((token + k, -0.5 - k) for k in range(top)))
            outcome.tokens.append((id, token, logprob))

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass
