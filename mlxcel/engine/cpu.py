"""Speed on the Linux CPU backend: a real BLAS under MLX, and attention and activations without its slow `exp`.

Owns what `prepare` changes in this process: the three BLAS functions that libmlx.so calls, `mx.compile` (off: it
runs g++ during requests and gains nothing), `mx.fast.scaled_dot_product_attention`, `nn.silu`, `nn.gelu_approx`.
Knows no model, cache or scheduler. Invariant: on Metal and CUDA nothing is touched, and every replacement answers
as the stock one does, within float32 rounding, or hands the call to it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import mmap
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

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
    _install_fast_math()
    return _install_blas(_import_slots())


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
        info = _SymbolInfo()
        if ctypes.CDLL(None).dladdr(ctypes.c_void_p(_read(slot)), ctypes.byref(info)):
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
    before = [(slot, _read(slot)) for _, slot in slots]
    for symbol, slot in slots:
        _write(slot, targets[symbol])
    if _products_are_right():
        return True
    for slot, address in before:
        _write(slot, address)
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


# ---- ELF -----------------------------------------------------------------------------------------------------
# The dynamic section as the loader left it in memory (System V gABI, chapter 5; glibc's <link.h> and <elf.h>).


class _SymbolInfo(ctypes.Structure):
    """Dl_info"""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class _LinkMap(ctypes.Structure):
    """struct link_map: one loaded library."""


_LinkMap._fields_ = (
    ("base", ctypes.c_size_t),
    ("file", ctypes.c_char_p),
    ("dynamic", ctypes.c_size_t),
    ("next", ctypes.POINTER(_LinkMap)),
)

_RTLD_DI_LINKMAP = 2
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_JMPREL = 2, 5, 6, 7, 8, 23
_SLOT_TYPES = {"x86_64": (6, 7), "aarch64": (1025, 1026)}  # GLOB_DAT, JUMP_SLOT


def _import_slots() -> list[tuple[str, int]]:
    """Symbol and address of every import slot of `_GEMMS` in libmlx.so; empty when it imports none of them."""
    types = _SLOT_TYPES.get(os.uname().machine, ())
    library = _loaded("libmlx.so")
    if library is None:
        return []
    entries = dict(_dynamic_entries(library.dynamic))
    # glibc has already turned these offsets into addresses, other loaders leave them relative
    at = {tag: value + library.base * (value < library.base) for tag, value in entries.items()}
    slots = []
    for table, size in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ)):
        relocations = ctypes.string_at(at[table], entries[size]) if table in at else b""
        for offset, info, _ in struct.iter_unpack("<QQq", relocations):
            if info & 0xFFFFFFFF in types:
                symbol = ctypes.c_uint32.from_address(at[_DT_SYMTAB] + 24 * (info >> 32)).value
                name = ctypes.string_at(at[_DT_STRTAB] + symbol).decode()
                if name in _GEMMS:
                    slots.append((name, library.base + offset))
    return slots


def _loaded(file_name: str) -> _LinkMap | None:
    """The loader's record of a library in this process."""
    program = ctypes.CDLL(None)
    link = ctypes.POINTER(_LinkMap)()
    if program.dlinfo(ctypes.c_void_p(program._handle), _RTLD_DI_LINKMAP, ctypes.byref(link)):
        return None
    while link:
        if os.path.basename(os.fsdecode(link.contents.file or b"")) == file_name:
            return link.contents
        link = link.contents.next
    return None


def _dynamic_entries(address: int) -> Iterator[tuple[int, int]]:
    while True:
        tag, value = struct.unpack("<QQ", ctypes.string_at(address, 16))
        if tag == 0:
            return
        yield tag, value
        address += 16


