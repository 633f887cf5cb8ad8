"""What the scheduler has done since the start, for the metrics.

Plain numbers that only grow; who shows them reads them. Steps are counted here, the ends of sequences where they are
decided.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxcel.engine.plan import Outcome, Plan


@dataclass(slots=True)
class Totals:
    """`prompt_tokens` are those computed, `cached_tokens` those adopted."""

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

    def count(self, plan: Plan, outcome: Outcome) -> None:
        """One step."""
        self.prefill_chunks += len(plan.prefills)
        self.prompt_tokens += outcome.num_prefilled(plan) + len(plan.start)
        self.prefill_seconds += outcome.prefill_seconds
        self.decode_seconds += outcome.decode_seconds
        self.completion_tokens += len(outcome.tokens)
        self.decode_steps += plan.decode
        self.busy_slots += len(outcome.tokens)
        self.mixed_steps += bool(plan.prefills and outcome.tokens)
