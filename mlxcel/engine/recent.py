"""The last requests that ended well, and what the prompt cache did for each: what an operator looks at first.

It holds numbers and miss reasons only. Invariant: no text, token, salt or session gets in here, so whoever may ask
the server anything may see it; and it never grows beyond `LENGTH`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mlxcel.engine.sequence import Finished, Sequence

LENGTH = 50


@dataclass(frozen=True, slots=True)
class Request:
    """`outcome` off: no lookup took place, because the request, the server or the model does without."""

    at_unix_ms: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_ms: float
    outcome: Literal["hit", "miss", "off"]
    reason: str | None


class Recent:
    """Fed by the scheduler's `on_finished`. `clock` is the wall clock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._requests: deque[Request] = deque(maxlen=LENGTH)

    def observe(self, sequence: Sequence, end: Finished) -> None:
        until_first_ms = (sequence.first_token_at - sequence.submitted_at) * 1000
        reason = sequence.miss_reason
        request = Request(
            at_unix_ms=int(self._clock() * 1000),
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
            total_ms=round(until_first_ms + end.predicted_ms, 1),
            outcome="hit" if end.cached_tokens else "miss" if reason else "off",
            reason=str(reason) if reason else None,
        )
        self._requests.appendleft(request)

    def requests(self) -> list[Request]:
        """Newest first."""
        return list(self._requests)
