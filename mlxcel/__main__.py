"""The command: settings first, everything heavy after."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from mlxcel import logs, sources, usage
from mlxcel.errors import ConfigError, StartError
from mlxcel.settings import parse
from mlxcel.settings_files import config_files


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server, which ends the process: with 0 after a clean stop. Returns 0 when only help or the version was
    asked for, 1 when it cannot serve, 2 for a bad flag or variable."""
    words = sys.argv[1:] if argv is None else list(argv)
    if asked := usage.asked_for(words):
        print(_text(asked))
        return 0
    try:
        settings = parse(words, os.environ, config_files(os.environ))
        logs.set_up(settings)
        for note in settings.notes:
            logging.getLogger("mlxcel.settings").warning("%s", note)
        # transformers announces at import that PyTorch is missing; nothing here needs it
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from mlxcel.server import serve

        serve(settings)
    except (ConfigError, StartError) as error:
        print(f"mlxcel-server: error: {logs.one_line(str(error))}", file=sys.stderr)
        return error.exit_code


def _text(option: str) -> str:
    """What is printed instead of serving."""
    if option == "list_devices":
        from mlxcel.engine.devices import device_list

        return device_list()
    texts = {
        "help": usage.help_text,
        "version": usage.version_text,
        "completion_bash": usage.completion_text,
        "cache_list": sources.cache_list,
    }
    return texts[option]()


if __name__ == "__main__":
    sys.exit(main())
