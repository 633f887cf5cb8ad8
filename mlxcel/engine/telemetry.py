"""What the server counts, as Prometheus families: each reads the number from its owner at scrape time.

llama-server's names come first (`llamacpp:`), so that its dashboards go on working, then ours (`mlxcel_`). It owns
the names, help texts and buckets; it counts nothing itself but the two histograms.
"""

from __future__ import annotations

from mlxcel.cache.snapshots import SnapshotStore
from mlxcel.cache.store import Store
from mlxcel.engine.scheduler import Scheduler
from mlxcel.engine.sequence import Finished, Sequence
from mlxcel.metrics import Histogram, Metrics, Rate

TTFT_MS = (5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000)
DECODE_TOK_S = (1, 5, 10, 25, 50, 75, 100, 150, 200, 300, 500, 1000)


class Latencies:
    """The histograms, fed by the scheduler's `on_finished`."""

    def __init__(self, metrics: Metrics) -> None:
        self.ttft: Histogram = metrics.histogram(
            "mlxcel_request_ttft_ms", "Milliseconds from a request's arrival to its first token.", TTFT_MS
        )
        self.rate: Histogram = metrics.histogram(
            "mlxcel_request_decode_tok_s", "Tokens per second of a request after its first.", DECODE_TOK_S
        )

    def observe(self, sequence: Sequence, end: Finished) -> None:
        """A request without a token observes nothing, one with a single token no rate."""
        if end.completion_tokens:
            self.ttft.observe((sequence.first_token_at - sequence.submitted_at) * 1000)
        if end.completion_tokens > 1 and end.predicted_ms > 0:
            self.rate.observe((end.completion_tokens - 1) / end.predicted_ms * 1000)


def declare(metrics: Metrics, scheduler: Scheduler, store: Store, snapshots: SnapshotStore) -> None:
    """Declare all families of a running server."""
    _llamacpp(metrics, scheduler)
    _requests(metrics, scheduler)
    _prompt_cache(metrics, store, snapshots)
    _snapshots(metrics, snapshots)


def _llamacpp(m: Metrics, s: Scheduler) -> None:
    t = s.totals
    m.counter("llamacpp:prompt_tokens_total", "Prompt tokens computed, without cached ones.", lambda: t.prompt_tokens)
    m.counter("llamacpp:prompt_tokens_cached_total", "Prompt tokens reused.", lambda: t.cached_tokens)
    m.counter("llamacpp:prompt_seconds_total", "Seconds of prefill.", lambda: t.prefill_seconds)
    m.counter("llamacpp:tokens_predicted_total", "Tokens generated.", lambda: t.completion_tokens)
    m.counter("llamacpp:tokens_predicted_seconds_total", "Seconds of decode.", lambda: t.decode_seconds)
    m.counter("llamacpp:n_decode_total", "Forward calls.", lambda: t.decode_steps + t.prefill_chunks)
    m.counter("llamacpp:n_tokens_max", "Largest sequence seen.", lambda: t.max_tokens_seen)
    prompt_rate = Rate(lambda: (t.prompt_tokens, t.prefill_seconds))
    predicted_rate = Rate(lambda: (t.completion_tokens, t.decode_seconds))
    m.gauge("llamacpp:prompt_tokens_seconds", "Prompt tokens per second since the last scrape.", prompt_rate)
    m.gauge("llamacpp:predicted_tokens_seconds", "Generated tokens per second since the last scrape.", predicted_rate)
    m.gauge("llamacpp:requests_processing", "Requests that hold a slot.", lambda: s.num_active)
    m.gauge("llamacpp:requests_deferred", "Requests waiting for a slot.", lambda: s.num_waiting)
    busy = lambda: t.busy_slots / t.decode_steps if t.decode_steps else 0.0  # noqa: E731
    m.gauge("llamacpp:n_busy_slots_per_decode", "Average sequences in a decode step.", busy)


