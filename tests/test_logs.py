"""One record is one line, whatever is in it."""

import io
import json
import logging
import os
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel import logs
from mlxcel.errors import ConfigError
from mlxcel.settings import parse


def record(message="hello", level=logging.INFO, exc_info=None):
    return logging.LogRecord("mlxcel.engine.scheduler", level, "f.py", 1, message, None, exc_info)


@pytest.fixture
def root():
    """The root logger as it was before."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    for handler in logger.handlers:
        if handler not in handlers:
            handler.close()
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_a_line_has_level_component_and_message():
    assert logs.LineFormatter(timestamps=False, colors=False).format(record()) == "I scheduler: hello"


def test_a_line_may_begin_with_the_time():
    line = logs.LineFormatter(timestamps=True, colors=False).format(record())
    assert line[2] == line[5] == ":" and line[12:] == " I scheduler: hello"


def test_warnings_and_errors_are_coloured_on_request():
    line = logs.LineFormatter(timestamps=False, colors=True).format(record(level=logging.WARNING))
    assert line == "\x1b[33mW scheduler: hello\x1b[0m"


@given(text=st.text())
def test_no_text_breaks_out_of_its_line(text):
    line = logs.LineFormatter(timestamps=False, colors=False).format(record(text.replace("%", "%%")))
    assert len(line.splitlines()) <= 1 and "\x1b" not in line
    assert "\n" not in logs.JsonFormatter().format(record(text.replace("%", "%%")))


def test_a_traceback_stays_on_its_line():
    try:
        raise ValueError("inner")
    except ValueError:
        line = logs.LineFormatter(timestamps=False, colors=False).format(record(exc_info=sys.exc_info()))
    assert "ValueError: inner" in line and "\n" not in line


def test_json_lines_parse():
    fields = json.loads(logs.JsonFormatter().format(record("a\nb")))
    assert (fields["level"], fields["logger"], fields["message"]) == ("info", "mlxcel.engine.scheduler", "a\nb")


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ([], logging.INFO),
        (["-v"], logging.DEBUG),
        (["-lv", "0"], logging.ERROR),
        (["-lv", "1"], logging.ERROR),
        (["-lv", "2"], logging.WARNING),
        (["-lv", "4"], logging.DEBUG),
        (["-lv", "9"], logging.DEBUG),
    ],
)
def test_the_verbosity_sets_the_level(root, words, level):
    logs.set_up(parse(words, {}))
    assert root.level == level


@pytest.mark.parametrize(("words", "heard"), [(["-lv", "4"], False), (["-lv", "5"], True), (["-v"], True)])
def test_the_libraries_are_heard_from_verbosity_5_on(root, words, heard):
    logs.set_up(parse(words, {}))
    assert logging.getLogger("asyncio").isEnabledFor(logging.DEBUG) is heard


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ([], r"\d\d:\d\d:\d\d\.\d{3} W mlxcel: said"),
        (["--no-log-timestamps"], r"W mlxcel: said"),
        (["--no-log-prefix"], r"\d\d:\d\d:\d\d\.\d{3} said"),
        (["--no-log-prefix", "--no-log-timestamps"], r"said"),
        (["--log-colors", "on", "--no-log-timestamps"], r"\x1b\[33mW mlxcel: said\x1b\[0m"),
    ],
)
def test_what_a_line_begins_with(root, capsys, words, pattern):
    logs.set_up(parse(words, {}), {})
    logging.getLogger("mlxcel").warning("said")
    assert re.fullmatch(pattern + "\n", capsys.readouterr().err)


def test_json_lines_go_to_standard_output(root, capsys):
    logs.set_up(parse(["--log-jsonl"], {}))
    logging.getLogger("mlxcel").warning("lone \ud800 and\u2028split")
    out, err = capsys.readouterr()
    assert err == "" and json.loads(out)["message"] == "lone \ud800 and\u2028split" and len(out.splitlines()) == 1


def test_the_journal_gets_levels_of_its_own_kind_and_no_second_timestamp(root, tmp_path, monkeypatch):
    with (tmp_path / "journal").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        status = os.stat(stream.fileno())
        logs.set_up(parse(["--log-colors", "on"], {}), {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"})
        logging.getLogger("mlxcel").error("said")
    assert (tmp_path / "journal").read_text() == "<3>E mlxcel: said\n"


def test_another_stream_than_the_journals_is_not_taken_for_it(tmp_path):
    with (tmp_path / "file").open("w") as stream:
        assert not logs.leads_to_journal(stream, {"JOURNAL_STREAM": "1:2"})
        assert not logs.leads_to_journal(stream, {})
    assert not logs.leads_to_journal(io.StringIO(), {"JOURNAL_STREAM": "1:2"})


def test_log_disable_says_nothing(root, capsys):
    logs.set_up(parse(["--log-disable"], {}))
    logging.getLogger("mlxcel").critical("nobody hears this")
    assert capsys.readouterr() == ("", "")


def test_a_log_file_gets_the_lines_too(root, tmp_path, capsys):
    logs.set_up(parse(["--log-file", str(tmp_path / "log")], {}))
    logging.getLogger("mlxcel").warning("written")
    assert (tmp_path / "log").read_text().endswith("W mlxcel: written\n")
    assert capsys.readouterr().err.endswith("W mlxcel: written\n")


def test_a_log_file_may_be_rotated_away(root, tmp_path):
    logs.set_up(parse(["--log-file", str(tmp_path / "log")], {}))
    logging.getLogger("mlxcel").warning("before")
    (tmp_path / "log").rename(tmp_path / "log.1")
    logging.getLogger("mlxcel").warning("after \ud800")
    assert (tmp_path / "log.1").read_text().endswith("before\n")
    assert (tmp_path / "log").read_text().endswith("after \\ud800\n")


def test_a_log_file_that_cannot_be_opened_names_its_flag(root, tmp_path):
    path = str(tmp_path / "no" / "log")
    with pytest.raises(ConfigError, match=r"^--log-file: cannot open"):
        logs.set_up(parse(["--log-file", path], {}))
    with pytest.raises(ConfigError, match=r"^LLAMA_ARG_LOG_FILE: cannot open"):
        logs.set_up(parse([], {"LLAMA_ARG_LOG_FILE": path}))
