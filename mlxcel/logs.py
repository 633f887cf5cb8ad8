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
from collections.abc import Mapping
from typing import Any, TextIO

from mlxcel.errors import ConfigError
from mlxcel.settings import Settings

LEVELS = (logging.ERROR, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG, logging.DEBUG)
SILENT = logging.CRITICAL + 1
EVERYTHING = 5  # the verbosity from which on the libraries are heard as well

_COLORS = {logging.DEBUG: "\x1b[2m", logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m"}
_ESCAPES = {i: f"\\x{i:02x}" for i in (*range(32), 127, *range(0x80, 0xA0), 0x2028, 0x2029)} | {10: "\\n", 9: "\\t"}
_NOISY = ("asyncio", "aiohttp", "urllib3", "httpx", "filelock", "transformers", "huggingface_hub")
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class LineFormatter(logging.Formatter):
    """`22:10:51.042 I scheduler: message`, a traceback as one escaped line after it.

    `priorities` begins the line with `<6>` and the like, from which the journal takes the record's level
    (sd-daemon(3)) and which it does not store.
    """

    def __init__(self, *, timestamps: bool, colors: bool, prefix: bool = True, priorities: bool = False) -> None:
        super().__init__()
        self._timestamps = timestamps
        self._colors = colors
        self._prefix = prefix
        self._priorities = priorities

    def format(self, record: logging.LogRecord) -> str:
        line = self._head(record) + one_line(record.getMessage())
        if record.exc_info:
            line += " | " + one_line(self.formatException(record.exc_info))
        color = _COLORS.get(record.levelno) if self._colors else None
        return f"{color}{line}\x1b[0m" if color else line

    def _head(self, record: logging.LogRecord) -> str:
        head = f"<{_PRIORITIES.get(record.levelno, 6)}>" if self._priorities else ""
        if self._timestamps:
            head += f"{time.strftime('%H:%M:%S', time.localtime(record.created))}.{int(record.msecs):03d} "
        if self._prefix:
            head += f"{record.levelname[0]} {record.name.removeprefix('mlxcel.').rpartition('.')[2]}: "
        return head


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
        return json.dumps(fields)  # in ASCII: no terminal and no encoding can break the line


def one_line(text: str) -> str:
    """`text` with control characters and line separators as escapes."""
    return text.translate(_ESCAPES)


def set_up(settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
    """Point the root logger where the settings say. Raises ConfigError when the log file cannot be opened."""
    handlers = [_handler(settings, environ)]
    if settings.log_file:
        handlers.append(_file_handler(settings))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    verbosity = EVERYTHING if settings.verbose else min(settings.verbosity, EVERYTHING)
    root.setLevel(SILENT if settings.log_disable else LEVELS[verbosity])
    for handler in handlers:
        root.addHandler(handler)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.NOTSET if verbosity == EVERYTHING else logging.WARNING)


def _handler(settings: Settings, environ: Mapping[str, str]) -> logging.Handler:
    """To standard output as JSON, else to standard error as lines."""
    if settings.log_jsonl:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(JsonFormatter())
        return handler
    is_journal = leads_to_journal(sys.stderr, environ)
    automatic = sys.stderr.isatty() and "NO_COLOR" not in environ
    formatter = LineFormatter(
        timestamps=not is_journal if settings.log_timestamps is None else settings.log_timestamps,
        colors=not is_journal and (settings.log_colors == "on" or (settings.log_colors == "auto" and automatic)),
        prefix=settings.log_prefix,
        priorities=is_journal,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    return handler


def _file_handler(settings: Settings) -> logging.Handler:
    """Appends, and opens the file anew when it was rotated away."""
    from logging.handlers import WatchedFileHandler  # imports sockets and pickle, which --help need not wait for

    try:
        handler = WatchedFileHandler(settings.log_file, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{settings.source('log_file')}: cannot open {settings.log_file}: {error.strerror}") from None
    timestamps = settings.log_timestamps is not False
    lines = LineFormatter(timestamps=timestamps, colors=False, prefix=settings.log_prefix)
    handler.setFormatter(JsonFormatter() if settings.log_jsonl else lines)
    return handler


def leads_to_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether `stream` is the very one that systemd connected: JOURNAL_STREAM is its device:inode (systemd.exec(5))."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file at all
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
