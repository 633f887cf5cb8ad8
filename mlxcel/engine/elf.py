"""The import slots of a loaded shared library: found in its dynamic section, read and written.

The layout is that of the dynamic section as the loader left it in memory (System V gABI, chapter 5; glibc's <link.h>
and <elf.h>). It knows nothing of what the functions do. Linux only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Collection, Iterator
from pathlib import Path


class SymbolInfo(ctypes.Structure):
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


def import_slots(file_name: str, symbols: Collection[str]) -> list[tuple[str, int]]:
    """Symbol and address of every import slot of `symbols` in a loaded library; empty when it imports none of them."""
    types = _SLOT_TYPES.get(os.uname().machine, ())
    library = _loaded(file_name)
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
                if name in symbols:
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


def read(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


def write(address: int, value: int) -> None:
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