def _read(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


def _write(address: int, value: int) -> None:
    """Store one pointer; a page that the loader made read-only (RELRO) is opened for the moment."""
    page, writable = address & -mmap.PAGESIZE, _is_writable(address)
    if not writable:
        _protect(page, mmap.PROT_READ | mmap.PROT_WRITE)
    ctypes.c_size_t.from_address(address).value = value
    if not writable:
        _protect(page, mmap.PROT_READ)


def _protect(page: int, protection: int) -> None:
    program = ctypes.CDLL(None, use_errno=True)
    if program.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), protection):
        raise OSError(ctypes.get_errno(), "mprotect")


def _is_writable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, permissions = line.split(maxsplit=2)[:2]
        start, end = (int(bound, 16) for bound in area.split("-"))
        if start <= address < end:
            return "w" in permissions
    return False


# ---- Attention and activations -------------------------------------------------------------------------------
# MLX's exp, softmax, sigmoid and tanh are scalar code on Linux: 16 to 25 ns an element. mx.power takes 8, NumPy's exp
# 2, which is vectorised and closer to the exact value (2e-7 against 2e-6). So prefill evaluates the scores, lets NumPy
# work on MLX's own memory (a documented use of the buffer protocol) and goes on: a graph cut of 0.1 ms a layer, GIL
# released. A decode step stays lazy, with mx.power: a cut there would undo the overlap of mx.async_eval and hold each
# token back by one step. What helps both: the heads of a group share one product, so K and V are read once.
#
# SmolLM2-135M, float32, 1,500 tokens, OpenBLAS with one thread, two CPUs of which one was busy, medians of three
# interleaved runs, tokens per second, stock against this: chunks of 128 105 / 165, of 256 101 / 181, of 512 92 / 194.

_stock_attention = mx.fast.scaled_dot_product_attention
_stock_silu = nn.silu
_stock_gelu_approx = nn.gelu_approx

_BLOCK = 64  # query rows at a time: the scores stay in the CPU's cache, and keys that causality hides are skipped
_HIDDEN = float(np.finfo(np.float32).min)  # what the stock function gives a score that a boolean mask hides


