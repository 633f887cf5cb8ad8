"""The decode batch: mlx-lm's GenerationBatch, with log-probabilities for those who asked only.

The library normalises every row of logits at every step (8 ms a step at batch 8 and 49k tokens on a CPU, 5 % of it).
Sampling does not need that: greedy takes the largest logit and the filters compare. What is overridden is the one
method that computes a step, which also masks the rows that follow a grammar and shows each sampler its sequence's last
tokens; merging, joining, leaving and the state they keep are the library's.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationBatch

from mlxcel.engine.candidates import Candidates, Tokens
from mlxcel.engine.grammar import Constraint
from mlxcel.engine.sampling import greedy

FLOOR = -1e30  # of a logit that must not be impossible; what samplers do to it leaves it finite


class DecodeBatch(GenerationBatch):  # type: ignore[misc]
    """`tokens` are arrays of C ints. `asking` holds the uids whose responses carry log-probabilities of shape (vocab,);
    the others' are None. They are the model's own, or for the uids of `drawing` those of the draw, after all samplers.
    `constraints` are those of the sequences whose output follows a grammar. The only processors are biases."""

    def __init__(
        self,
        *,
        asking: Container[int],
        drawing: Container[int],
        constraints: Mapping[int, Constraint],
        **fields: Any,
    ) -> None:
        self._asking = asking
        self._drawing = drawing
        self._constraints = constraints
        self._next_tokens: Any = None
        self._next_logprobs: list[Any] = []
        super().__init__(fallback_sampler=greedy, **fields)

    def _step(self) -> tuple[list[int], list[mx.array | None]]:
        """Schedule the next step, then read the one before it. `tokens` stay those whose KV is in the cache."""
        current, logprobs = self._next_tokens, self._next_logprobs
        logits = self.model(current[:, None], cache=self.prompt_cache)[:, -1, :]
        known = self._known(logits, current)
        self._next_tokens, drawn_from = self._sampled(self._constrained(self._biased(logits), known), known)
        self._next_logprobs = [
            self._reported(row, logits, drawn_from[row]) if uid in self._asking else None
            for row, uid in enumerate(self.uids)
        ]
        mx.async_eval(self._next_tokens, [row for row in self._next_logprobs if row is not None])
        mx.eval(current, [row for row in logprobs if row is not None])
        tokens: list[int] = current.tolist()
        for sequence, token in zip(self.tokens, tokens, strict=True):
            sequence.append(token)
        return tokens, logprobs

    def _known(self, logits: mx.array, current: mx.array) -> list[int]:
        """The values of the tokens that this step computes on, if a mask or a sampler needs them. The forward pass is
        set going first, so that what follows from them is computed beside it."""
        if any(sampler.looks_back for sampler in self.samplers) or any(uid in self._constraints for uid in self.uids):
            mx.async_eval(logits)
            return list(current.tolist())
        return []

    def _biased(self, logits: mx.array) -> mx.array:
        if not any(self.logits_processors):
            return logits
        rows = [logits[row : row + 1] for row in range(len(self.uids))]
        for row, biases in enumerate(self.logits_processors):
            for bias in biases:
                rows[row] = bias(rows[row])
        return mx.concatenate(rows, axis=0)

    def _constrained(self, logits: mx.array, known: list[int]) -> mx.array:
        """Logits of tokens that a row's grammar forbids become -inf; of those that it allows none stays -inf, so that
        a token that a bias bans is still taken where the grammar leaves no other."""
        if not any(uid in self._constraints for uid in self.uids):
            return logits
        allowed, least = np.ones(logits.shape, dtype=bool), np.full((len(self.uids), 1), -np.inf, dtype=np.float32)
        for row, (uid, token) in enumerate(zip(self.uids, known, strict=True)):
            if (constraint := self._constraints.get(uid)) is not None:
                allowed[row], least[row] = constraint.allowed_after(token), max(FLOOR, mx.finfo(logits.dtype).min)
        return mx.where(mx.array(allowed), mx.maximum(logits, mx.array(least, dtype=logits.dtype)), -float("inf"))

    def _sampled(self, logits: mx.array, known: list[int]) -> tuple[mx.array, list[Candidates | None]]:
        """The tokens, and for each row what its token was drawn from. One call when all rows are greedy."""
        if all(sampler is greedy for sampler in self.samplers):
            return greedy(logits)[0], [None] * len(self.uids)
        rows = [sampler(logits[row : row + 1], self._recent(row, known)) for row, sampler in enumerate(self.samplers)]
        return mx.concatenate([token for token, _ in rows], axis=0), [candidates for _, candidates in rows]

    def _recent(self, row: int, known: list[int]) -> Tokens:
        """As many of the sequence's last tokens as its sampler looks back on, this step's included."""
        num = self.samplers[row].looks_back
        if not num:
            return np.empty(0, np.int32)
        window = self.tokens[row][-num:]
        window.append(known[row])
        return np.frombuffer(window, np.int32)[-num:]

    def _reported(self, row: int, logits: mx.array, drawn_from: Candidates | None) -> mx.array:
        if self.uids[row] not in self._drawing:
            return _log_softmax(logits[row])
        if drawn_from is None:
            drawn_from = Candidates(mx.zeros((1, 1)), self._next_tokens[row : row + 1, None])
        return drawn_from.logprobs(logits.shape[-1])


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
