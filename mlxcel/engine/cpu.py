"""Speed on the Linux CPU backend: a real BLAS under MLX, and what fastmath.py has.

Owns what `prepare` changes in this process: the three BLAS functions that libmlx.so calls, and `mx.compile` (off: it
runs g++ during requests and gains nothing). Knows no model, cache or scheduler. Invariant: on Metal and CUDA nothing
is touched, and every replacement answers as the stock one does, within float32 rounding.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel.engine import fastmath
from mlxcel.engine.elf import SymbolInfo, import_slots, read, write

_GEMMS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # all that libmlx.so imports of CBLAS

_SYSTEM_LIBRARIES = (
    "libopenblas.so.0",
    "libopenblasp.so.0",
    "libmkl_rt.so.3",
    "libmkl_rt.so.2",
    f"{sys.prefix}/lib/libmkl_rt.so.3",  # where `pip install mkl` puts it
    f"{sys.prefix}/lib/libmkl_rt.so.2",
)

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Blas:
    """Which BLAS multiplies matrices; `str()` is the line of the start-up log."""

    name: str
    is_reference: bool

    def __str__(self) -> str:
        return f"BLAS: {self.name}"

    @property
    def warning(self) -> str | None:
        """One line of advice when only the slow reference BLAS serves, else None."""
        if not self.is_reference:
            return None
        return (
            "no fast BLAS found, prompts take about 15 times as long: "
            "install the system's OpenBLAS (Debian, Ubuntu: libopenblas0-pthread) or `pip install scipy-openblas32`"
        )


def is_cpu() -> bool:
    """Whether MLX computes on the CPU because it has no GPU here."""
    return mx.default_device().type == mx.cpu and not mx.metal.is_available() and not mx.cuda.is_available()


def prepare() -> Blas:
    """Make this process fast on the Linux CPU backend; harmless when called again, and on any other backend.

    Call it before a model's first evaluation. Says which BLAS serves; raises nothing.
    """
    if sys.platform != "linux" or not is_cpu():
        return Blas("MLX's own", is_reference=False)
    mx.disable_compile()
    fastmath.install()
    return _install_blas(import_slots("libmlx.so", _GEMMS))


# ---- BLAS ----------------------------------------------------------------------------------------------------
# The published Linux wheel brings Netlib's reference BLAS. Its three GEMM functions reach libmlx.so through import
# slots, which can be pointed at another library at any time: before or after `import mlx.core`, without LD_PRELOAD,
# and with the prefixed names of scipy-openblas32. So the slots serve every source, and a library loaded
# RTLD_LOCAL cannot disturb anybody else's BLAS.


def _install_blas(slots: list[tuple[str, int]]) -> Blas:
    if name := _serving(slots):  # preloaded, linked by another build of MLX, or ours from an earlier call
        return Blas(name, is_reference=False)
    for library in _libraries() if slots else ():
        name = _describe(library)
        if name and _redirect(slots, _gemm_addresses(library)):
            return Blas(name, is_reference=False)
    return Blas("reference", is_reference=True)


def _serving(slots: list[tuple[str, int]]) -> str | None:
    """The name of the library that the slots point to now, if it is a fast one."""
    for _, slot in slots:
        info = SymbolInfo()
        if ctypes.CDLL(None).dladdr(ctypes.c_void_p(read(slot)), ctypes.byref(info)):
            return _describe(ctypes.CDLL(os.fsdecode(info.file), mode=os.RTLD_NOLOAD | os.RTLD_NOW))
    return None


def _libraries() -> Iterator[ctypes.CDLL]:
    """The BLAS libraries of this machine, the system's first."""
    for name in _SYSTEM_LIBRARIES:
        if library := _load(name):
            yield _with_right_kernels(library, name)
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in spec.submodule_search_locations or () if spec else ():
        if library := _load(f"{folder}/lib/libscipy_openblas.so"):
            yield library


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError:
        return None


def _describe(library: ctypes.CDLL) -> str | None:
    """Set the library's threads and name it: "OpenBLAS 0.3.34 (SkylakeX, 1 thread)". None: not one we can use."""
    if config := _text(library, "openblas_get_config"):
        if "USE64BITINT" in config:  # libmlx.so passes 32-bit integers
            return None
        if not _threads_chosen():
            _function(library, "openblas_set_num_threads")(_num_threads())
        threads = _function(library, "openblas_get_num_threads")()
        return f"OpenBLAS {config.split()[1]} ({_text(library, 'openblas_get_corename')}, {_threads(threads)})"
    if set_layer := _function(library, "MKL_Set_Threading_Layer"):
        if "MKL_THREADING_LAYER" not in os.environ:
            set_layer(1)  # sequential: needs no OpenMP runtime, and its threads stall steps as OpenBLAS's do
        return f"MKL ({_threads(library.MKL_Get_Max_Threads())})"
    return None


