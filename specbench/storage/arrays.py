"""A file of named arrays that is opened by mapping it: no pickle, no copy, versioned, checked.

Layout: 8 bytes of magic, the header's length and the header's CRC-32 as little-endian uint64, the
header as JSON, then the arrays, each at a multiple of 64 bytes, little-endian and C-contiguous.
The header names the file's kind and version, the tokenizer it was built for, each array's type,
shape, place and CRC-32, and whatever its writer adds (corpus, parameters, counts).
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypedDict, TypeVar

import numpy as np

from specbench.arrays import Array
from specbench.errors import ArtifactError
from specbench.storage.jsonl import JsonObject

MAGIC = b"SBARRAYS"

_ALIGN = 64
_PREFIX = len(MAGIC) + 16
_MAX_HEADER = 1 << 24
_BLOCK = 1 << 24

ArraysT = TypeVar("ArraysT", bound=NamedTuple)

_REBUILD = "Delete it: the next run that needs it builds it again, or says what to type."


class _Section(TypedDict):
    dtype: str
    shape: list[int]
    offset: int
    crc32: int


def write_array_file(
    path: Path,
    *,
    kind: str,
    version: int,
    tokenizer_hash: str,
    arrays: Mapping[str, Array],
    header: Mapping[str, object],
) -> None:
    """Write ``path`` in one go and flush it to disk; whoever calls makes it appear atomically.

    Args:
        path: an existing file is overwritten.
        kind: what the arrays are, e.g. ``frozen_table``.
        version: of the kind's layout.
        tokenizer_hash: what the token ids in it belong to.
        arrays: by name; memory maps are copied block by block.
        header: further JSON-ready facts, given back by `read_header`.
    """
    sections: dict[str, _Section] = {}
    plain = {  # little-endian
        name: np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        for name, array in arrays.items()
    }
    offset = 0
    for name, array in plain.items():
        sections[name] = {
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "offset": offset,
            "crc32": _crc32(array),
        }
        offset += -(-array.nbytes // _ALIGN) * _ALIGN
    full = {**header, "kind": kind, "version": version, "tokenizer_hash": tokenizer_hash}
    text = json.dumps({**full, "sections": sections, "data_bytes": offset}).encode()
    with path.open("wb") as handle:
        handle.write(MAGIC)
        handle.write(len(text).to_bytes(8, "little"))
        handle.write(zlib.crc32(text).to_bytes(8, "little"))
        handle.write(text)
        base = _data_offset(len(text))
        for name, array in plain.items():
            _pad_to(handle, base + sections[name]["offset"])
            for block in _blocks(array):
                handle.write(block)
        _pad_to(handle, base + offset)
        handle.flush()
        os.fsync(handle.fileno())


def read_header(path: Path) -> JsonObject:
    """The header of an array file, without its arrays.

    Raises:
        ArtifactError: not such a file, or its header is damaged.
    """
    try:
        with path.open("rb") as handle:
            prefix = handle.read(_PREFIX)
            if prefix[: len(MAGIC)] != MAGIC or len(prefix) < _PREFIX:
                raise ArtifactError(f"{path} is not a table or datastore of this project.")
            length = int.from_bytes(prefix[len(MAGIC) : len(MAGIC) + 8], "little")
            checksum = int.from_bytes(prefix[len(MAGIC) + 8 :], "little")
            text = handle.read(length) if length <= _MAX_HEADER else b""
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error}") from error
    if len(text) != length or zlib.crc32(text) != checksum:
        raise ArtifactError(f"{path} is truncated or damaged in its header. {_REBUILD}")
    header: JsonObject = json.loads(text)
    return header


def open_array_file(
    path: Path, *, kind: str, version: int, tokenizer_hash: str | None
) -> tuple[JsonObject, dict[str, Array]]:
    """The header, and by name the arrays of ``path``, mapped read-only and checked.

    Every array's checksum is computed, which also brings the pages into memory, so that the first
    look-up of a timed run does not wait for the disk.

    Raises:
        ArtifactError: kind, version or tokenizer (None takes any) is another one than expected
            (both are named), or the file is damaged.
    """
    header = read_header(path)
    for key, expected in (("kind", kind), ("version", version), ("tokenizer_hash", tokenizer_hash)):
        found = header.get(key)
        if expected is not None and found != expected:
            what = key.replace("_", " ")
            raise ArtifactError(
                f"{path} was built for {what} {found!r}, but this run needs {what} {expected!r}. "
                "Name another file, or leave the key null: the default one is built or named."
            )
    with path.open("rb") as handle:
        handle.seek(len(MAGIC))
        length = int.from_bytes(handle.read(8), "little")
        size = os.fstat(handle.fileno()).st_size
        base = _data_offset(length)
        if size != base + header["data_bytes"]:
            raise ArtifactError(
                f"{path} has {size} bytes instead of {base + header['data_bytes']}: it is "
                f"truncated. {_REBUILD}"
            )
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    arrays: dict[str, Array] = {}
    for name, section in header["sections"].items():
        shape = tuple(section["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(
            mapped, dtype=section["dtype"], count=count, offset=base + section["offset"]
        ).reshape(shape)
        if _crc32(array) != section["crc32"]:
            raise ArtifactError(f"{path} is damaged (checksum of {name!r}). {_REBUILD}")
        arrays[name] = array
    return header, arrays


class ArrayTable(Generic[ArraysT]):
    """A read-only table of a few arrays, in memory or mapped from its file.

    Args:
        arrays: a named tuple, which compiled code works on; writing to them is forbidden, so that
            compiled code sees one type, mapped or not.
        header: facts about the table: corpus, parameters, counts, tokenizer hash.
    """

    kind: ClassVar[str]
    version: ClassVar[int]
    layout: ClassVar[Any]  # the named tuple's class

    def __init__(self, arrays: ArraysT, header: Mapping[str, Any] | None = None) -> None:
        for array in arrays:
            array.flags.writeable = False
        self.arrays = arrays
        self.header = dict(header or {})

    @classmethod
    def open(cls, path: Path, tokenizer_hash: str | None = None) -> Self:
        """Map a table from its file, with the arguments and errors of `open_array_file`."""
        header, arrays = open_array_file(
            path, kind=cls.kind, version=cls.version, tokenizer_hash=tokenizer_hash
        )
        if set(arrays) != set(cls.layout._fields):
            raise ArtifactError(f"{path} lacks an array or has one too many: {sorted(arrays)}")
        return cls(cls.layout(**arrays), header)

    def facts(self) -> dict[str, Any]:
        """What the table says of itself in its file's header."""
        return {}

    def write(self, path: Path, *, tokenizer_hash: str, header: Mapping[str, Any]) -> None:
        """Write the table to ``path``; ``header`` says from what it was built."""
        write_array_file(
            path,
            kind=self.kind,
            version=self.version,
            tokenizer_hash=tokenizer_hash,
            arrays=self.arrays._asdict(),
            header={**header, **self.facts()},
        )


def _blocks(array: Array) -> list[memoryview]:
    if array.size == 0:
        return []
    flat = array.reshape(-1).view(np.uint8)
    return [flat[i : i + _BLOCK].data for i in range(0, len(flat), _BLOCK)]


def _crc32(array: Array) -> int:
    checksum = 0
    for block in _blocks(array):
        checksum = zlib.crc32(block, checksum)
    return checksum


def _data_offset(header_length: int) -> int:
    return -(-(_PREFIX + header_length) // _ALIGN) * _ALIGN


def _pad_to(handle: Any, position: int) -> None:
    handle.write(b"\0" * (position - handle.tell()))
