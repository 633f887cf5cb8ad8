"""The container's bytes become metadata and tensors, or one GGUFError that says what is wrong with them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type

from mlxcel.engine.gguf_file import GGUFError, read_gguf


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(key: str, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def tensor_info(name: str, dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(entries: list[bytes], tensors: list[bytes], version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries + tensors)


@pytest.fixture
def parse(tmp_path):
    def parse_bytes(content: bytes):
        (tmp_path / "m.gguf").write_bytes(content)
        return read_gguf(tmp_path / "m.gguf")

    return parse_bytes


@pytest.mark.parametrize(
    ("kind", "payload", "value"),
    [
        (Type.UINT8, b"\xff", 255),
        (Type.INT8, b"\xff", -1),
        (Type.UINT16, struct.pack("<H", 65535), 65535),
        (Type.INT16, struct.pack("<h", -2), -2),
        (Type.UINT32, struct.pack("<I", 1 << 31), 1 << 31),
        (Type.INT32, struct.pack("<i", -3), -3),
        (Type.FLOAT32, struct.pack("<f", 0.5), 0.5),
        (Type.BOOL, b"\1", True),
        (Type.STRING, string("naïve"), "naïve"),
        (Type.UINT64, struct.pack("<Q", 1 << 63), 1 << 63),
        (Type.INT64, struct.pack("<q", -4), -4),
        (Type.FLOAT64, struct.pack("<d", 1e300), 1e300),
        (Type.ARRAY, struct.pack("<IQ3i", Type.INT32, 3, 1, -2, 3), [1, -2, 3]),
        (Type.ARRAY, struct.pack("<IQ", Type.STRING, 2) + string("a") + string(""), ["a", ""]),
        (Type.ARRAY, struct.pack("<IQ2B", Type.BOOL, 2, 1, 0), [True, False]),
        (Type.ARRAY, struct.pack("<IQ", Type.FLOAT32, 0), []),
    ],
)
def test_each_metadata_type_is_read_as_the_python_value_it_is(parse, kind, payload, value):
    read = parse(header([entry("k", kind, payload)], [])).metadata["k"]
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize("alignment", [None, 64])
def test_tensor_data_starts_at_the_alignment_after_the_header(parse, alignment):
    entries = [] if alignment is None else [entry("general.alignment", Type.UINT32, struct.pack("<I", alignment))]
    head = header(entries, [tensor_info("a", (2, 3), Kind.F32, 0), tensor_info("b", (32, 1), Kind.Q8_0, 64)])
    head += b"\0" * (-len(head) % (alignment or 32))
    values = np.arange(6, dtype="<f4")
    file = parse(head + values.tobytes().ljust(64, b"\0") + bytes(range(34)))
    a, b = file.tensors["a"], file.tensors["b"]
    assert a.shape == (3, 2) and np.array_equal(a.data.view("<f4"), values.reshape(3, 2))
    assert b.shape == (1, 32) and b.data.tolist() == [list(range(34))]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (header([], [], version=1), "GGUF version 1 is not supported"),
        (header([], [], version=0x03000000), "a big-endian GGUF file"),
        (header([entry("k", Type.BOOL, b"\0")] * 2, []), "metadata key k is there twice"),
        (header([entry("k", 13, b"\0" * 8)], []), "a metadata value is of type 13"),
        (header([entry("k", Type.ARRAY, struct.pack("<IQ", Type.ARRAY, 1))], []), "a metadata value is of type 9"),
        (header([entry("k", Type.STRING, struct.pack("<Q", 1) + b"\xff")], []), "not UTF-8"),
        (header([entry("split.count", Type.UINT16, b"\3\0")], []), "one part of a split model"),
        (header([entry("general.alignment", Type.UINT32, b"\0" * 4)], []), "general.alignment is not"),
        (header([], [tensor_info("t", (32,), Kind.Q8_0)] * 2) + b"\0" * 99, "two tensors have the same name"),
        (header([], [tensor_info("t", (32,), 255)]) + b"\0" * 99, "tensor t is of type 255"),
        (header([], [tensor_info("t", (0,), Kind.F32)]) + b"\0" * 99, r"tensor t has the shape \(0,\)"),
        (header([], [tensor_info("t", (31,), Kind.Q8_0)]) + b"\0" * 99, r"tensor t has the shape \(31,\)"),
        (header([], [tensor_info("t", (), Kind.F32)]) + b"\0" * 99, "tensor t has 0 dimensions"),
        (header([], [tensor_info("t", (1,) * 5, Kind.F32)]) + b"\0" * 99, "tensor t has 5 dimensions"),
        (header([], [tensor_info("t", (1 << 62,) * 4, Kind.F32)]) + b"\0" * 99, r"\(truncated\)"),
        (header([], [tensor_info("t", (1,), Kind.F32, 1 << 63)]) + b"\0" * 99, r"\(truncated\)"),
    ],
)
def test_what_cannot_be_right_is_said(parse, content, cause):
    with pytest.raises(GGUFError, match=cause):
        parse(content)


@pytest.mark.parametrize("kind", [Type.UINT8, Type.STRING, Type.FLOAT64])
@pytest.mark.parametrize("count", [2, 1 << 32, (1 << 64) - 1])
def test_a_count_beyond_the_file_is_refused_without_following_it(parse, kind, count):
    array = entry("k", Type.ARRAY, struct.pack("<IQ", kind, count))
    for content in (header([array], []), b"GGUF" + struct.pack("<IQQ", 3, count, 0)):
        with pytest.raises(GGUFError, match="ends inside its header"):
            parse(content)
