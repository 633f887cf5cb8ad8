"""The decode batch: mlx-lm's GenerationBatch, with log-probabilities for those who asked only.

The library normalises every row of logits at every step (8 ms a step at batch 8 and 49k tokens on a CPU, 5 % of it).
Sampling does not need that: greedy takes the largest logit and the filters compare. What is overridden is the one
method that computes a step, which also masks the rows that follow a grammar; merging, joining, leaving and the state
they keep are the library's.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationBatch

from mlxcel.engine.grammar import Constraint


class DecodeBatch(GenerationBatch):  # type: ignore[misc]
    """`asking` holds the uids whose responses carry log-probabilities of shape (vocab,); the others' are None.
    `constraints` are those of the sequences whose output follows a grammar."""

    def __init__(self, *, asking: Container[int], constraints: Mapping[int, Constraint], **fields: Any) -> None:
        self._asking = asking
        self._constraints = constraints
        self._next_tokens: Any = None
        self._next_logprobs: list[Any] = []
        super().__init__(**fields)

    def _step(self) -> tuple[list[int], list[mx.array | None]]:
        """Schedule the next step, then read the one before it. `tokens` stay those whose KV is in the cache."""
        current, logprobs = self._next_tokens, self._next_logprobs
        logits = self.model(current[:, None], cache=self.prompt_cache)[:, -1, :]
        contexts: list[mx.array] = []
        if any(self.logits_processors):
            rows = [self._processed(row, logits[row : row + 1], current, contexts) for row in range(len(self.uids))]
            logits = mx.concatenate(rows, axis=0)
        self._next_tokens = self._sampled(self._constrained(logits, current))
        self._next_logprobs = [
            _log_softmax(logits[row]) if uid in self._asking else None for row, uid in enumerate(self.uids)
        ]
        mx.async_eval(self._next_tokens, [row for row in self._next_logprobs if row is not None], contexts)
        mx.eval(current, [row for row in logprobs if row is not None])
        tokens: list[int] = current.tolist()
        for known, token in zip(self.tokens, tokens, strict=True):
            known.append(token)
        return tokens, logprobs

    def _constrained(self, logits: mx.array, current: mx.array) -> mx.array:
        """Logits of tokens that a row's grammar forbids become -inf; of those that it allows none stays -inf, so that
        a token that a bias bans is still taken where the grammar leaves no other. A mask needs the value of the token
        before it: the forward pass is set going first, and the masks are computed beside it."""
        if not any(uid in self._constraints for uid in self.uids):
            return logits
        mx.async_eval(logits)
        allowed, least = np.ones(logits.shape, dtype=bool), np.full((len(self.uids), 1), -np.inf, dtype=np.float32)
        for row, (uid, token) in enumerate(zip(self.uids, current.tolist(), strict=True)):
            if (constraint := self._constraints.get(uid)) is not None:
                allowed[row], least[row] = constraint.allowed_after(token), mx.finfo(logits.dtype).min
        return mx.where(mx.array(allowed), mx.maximum(logits, mx.array(least, dtype=logits.dtype)), -float("inf"))

    def _processed(self, row: int, logits: mx.array, current: mx.array, contexts: list[mx.array]) -> mx.array:
        processors = self.logits_processors[row]
        if processors:
            contexts.append(self._token_context[row].update_and_fetch(current[row : row + 1]))
        for processor in processors:
            logits = processor(contexts[-1], logits)
        return logits

    def _sampled(self, logits: mx.array) -> mx.array:
        """One call when all rows share their sampler, as greedy rows do."""
        first = self.samplers[0]
        if all(sampler is first for sampler in self.samplers):
            return first(logits)
        return mx.concatenate([s(logits[row : row + 1]) for row, s in enumerate(self.samplers)], axis=0)


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
