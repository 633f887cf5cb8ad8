"""How much memory is left beside the loaded model, for what wants to size itself by it."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx


def bytes_left() -> int | None:
    """Bytes that may still be used, measured once the weights are in memory; None when it cannot be told.

    On a GPU: the recommended working set (Metal) or the device's memory (CUDA), less what MLX holds. On Linux:
    MemAvailable, from which the weights are missing already.
    """
    if mx.metal.is_available() or mx.cuda.is_available():
        info = mx.device_info()
        total = info.get("max_recommended_working_set_size") or info.get("memory_size") or info.get("total_memory")
        return max(int(total) - mx.get_active_memory(), 0) if total else None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
