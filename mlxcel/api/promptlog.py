"""--log-prompts-dir: one text file for each prompt that is computed, special tokens written out.

It owns the folder and the files' names, which begin with the time, so that they sort by it. It only writes: nothing is
read back, kept in order or removed. The files are their owner's alone, and no request waits for or fails by them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mlxcel.api.services import Services
from mlxcel.errors import ConfigError
from mlxcel.settings import Settings

if TYPE_CHECKING:
    from mlxcel.engine.sequence import Sequence

log = logging.getLogger(__name__)


def make_folder(settings: Settings) -> None:
    """At the start. Raises ConfigError."""
    if settings.log_prompts_dir:
        try:
            Path(settings.log_prompts_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-prompts-dir: cannot make {settings.log_prompts_dir}: {error.strerror}") from None


def log_prompts(services: Services, sequences: Iterable[Sequence]) -> None:
    if not services.settings.log_prompts_dir:
        return
    for sequence in sequences:
        path = Path(services.settings.log_prompts_dir) / f"{int(time.time() * 1000)}-{sequence.id}.txt"
        task = asyncio.create_task(asyncio.to_thread(_write, services, path, sequence.prompt))
        services.background.add(task)
        task.add_done_callback(services.background.discard)


def _write(services: Services, path: Path, prompt: array[int]) -> None:
    text = services.live.model.tokenizer.decode_special(prompt)
    try:
        with open(path, "x", encoding="utf-8", opener=_private) as file:
            file.write(text)
    except OSError as error:
        log.warning("--log-prompts-dir: cannot write %s: %s", path, error.strerror)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
