"""The devices that MLX sees, as `--list-devices` prints them."""

from __future__ import annotations

import mlx.core as mx

MEMORY = ("memory_size", "total_memory")  # what Metal and CUDA call it; the CPU says nothing


def device_list() -> str:
    """One line for each device; it is the first one that a model is loaded to."""
    lines = ["Available devices:"]
    for kind, name in ((mx.gpu, "GPU"), (mx.cpu, "CPU")):
        for i in range(mx.device_count(kind)):
            info = mx.device_info(mx.Device(kind, i))
            nbytes = next((int(info[key]) for key in MEMORY if key in info), 0)
            memory = f" ({nbytes >> 20} MiB)" if nbytes else ""
            lines.append(f"  {name}{i}: {info.get('device_name', 'unknown')}{memory}")
    return "\n".join(lines)
