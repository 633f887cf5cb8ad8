"""Why a prompt would hit or miss, in the words an operator can act on, in either store.

Pure reading: nothing is counted or refreshed, only what has outlived its TTL leaves, as at any lookup. Buckets of
another salt are never looked at, so that an explanation tells nothing about another tenant.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxcel.cache.entry import Entry
from mlxcel.cache.key import CacheContext
from mlxcel.cache.lookup import Match, Miss, MissReason, choose, differing
from mlxcel.cache.radix import Tokens, common_prefix
from mlxcel.cache.snapshots import Lent, Snapshot, SnapshotStore
from mlxcel.cache.store import Store


@dataclass(frozen=True, slots=True)
class Explanation:
    """`matched` tokens would be adopted (0 on a miss); `common` are equal at the start of the best candidate's.

    `best_tokens` are the candidate's; `key_differences` say in which dimensions its bucket differs, if it is another.
    """

    reason: MissReason | None
    prompt_tokens: int
    matched: int
    common: int
    best: Entry | Snapshot | None
    best_tokens: Tokens[int] | None
    same_session: bool
    key_differences: tuple[MissReason, ...]

    @property
    def blocks_floored(self) -> int:
        """Common tokens that the whole-block rule (or the last-token rule) gave up."""
        return self.common - self.matched if self.matched else 0

    @property
    def first_difference(self) -> int | None:
        """Index of the first token in which prompt and candidate differ or one of them ends."""
        return self.common if self.best is not None else None


def explain(store: Store, context: CacheContext, tokens: Tokens[int], now: float) -> Explanation:
    """What a lookup of `tokens` would say at `now`, and what it would have needed."""
    verdict = store.judge(context, tokens, store.sweep(now))
    candidate, differences = _candidate(store, context, tokens)
    best = verdict.entry if isinstance(verdict, Match) else candidate
    bucket = store.bucket(best.context) if best else None
    best_tokens = bucket.trie.tokens(best.node) if best and bucket else None
    return Explanation(
        reason=verdict.reason if isinstance(verdict, Miss) else None,
        prompt_tokens=len(tokens),
        matched=verdict.length if isinstance(verdict, Match) else 0,
        common=common_prefix(tokens, best_tokens) if best_tokens else 0,
        best=best,
        best_tokens=best_tokens,
        same_session=best is not None and best.context.session_key == context.session_key,
        key_differences=differences,
    )


def explain_snapshots(store: SnapshotStore, context: CacheContext, tokens: Tokens[int], now: float) -> Explanation:
    """The same for a model that is stored as snapshots. A snapshot that was refused is still the best candidate."""
    verdict = store.judge(context, tokens, store.sweep(now))
    best = verdict.snapshot if isinstance(verdict, Lent) else store.nearest(context, tokens)
    elsewhere = best is not None and best.context.bucket != context.bucket
    return Explanation(
        reason=verdict.reason if isinstance(verdict, Miss) else None,
        prompt_tokens=len(tokens),
        matched=verdict.length if isinstance(verdict, Lent) else 0,
        common=common_prefix(tokens, best.tokens) if best else 0,
        best=best,
        best_tokens=best.tokens if best else None,
        same_session=best is not None and best.context.session_key == context.session_key,
        key_differences=tuple(differing(context, best.context)) if best and elsewhere else (),
    )


def _candidate(store: Store, context: CacheContext, tokens: Tokens[int]) -> tuple[Entry | None, tuple[MissReason, ...]]:
    """The entry of the own bucket that shares most, else that of the nearest bucket, and where its key differs."""
    own = store.bucket(context)
    bucket = own or store.nearest(context)
    if bucket is None:
        return None, ()
    match = choose(bucket.trie, tokens, context.session_key, 1)
    differences = () if own else tuple(differing(context, bucket.context))
    return (match.entry if match else None), differences
