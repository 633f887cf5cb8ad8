"""The files for operators name only what exists."""

import re
from pathlib import Path

import pytest

from mlxcel.settings import parse
from mlxcel.settings_table import TABLE

CONTRIB = Path(__file__).parent.parent / "contrib"
FLAGS = {flag for row in TABLE for flag in (*row.flags, *row.negative)}


@pytest.mark.parametrize("path", sorted(p for p in CONTRIB.rglob("*") if p.is_file()), ids=lambda p: p.name)
def test_every_flag_of_ours_in_a_file_exists(path):
    # options of the shell commands in comments (useradd --system) stand on lines that begin with `#   `
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#   ")]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines)))
    assert named - {"--help"} <= FLAGS


def test_every_variable_of_the_example_works_also_those_that_are_commented_out():
    text = (CONTRIB / "systemd" / "mlxcel-server.env.example").read_text()
    variables = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", text, re.MULTILINE))
    known = {name: row for row in TABLE for name in row.env}
    assert len(variables) > 8 and variables.keys() <= known.keys()
    assert all(known[name].effect == "works" for name in variables)
    parse([], {name: value for name, value in variables.items() if not name.endswith("_FILE")})
