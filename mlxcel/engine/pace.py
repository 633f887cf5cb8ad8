"""How much of a prompt one step prefills: what measured speed allows, so that nobody waits longer than promised.

It knows neither sequences nor the engine; it is told what each step took. Invariant: a step that somebody may be
waiting for prefills for about `latency` seconds, one that nobody waits for a whole chunk.
"""

from __future__ import annotations

MIN_CHUNK = 32  # below it reading the weights dominates: on a slow CPU 16 tokens take 140 ms, 32 take 190
UNMEASURED = 64


class Pace:
    """`chunk` tokens are the most; `latency` in seconds."""

    def __init__(self, chunk: int, latency: float) -> None:
        self._chunk = chunk
        self._latency = latency
        self._seconds_per_token = 0.0

    def budget(self, shared: bool) -> int:
        """Tokens of prefill in a step; `shared` when somebody may be waiting for the step to end."""
        if not shared:
            return self._chunk
        if not self._seconds_per_token:
            return min(self._chunk, UNMEASURED)
        fits = int(self._latency / self._seconds_per_token) // 16 * 16
        return max(min(MIN_CHUNK, self._chunk), min(fits, self._chunk))

    def measure(self, tokens: int, seconds: float) -> None:
        """What a step took for its prefill; one without any says nothing."""
        if tokens:
            measured, before = seconds / tokens, self._seconds_per_token
            self._seconds_per_token = (before + measured) / 2 if before else measured