def _install_fast_math() -> None:
    """mlx-lm's model modules import their attention and swiglu by name, but those look these up at every call."""
    mx.fast.scaled_dot_product_attention = attention
    nn.silu = silu
    nn.SiLU.__call__ = lambda _, x: silu(x)
    nn.gelu_approx = gelu_approx


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    **others: Any,
) -> mx.array:
    """softmax(queries @ keys.T * scale + mask) @ values, as `mx.fast.scaled_dot_product_attention`.

    queries (B, heads, L, D), keys (B, groups, K, D), values (B, groups, K, V), all float32, to (B, heads, L, V).
    Anything else goes to the stock function.
    """
    if not _can_attend(queries, keys, values, mask) or any(other is not None for other in others.values()):
        return _stock_attention(queries, keys, values, scale=scale, mask=mask, **others)
    batch, heads, length, width = queries.shape
    groups = keys.shape[1]
    grouped = (queries * scale).reshape(batch, groups, heads // groups, length, width)
    if isinstance(mask, mx.array):
        mask = _grouped_mask(mask, groups, heads)
    attend = _attend_one if length == 1 else _attend_many
    return attend(grouped, keys, values, mask).reshape(batch, heads, length, -1)


def _can_attend(queries: mx.array, keys: mx.array, values: mx.array, mask: str | mx.array | None) -> bool:
    if any(array.dtype != mx.float32 or array.ndim != 4 for array in (queries, keys, values)):
        return False
    heads, groups = queries.shape[1], keys.shape[1]
    if heads % groups:
        return False
    if isinstance(mask, mx.array):
        return mask.dtype in (mx.bool_, mx.float32) and (mask.ndim < 3 or mask.shape[-3] in (1, heads))
    return mask is None or (mask == "causal" and queries.shape[2] <= keys.shape[2])


def _grouped_mask(mask: mx.array, groups: int, heads: int) -> mx.array:
    """A mask that broadcasts over (B, heads, L, K), as one over (B, groups, heads of a group, L, K)."""
    batch, num_heads, length, num_keys = (1,) * (4 - mask.ndim) + mask.shape
    split = (groups, heads // groups) if num_heads == heads else (1, 1)
    return mask.reshape(batch, *split, length, num_keys)


def _attend_one(grouped: mx.array, keys: mx.array, values: mx.array, mask: str | mx.array | None) -> mx.array:
    """One query a head, the whole of K: causality hides nothing. Lazy."""
    scores = grouped.squeeze(3) @ keys.swapaxes(-1, -2)
    if isinstance(mask, mx.array):
        hidden = mask.squeeze(3)
        scores = scores + (mx.logical_not(hidden) * _HIDDEN if hidden.dtype == mx.bool_ else hidden)
    weights = mx.power(math.e, scores - mx.max(scores, axis=-1, keepdims=True))
    return (weights @ values) / mx.sum(weights, axis=-1, keepdims=True)


def _attend_many(grouped: mx.array, keys: mx.array, values: mx.array, mask: str | mx.array | None) -> mx.array:
    batch, groups, shared, length, width = grouped.shape
    num_keys = keys.shape[2]
    transposed = keys.swapaxes(-1, -2)
    array = np.asarray(mask) if isinstance(mask, mx.array) else None
    blocks: list[mx.array] = []
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        seen = num_keys - length + stop if mask == "causal" else num_keys
        scores = grouped[..., start:stop, :].reshape(batch, groups, -1, width) @ transposed[..., :seen]
        mx.eval(scores, blocks)
        weights = np.asarray(scores).reshape(batch, groups, shared, stop - start, seen)
        if array is not None:
            _hide(weights, array[..., start:stop, :] if array.shape[-2] == length else array)
        elif mask is not None:
            weights[..., seen - stop + start :] += _future(stop - start)
        total = _exponentiate(weights)
        mixed = (scores @ values[..., :seen, :]).reshape(*weights.shape[:-1], values.shape[-1])
        blocks.append(mixed / mx.array(total))
    return mx.concatenate(blocks, axis=3)


def _hide(scores: np.ndarray, mask: np.ndarray) -> None:
    if mask.dtype == np.bool_:
        np.copyto(scores, np.float32(_HIDDEN), where=~mask)
    else:
        scores += mask


def _exponentiate(scores: np.ndarray) -> np.ndarray:
    """Turn scores into exp(score - the row's greatest), in place; the sums of the rows."""
    with np.errstate(all="ignore"):  # a row of -inf becomes NaN without a word, as in MLX
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
    return np.asarray(scores.sum(axis=-1, keepdims=True))


@cache
def _future(length: int) -> np.ndarray:
    """(length, length): -inf above the diagonal, else 0."""
    return np.triu(np.full((length, length), -np.inf, dtype=np.float32), k=1)


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x), any shape."""
    if x.dtype != mx.float32 or x.ndim < 2:
        return _stock_silu(x)
    return _gated(x, -x)


def gelu_approx(x: mx.array) -> mx.array:
    """x * (1 + tanh(u)) / 2 = x * sigmoid(2 u) with u = sqrt(2 / pi) * (x + 0.044715 * x^3), as `nn.gelu_approx`."""
    if x.dtype != mx.float32 or x.ndim < 2:
        return _stock_gelu_approx(x)
    return _gated(x, x * (1 + 0.044715 * x * x) * -math.sqrt(8 / math.pi))


def _gated(x: mx.array, exponent: mx.array) -> mx.array:
    """x / (1 + exp(exponent)) for x (..., L, width). The caller gives `exponent` away: NumPy overwrites it."""
    if x.shape[-2] == 1:
        return x / (1 + mx.power(math.e, exponent))
    mx.eval(exponent)
    with np.errstate(over="ignore"):  # then the quotient is 0, and rightly so
        array = np.asarray(exponent)
        np.exp(array, out=array)
    return x / (1 + exponent)
