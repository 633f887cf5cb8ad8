"""Prometheus text, version 0.0.4, line by line."""

import re

import pytest

from mlxcel.metrics import Metrics, Rate

SAMPLE = re.compile(r'^[a-zA-Z_:][a-zA-Z0-9_:]*(\{[a-z_]+="([^"\\\n]|\\["\\n])*"\})? (-?[0-9.e+-]+|NaN|[+-]Inf)$')


def metrics() -> Metrics:
    return Metrics(clock=lambda: 1000.0)


def test_a_counter_reads_its_number_at_each_scrape():
    m, totals = metrics(), {"n": 1}
    m.counter("x_total", "Things.", lambda: totals["n"])
    assert m.render() == "# HELP x_total Things.\n# TYPE x_total counter\nx_total 1\n"
    totals["n"] = 5
    assert m.render().endswith("x_total 5\n")


def test_labels_are_sorted_and_escaped():
    m = metrics()
    m.counter("x_total", "A \\ and\na line.", lambda: {'b"\n\\': 2, "a": 1}, label="reason")
    lines = m.render().splitlines()
    assert lines[0] == r"# HELP x_total A \\ and\na line."
    assert lines[2:] == ['x_total{reason="a"} 1', r'x_total{reason="b\"\n\\"} 2']


def test_a_histogram_counts_up_to_each_bound_and_ends_with_infinity():
    m = metrics()
    h = m.histogram("h", "Spread.", (1, 2.5))
    for value in (0.5, 1, 2, 99):
        h.observe(value)
    assert m.render().splitlines()[2:] == [
        'h_bucket{le="1"} 2',
        'h_bucket{le="2.5"} 3',
        'h_bucket{le="+Inf"} 4',
        "h_sum 102.5",
        "h_count 4",
    ]


def test_a_rate_is_since_the_previous_scrape():
    totals = [(100.0, 2.0), (100.0, 2.0), (150.0, 4.0)]
    rate = Rate(lambda: totals.pop(0))
    assert [rate(), rate(), rate()] == [50.0, 0.0, 25.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(float("inf"), "+Inf"), (float("-inf"), "-Inf"), (float("nan"), "NaN"), (2**63, str(2**63)), (2.0, "2.0")],
)
def test_numbers_are_spelled_as_prometheus_reads_them(value, text):
    m = metrics()
    m.gauge("g", "One.", lambda: value)
    assert m.render().splitlines()[-1] == f"g {text}"


@pytest.mark.parametrize("value", [0, 1.5, 1e-9, 10**18, float("1e30")])
def test_every_line_is_valid_text(value):
    m = metrics()
    m.gauge("g", "One.", lambda: value)
    m.counter("c_total", "Two.", lambda: {"a b": value}, label="l")
    m.histogram("h", "Three.", (0.1,)).observe(value)
    text = m.render()
    assert text.endswith("\n")
    for line in text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or SAMPLE.match(line), line