def _requests(m: Metrics, s: Scheduler) -> None:
    t = s.totals
    ends = lambda: {"completed": t.completed, "cancelled": t.cancelled, "failed": t.failed}  # noqa: E731
    m.counter("mlxcel_requests_total", "Generations submitted.", lambda: t.submitted)
    m.counter("mlxcel_requests_ended_total", "Generations ended, by how.", ends, label="end")
    m.counter("mlxcel_prompt_tokens_total", "Prompt tokens, cached ones included.",
              lambda: t.prompt_tokens + t.cached_tokens)  # fmt: skip
    m.counter("mlxcel_completion_tokens_total", "Tokens generated.", lambda: t.completion_tokens)
    m.counter("mlxcel_generation_time_seconds_total", "Seconds of decode.", lambda: t.decode_seconds)
    m.gauge("mlxcel_slots_total", "Sequences that may run at once.", lambda: s.bounds.num_slots)
    m.gauge("mlxcel_slots_available", "Free slots.", lambda: s.bounds.num_slots - s.num_active)
    m.gauge("mlxcel_queue_depth", "Requests waiting for a slot.", lambda: s.num_waiting)
    m.counter("mlxcel_batch_sequences_started_total", "Sequences that got a slot.", lambda: t.submitted - s.num_waiting)
    m.counter("mlxcel_batch_sequences_completed_total", "Sequences that ended well.", lambda: t.completed)
    m.counter("mlxcel_batch_prefill_tokens_total", "Prompt tokens computed.", lambda: t.prompt_tokens)
    m.counter("mlxcel_batch_prefill_chunks_total", "Pieces of prompts computed.", lambda: t.prefill_chunks)
    m.counter("mlxcel_batch_decode_tokens_total", "Tokens generated.", lambda: t.completion_tokens)
    m.counter("mlxcel_batch_decode_steps_total", "Decode steps of the whole batch.", lambda: t.decode_steps)
    m.counter("mlxcel_batch_mixed_steps_total", "Steps with both prefill and decode.", lambda: t.mixed_steps)
    m.gauge("mlxcel_batch_current_size", "Sequences that hold a slot.", lambda: s.num_active)


def _prompt_cache(m: Metrics, store: Store, snapshots: SnapshotStore) -> None:
    t, s = store.totals, snapshots.totals
    m.counter("mlxcel_prompt_cache_hits_total", "Lookups that lent a prefix.", lambda: t.hits)
    m.counter("mlxcel_prompt_cache_misses_total", "Lookups that lent nothing.", lambda: sum(t.misses.values()))
    m.counter(
        "mlxcel_prompt_cache_misses_by_reason_total",
        "Lookups that lent nothing, by reason.",
        lambda: {reason.value: n for reason, n in t.misses.items()},
        label="reason",
    )
    m.counter(
        "mlxcel_prompt_cache_prefix_tokens_reused_total", "Prompt tokens lent to requests.", lambda: t.tokens_reused
    )
    m.counter(
        "mlxcel_prompt_cache_evictions_total",
        "Entries evicted, by reason.",
        lambda: {"lru": t.evictions["lru"], "ttl": t.evictions["ttl"], "capacity": 0},
        label="reason",
    )
    m.counter(
        "mlxcel_prompt_cache_reject_total",
        "Entries refused, by reason.",
        lambda: {"oversized": t.rejections_oversized + s.rejections_oversized, **s.refusals},
        label="reason",
    )
    m.gauge("mlxcel_prompt_cache_bytes", "Bytes of stored KV.", lambda: store.nbytes)
    m.gauge("mlxcel_prompt_cache_capacity_bytes", "Most bytes of stored KV.", lambda: store.limits.capacity_bytes)
    m.gauge("mlxcel_prompt_cache_entries", "Stored entries.", lambda: store.num_entries)


def _snapshots(m: Metrics, store: SnapshotStore) -> None:
    t, name = store.totals, "mlxcel_prompt_cache_snapshot_"
    m.counter(name + "hits_total", "Lookups that lent a snapshot.", lambda: t.hits)
    m.counter(name + "misses_total", "Lookups that lent no snapshot.", lambda: sum(t.misses.values()))
    m.counter(
        name + "misses_by_reason_total",
        "Lookups that lent no snapshot, by reason.",
        lambda: {reason.value: n for reason, n in t.misses.items()},
        label="reason",
    )
    m.counter(name + "tokens_reused_total", "Prompt tokens lent by snapshots.", lambda: t.tokens_reused)
    m.counter(name + "supersedes_total", "Snapshots that a longer one of their session replaced.", lambda: t.supersedes)
    m.counter(
        name + "evictions_total",
        "Snapshots evicted, by reason.",
        lambda: {"lru": t.evictions["lru"], "ttl": t.evictions["ttl"]},
        label="reason",
    )
    m.counter(name + "warmups_total", "Next turns computed ahead.", lambda: t.warmups_run)
    m.gauge(name + "bytes", "Bytes of stored snapshots.", lambda: store.nbytes)
    m.gauge(name + "capacity_bytes", "Most bytes of stored snapshots.", lambda: store.limits.capacity_bytes)
    m.gauge(name + "entries", "Stored snapshots.", lambda: store.num_entries)
