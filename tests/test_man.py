"""The manual page is generated from the settings table and must be up to date."""

import importlib.util
from pathlib import Path

from mlxcel.settings_table import TABLE

MAN = Path(__file__).parent.parent / "man"


def generator():
    spec = importlib.util.spec_from_file_location("generate", MAN / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    assert (MAN / "mlxcel-server.1").read_text() == generator().page(), "run: make man"


def test_the_page_names_every_flag_and_variable_that_works():
    text = generator().page().replace("\\-", "-")
    for row in TABLE:
        if row.effect == "works":
            assert all(name in text for name in (*row.flags, *row.negative, *row.env)), row.name


def test_no_line_is_taken_for_a_request_by_accident():
    known = (".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".RB", ".RI", ".IR", ".BR", ".I", ".nf", ".fi", ".nh", ".ad")
    for line in generator().page().splitlines():
        assert not line.startswith(("'", ".")) or line.split()[0] in known
