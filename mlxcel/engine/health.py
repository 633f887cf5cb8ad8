"""Whether the engine is broken, or only what was asked of it: the one fails whatever runs, the other does not.

What fails takes its own sequences down and nobody else (`attempt`). When steps keep failing and none gives a token,
a run that depends on no request (`probe`) decides: if that fails too, the process should end and be started anew; if
not, the requests are at fault, and whoever repeats one of them ends nothing but that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from mlxcel.engine.plan import Outcome, Plan, Prefill, Retire, Start, StepEngine
from mlxcel.engine.sequence import Sampling
from mlxcel.errors import ServerError

MAX_FAILED_STEPS = 8  # without a token in between
PROBE = 0  # its id: sequences count from 1


class EngineFailed(Exception):
    """Steps fail whatever runs; the process should end with a non-zero status."""


def attempt(work: Callable[[], object]) -> Exception | None:
    """What `work` fails with. One of the three broad handlers: around what is done for one sequence or one batch."""
    try:
        work()
    except Exception as error:
        return error
    return None


def probe(engine: StepEngine) -> Exception | None:
    """What one prefill and one decode that nobody asked for fail with. Nobody else may be decoding: what a step gives
    to others would be lost."""
    prompt = array("i", [0, 0])
    prefill, start = Prefill(PROBE, prompt[:-1]), Start(PROBE, prompt, Sampling(), None)
    outcome = engine.step(Plan(prefills=(prefill,), start=(start,), decode=True))
    engine.step(Plan(retire=(Retire(PROBE),)))
    return outcome.failed.get(PROBE)


class Doubt:
    """How many steps in a row have failed without a token for anybody."""

    def __init__(self) -> None:
        self._num_failed = 0

    def grows(self, outcome: Outcome) -> bool:
        """Whether there is reason to try the engine, now that this step is done; the count then begins anew."""
        if outcome.tokens:
            self._num_failed = 0
        elif any(not isinstance(error, ServerError) for error in outcome.failed.values()):
            self._num_failed += 1
        if self._num_failed < MAX_FAILED_STEPS:
            return False
        self._num_failed = 0
        return True
