"""One record is one line, whatever is in it."""

import json
import logging
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
    [([], logging.INFO), (["-v"], logging.DEBUG), (["-lv", "1"], logging.ERROR), (["-lv", "9"], logging.DEBUG)],
)
def test_the_verbosity_sets_the_level(root, words, level):
    logs.set_up(parse(words, {}))
    assert root.level == level


def test_log_disable_says_nothing(root, capsys):
    logs.set_up(parse(["--log-disable"], {}))
    logging.getLogger("mlxcel").critical("nobody hears this")
    assert capsys.readouterr() == ("", "")


def test_a_log_file_gets_the_lines(root, tmp_path):
    logs.set_up(parse(["--log-file", str(tmp_path / "log")], {}))
    logging.getLogger("mlxcel").warning("written")
    assert (tmp_path / "log").read_text().endswith("W mlxcel: written\n")


def test_a_log_file_that_cannot_be_opened_names_its_flag(root, tmp_path):
    with pytest.raises(ConfigError, match="--log-file: cannot open"):
        logs.set_up(parse(["--log-file", str(tmp_path / "no" / "log")], {}))
