"""A file of named arrays that is opened by mapping it: no pickle, no copy, versioned, checked.

Layout: 8 bytes of magic, the header's length and the header's CRC-32 as little-endian uint64, the
header as JSON, then the arrays, each at a multiple of 64 bytes, little-endian and C-contiguous.
The header names the file's kind and version, the tokenizer it was built for, each array's type,
shape, offset and CRC-32, and whatever its writer adds (corpus, parameters, counts).
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np

from specbench.arrays import Array
from specbench.errors import ArtifactError
from specbench.storage.jsonl import JsonObject

MAGIC = b"SBARRAYS"

_ALIGN = 64
_PREFIX = len(MAGIC) + 16
_MAX_HEADER = 1 << 24

ArraysT = TypeVar("ArraysT", bound=NamedTuple)

_REBUILD = "Delete it: the next run that needs it builds it again, or says what to type."


def write_array_file(
    path: Path,
    *,
    kind: str,
    version: int,
    tokenizer_hash: str,
    arrays: Mapping[str, Array],
    header: Mapping[str, object],
) -> None:
    """Write ``path`` in one go and flush it to disk; the caller makes it appear atomically.

    ``kind``: what the arrays are, e.g. ``frozen_table``; ``version``: of its layout; ``header``:
    further JSON-ready facts, given back by `read_header`.
    """
    sections: dict[str, JsonObject] = {}
    parts: list[Array] = []
    offset = 0
    for name, array in arrays.items():
        part = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        facts = {"dtype": part.dtype.str, "shape": list(part.shape), "offset": offset}
        sections[name] = {**facts, "crc32": zlib.crc32(_flat(part))}
        parts.append(part)
        offset += _padded(part.nbytes)
    full = {**header, "kind": kind, "version": version, "tokenizer_hash": tokenizer_hash}
    text = json.dumps({**full, "sections": sections, "data_bytes": offset}).encode()
    with path.open("wb") as handle:
        numbers = (len(text), zlib.crc32(text))
        handle.write(MAGIC + b"".join(number.to_bytes(8, "little") for number in numbers))
        handle.write(text.ljust(_padded(_PREFIX + len(text)) - _PREFIX, b"\0"))
        for part in parts:
            handle.write(_flat(part))
            handle.write(bytes(_padded(part.nbytes) - part.nbytes))
        handle.flush()
        os.fsync(handle.fileno())


def read_header(path: Path) -> JsonObject:
    """Read the header of an array file, without its arrays.

    Raises:
        ArtifactError: not such a file, or its header is damaged.
    """
    return _read_header(path)[0]


def _read_header(path: Path) -> tuple[JsonObject, int]:
    try:
        with path.open("rb") as handle:
            prefix = handle.read(_PREFIX)
            if prefix[: len(MAGIC)] != MAGIC or len(prefix) < _PREFIX:
                raise ArtifactError(f"{path} is not a table or datastore of this project.")
            length = int.from_bytes(prefix[len(MAGIC) : -8], "little")
            text = handle.read(min(length, _MAX_HEADER))
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error}") from error
    if len(text) != length or zlib.crc32(text) != int.from_bytes(prefix[-8:], "little"):
        raise ArtifactError(f"{path} is damaged or truncated (header). {_REBUILD}")
    header: JsonObject = json.loads(text)
    return header, _padded(_PREFIX + length)


def open_array_file(
    path: Path, *, kind: str, version: int, tokenizer_hash: str | None
) -> tuple[JsonObject, dict[str, Array]]:
    """Read the header and map the arrays by name, read-only and checked.

    Every array's checksum is computed, which also brings the pages into memory, so that the first
    look-up of a timed run does not wait for the disk.

    Raises:
        ArtifactError: kind, version or tokenizer (None takes any) is another one than expected
            (both are named), or the file is damaged.
    """
    header, begin = _read_header(path)
    for key, expected in (("kind", kind), ("version", version), ("tokenizer_hash", tokenizer_hash)):
        if expected not in (None, header.get(key)):
            name = key.replace("_", " ")
            raise ArtifactError(
                f"{path} was built for {name} {header.get(key)!r}, but this run needs {name} "
                f"{expected!r}. Name another file, or leave the key null: the default one is built "
                "or named."
            )
    if path.stat().st_size != begin + header["data_bytes"]:
        raise ArtifactError(f"{path} is damaged or truncated (size). {_REBUILD}")
    with path.open("rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    arrays: dict[str, Array] = {}
    for name, section in header["sections"].items():
        shape, offset = section["shape"], begin + section["offset"]
        flat = np.frombuffer(mapped, section["dtype"], int(np.prod(shape, dtype=np.int64)), offset)
        if zlib.crc32(_flat(flat)) != section["crc32"]:
            raise ArtifactError(f"{path} is damaged ({name!r}). {_REBUILD}")
        arrays[name] = flat.reshape(shape)
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
        return {}

    def write(self, path: Path, *, tokenizer_hash: str, header: Mapping[str, Any]) -> None:
        """Write the table; ``header`` says from what it was built."""
        write_array_file(
            path,
            kind=self.kind,
            version=self.version,
            tokenizer_hash=tokenizer_hash,
            arrays=self.arrays._asdict(),
            header={**header, **self.facts()},
        )


def _flat(array: Array) -> memoryview:
    """View the bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
