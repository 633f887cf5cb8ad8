"""Prometheus text, rendered by hand.

It owns the text format (version 0.0.4) and the three kinds of family. It does not know what is counted: a family
either keeps its own number or reads it from a function at scrape time, so that nothing is counted twice. Invariant:
HELP and TYPE once per family, families in the order of declaration, samples in the order of their labels.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

Labels = tuple[tuple[str, str], ...]
Value = int | float


class Family:
    """A counter or gauge whose samples are read from `read` at each scrape: a number, or {label value: number}."""

    def __init__(
        self, name: str, kind: str, help: str, read: Callable[[], Value | Mapping[str, Value]], label: str = ""
    ):
        self.name, self.kind, self.help, self.read, self.label = name, kind, help, read, label

    def samples(self) -> Iterable[tuple[str, Labels, Value]]:
        value = self.read()
        if not isinstance(value, Mapping):
            yield self.name, (), value
            return
        for text, number in sorted(value.items()):
            yield self.name, ((self.label, str(text)),), number


class Histogram:
    """Counts of observations up to each bound, and their sum."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name, self.help, self.bounds = name, help, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def samples(self) -> Iterable[tuple[str, Labels, Value]]:
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            yield f"{self.name}_bucket", (("le", "+Inf" if bound == float("inf") else f"{bound:g}"),), total
        yield f"{self.name}_sum", (), self._sum
        yield f"{self.name}_count", (), total


class Rate:
    """Units per second of two growing totals since the previous scrape: (units, seconds)."""

    def __init__(self, read: Callable[[], tuple[float, float]]) -> None:
        self._read, self._last = read, (0.0, 0.0)

    def __call__(self) -> float:
        (units, seconds), (units_then, seconds_then) = self._read(), self._last
        self._last = units, seconds
        return (units - units_then) / (seconds - seconds_then) if seconds > seconds_then else 0.0


class Metrics:
    """An ordered set of families; `render()` is the body of GET /metrics."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.started_at = clock()
        self._families: list[Family | Histogram] = []

    def counter(self, name: str, help: str, read: Callable[[], Value | Mapping[str, Value]], label: str = "") -> None:
        self._families.append(Family(name, "counter", help, read, label))

    def gauge(self, name: str, help: str, read: Callable[[], Value]) -> None:
        self._families.append(Family(name, "gauge", help, read))

    def histogram(self, name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
        family = Histogram(name, help, bounds)
        self._families.append(family)
        return family

    def render(self) -> str:
        lines = []
        for family in self._families:
            lines.append(f"# HELP {family.name} {_escaped(family.help)}")
            lines.append(f"# TYPE {family.name} {family.kind}")
            lines += [f"{name}{_labels(labels)} {_number(value)}" for name, labels, value in family.samples()]
        return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels) + "}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: Value) -> str:
    """Go's spelling of what is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(value)
