"""What bounds the scheduler: how much may be in flight, how long a sequence may get, how much a step may do.

Chosen once, when the model is loaded. It knows no sequence and counts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxcel.errors import ContextExceeded, InvalidRequest


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

    def room_after(self, num_prompt: int) -> int:
        """How many tokens may follow a prompt, one at least. Raises InvalidRequest and ContextExceeded."""
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if num_prompt >= self.n_ctx:
            raise ContextExceeded(num_prompt, self.n_ctx)
        return self.n_ctx - num_prompt