def _function(library: ctypes.CDLL, name: str) -> Any:
    """The library's function of that name, with or without scipy-openblas32's prefix; None if it has none."""
    return getattr(library, name, None) or getattr(library, f"scipy_{name}", None)


def _text(library: ctypes.CDLL, name: str) -> str | None:
    function = _function(library, name)
    if function is None:
        return None
    function.restype = ctypes.c_char_p
    return str(function().decode())


def _threads(n: int) -> str:
    return f"{n} thread{'s' * (n != 1)}"


def _threads_chosen() -> bool:
    return any(os.environ.get(variable) for variable in _THREAD_VARIABLES)


def _num_threads() -> int:
    """Half of the CPUs this process may use, at least one.

    BLAS threads wait for each other by spinning: one of them without a CPU stops the whole step for 16 ms slices.
    Measured on two CPUs with two threads: a quiet machine gains 1.3 to 1.8 times, one busy neighbour turns a
    52 ms step into 2,890 ms. With one thread the same neighbour costs 2.3 times at worst. Half leaves room for
    the event loop, the tokenizer and the neighbour (and is what hyperthreads give to matrix products anyway).
    """
    return max(1, min(len(os.sched_getaffinity(0)), _cgroup_cpus()) // 2)


def _cgroup_cpus() -> int:
    """The CPU quota of this container or systemd unit; spinning threads beyond it would burn it up."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
        quota, period = Path(f"/sys/fs/cgroup{group}/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return sys.maxsize


def _with_right_kernels(library: ctypes.CDLL, name: str) -> ctypes.CDLL:
    """Load OpenBLAS again when it did not recognise this CPU; OPENBLAS_CORETYPE of the environment stands.

    Debian's 0.3.21 takes a 2023 Xeon for a Prescott and runs SSE3 kernels: 28 GFLOP/s where SkylakeX's give 107.
    """
    core, fitting = _text(library, "openblas_get_corename"), _fitting_cores(_cpu_flags())
    if core is None or not fitting or core in fitting or "OPENBLAS_CORETYPE" in os.environ:
        return library
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))
    with _environment("OPENBLAS_CORETYPE", fitting[0]):
        return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_LOCAL)


def _fitting_cores(flags: frozenset[str]) -> tuple[str, ...]:
    """OpenBLAS's names for the kernels that suit a CPU of these flags, the one to force first."""
    if flags >= {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}:
        return ("SkylakeX", "Cooperlake", "SapphireRapids")
    return ("Haswell", "Zen") if flags >= {"avx2", "fma"} else ()


def _cpu_flags() -> frozenset[str]:
    """The x86 flags of /proc/cpuinfo, empty elsewhere (Arm calls them Features)."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset())


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _gemm_addresses(library: ctypes.CDLL) -> dict[str, int]:
    return {name: ctypes.cast(_function(library, name), ctypes.c_void_p).value or 0 for name in _GEMMS}


def _redirect(slots: list[tuple[str, int]], targets: Mapping[str, int]) -> bool:
    """Point the slots at `targets` (symbol to address); put them back and say False if products come out wrong."""
    before = [(slot, read(slot)) for _, slot in slots]
    for symbol, slot in slots:
        write(slot, targets[symbol])
    if _products_are_right():
        return True
    for slot, address in before:
        write(slot, address)
    return False


def _products_are_right() -> bool:
    """Small whole numbers in every type and layout that MLX hands to BLAS: exact, whatever the order of summing."""
    dtypes: tuple[Any, ...] = (np.float32, np.float64, np.complex64)
    for dtype in dtypes:
        for m, n, k in ((1, 5, 33), (7, 1, 9), (17, 40, 64)):
            a: Any = (np.arange(m * k) * 7 % 11 - 5).reshape(m, k).astype(dtype)
            b: Any = (np.arange(k * n) * 5 % 13 - 6).reshape(k, n).astype(dtype)
            for left in (mx.array(a), mx.array(a.T.copy()).T):
                for right in (mx.array(b), mx.array(b.T.copy()).T):
                    product = mx.matmul(left, right, stream=mx.cpu)
                    mx.eval(product)
                    if not np.array_equal(np.array(product), a @ b):
                        return False
    return True
