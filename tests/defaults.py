"""The server's settings as a test wants them: the table's defaults, and what it changes."""

from __future__ import annotations

from typing import Any

from mlxcel.settings import Settings
from mlxcel.settings_table import TABLE

DEFAULTS = {row.name: row.default for row in TABLE}


def settings(**changes: Any) -> Settings:
    assert changes.keys() <= DEFAULTS.keys(), changes.keys() - DEFAULTS.keys()
    return Settings(DEFAULTS | changes, dict.fromkeys(changes, "command line"))
