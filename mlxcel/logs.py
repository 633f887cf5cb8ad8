"""Logging: one record, one line, whatever text is in it.

Sets up the standard library's root logger from the settings. It knows no component and no message. Invariant: a
record cannot break out of its line (control characters are written as escapes), and under systemd no second
timestamp is added.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any, TextIO

from mlxcel.errors import ConfigError
from mlxcel.settings import Settings

LEVELS = (logging.CRITICAL + 1, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG, logging.DEBUG)
_COLORS = {logging.DEBUG: "\x1b[2m", logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m"}
_ESCAPES = {i: f"\\x{i:02x}" for i in (*range(32), 127, *range(0x80, 0xA0), 0x2028, 0x2029)} | {10: "\\n", 9: "\\t"}
_NOISY = ("asyncio", "aiohttp", "urllib3", "httpx", "filelock", "transformers", "huggingface_hub")


class LineFormatter(logging.Formatter):
    """`22:10:51.042 I scheduler: message`, a traceback as one escaped line after it."""

    def __init__(self, *, timestamps: bool, colors: bool) -> None:
        super().__init__()
        self._timestamps = timestamps
        self._colors = colors

    def format(self, record: logging.LogRecord) -> str:
        stamp = f"{time.strftime('%H:%M:%S', time.localtime(record.created))}.{int(record.msecs):03d} "
        name = record.name.removeprefix("mlxcel.").rpartition(".")[2]
        line = f"{stamp if self._timestamps else ''}{record.levelname[0]} {name}: {one_line(record.getMessage())}"
        if record.exc_info:
            line += " | " + one_line(self.formatException(record.exc_info))
        color = _COLORS.get(record.levelno) if self._colors else None
        return f"{color}{line}\x1b[0m" if color else line


class JsonFormatter(logging.Formatter):
    """One JSON object: time (Unix seconds), level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def one_line(text: str) -> str:
    """`text` with control characters and line separators as escapes."""
    return text.translate(_ESCAPES)


def set_up(settings: Settings) -> None:
    """Point the root logger where the settings say. Raises ConfigError when the log file cannot be opened."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    level = logging.DEBUG if settings.verbose else LEVELS[min(settings.verbosity, len(LEVELS) - 1)]
    root.setLevel(LEVELS[0] if settings.log_disable else level)
    root.addHandler(_handler(settings))
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def _handler(settings: Settings) -> logging.Handler:
    if settings.log_file:
        try:
            handler: logging.StreamHandler[Any] = logging.FileHandler(settings.log_file, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--log-file: cannot open {settings.log_file}: {error.strerror}") from None
        stream: TextIO = handler.stream
    else:
        stream = sys.stdout if settings.log_jsonl else sys.stderr
        handler = logging.StreamHandler(stream)
    colors = settings.log_colors == "on" or (settings.log_colors == "auto" and stream.isatty())
    timestamps = settings.log_timestamps and "JOURNAL_STREAM" not in os.environ
    line = LineFormatter(timestamps=timestamps, colors=colors)
    handler.setFormatter(JsonFormatter() if settings.log_jsonl else line)
    return handler
