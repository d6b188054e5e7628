"""Files that stay readable whatever happens to the process or the disk.

A file is either replaced as a whole, or grows by groups of lines that are there completely or can
be recognised as cut off.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

from specbench.errors import ConfigurationError, OutputRefused, SpecBenchError, field_error

# What a file holds before it becomes a typed value.
JsonObject: TypeAlias = dict[str, Any]

T = TypeVar("T")
Line = TypeVar("Line", bound=Mapping[str, object])

PACKED = ".gz"  # of a file that is kept gzipped

BYTE_ORDER_MARK = "\ufeff"  # which editors and concatenated files leave in texts
_LARGEST = 2**63 - 1  # what arrays and tables can hold
_MAYBE_LARGER = re.compile(rb"\d{19}")
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class RecordError(ConfigurationError):
    """A file of a run folder cannot be read as what it should be (file, line, reason)."""


_NOT_A_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)


class DiskError(SpecBenchError):
    """Results cannot be written (disk full, quota, I/O error); what was written stays valid."""


def failure(work: Callable[[], object]) -> Exception | None:
    """Run ``work`` and return the exception it raised, or None.

    Raises:
        DiskError: not the failure of one case; it ends the run.
    """
    try:
        work()
    except DiskError:
        raise
    except Exception as error:
        return error
    return None


def parse_json(data: bytes) -> Any:
    """Read a JSON text as a value that the rest of the program can work with and write again.

    A leading byte-order mark is skipped.

    Raises:
        ValueError: it is not JSON or not UTF-8, holds a number that is not finite, an integer of
            thousands of digits or half a surrogate pair, or is nested too deeply.
    """
    text = data.decode().lstrip(BYTE_ORDER_MARK)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None
    if _MAYBE_SURROGATE.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.start + 1].encode("ascii", "backslashreplace")
            raise ValueError(f"{half.decode()} is half a character (a lone surrogate)") from None
    return value


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise ValueError(f"{text} is too large a number")


def _bounded(text: str) -> int:
    if abs(value := int(text)) <= _LARGEST:
        return value
    raise ValueError(f"{text[:20]}… is too large an integer")


@overload
def read_jsonl(path: Path) -> tuple[list[JsonObject], bool]: ...
@overload
def read_jsonl(path: Path, parse: Callable[[JsonObject], T]) -> tuple[list[T], bool]: ...
def read_jsonl(path: Path, parse: Callable[[JsonObject], Any] = dict) -> tuple[list[Any], bool]:
    """Read the lines of a file, and whether its last line was cut off (and is left out).

    A missing file is read from its gzipped copy (``cases.jsonl.gz``); without that it counts as
    empty. ``parse`` raises a ValueError where a line's object is not what the file holds.

    Raises:
        RecordError: a line before the last one is not such a json object.
    """
    lines = (_content(path) or b"").split(b"\n")
    # A whole file ends in a newline, so whatever follows the last newline was cut off.
    truncated = bool(lines.pop())
    values: list[Any] = []
    for number, line in enumerate(lines, start=1):
        try:
            value = parse_json(line)
            if not isinstance(value, dict):
                raise ValueError("not a json object")
        except ValueError as error:
            if number == len(lines) and not truncated:
                return values, True
            raise damaged(path, number, error) from error
        try:
            if _MAYBE_LARGER.search(line):
                json.loads(line, parse_int=_bounded)
            values.append(parse(value))
        except ValueError as error:
            raise damaged(path, number, field_error(error)) from error
    return values, truncated


def _content(path: Path) -> bytes | None:
    """Read a file, or its gzipped copy where it is missing; None where there is neither."""
    packed = path.with_name(path.name + PACKED)
    if path.exists() or not packed.exists():
        return path.read_bytes() if path.exists() else None
    try:
        return gzip.decompress(packed.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise RecordError(
            f"{packed} is damaged: {error}. Put the file back from where it came."
        ) from error


def damaged(path: Path, number: int, reason: object) -> RecordError:
    """Make the error for a damaged line of a run's file."""
    return RecordError(
        f"{path}, line {number}: {reason}. The file was damaged by something other than an "
        "interrupted run; restore it, or measure again with fresh=true."
    )


def mend_jsonl(
    path: Path,
    parse: Callable[[JsonObject], Line],
    keep: Callable[[Line], bool] = lambda line: True,
) -> list[Line]:
    """Read the lines to keep; remove all others, and one that was cut off, from the file.

    Raises:
        RecordError: a line is not valid in this file; ``parse`` as in `read_jsonl`.
    """
    lines, truncated = read_jsonl(path, parse)
    selected = [line for line in lines if keep(line)]
    if truncated or len(selected) < len(lines):
        rewrite_jsonl(path, selected)
    return selected


def append_jsonl(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    """Add a group of lines to a file, which is made if missing, so that a cut-off is recognised.

    The group goes out in one write and is synced to disk; where the disk refuses, the file is cut
    back to the end of the last whole group.

    Raises:
        DiskError: the disk is full or broken; nothing of the group remains in the file.
    """
    data = "".join(map(_dump_line, lines)).encode()
    with reporting(path), path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if data:
                _write(file.fileno(), data)
        except OSError:
            file.truncate(before)
            raise


def rewrite_jsonl(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    """Replace a file by the given lines, all at once."""
    write_text(path, "".join(map(_dump_line, lines)))


def write_json(path: Path, value: Any) -> None:
    """Replace a json file, all at once."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> JsonObject:
    """Read a json object from a file, or from its gzipped copy where it is missing.

    Raises:
        RecordError: the file is missing or holds something else.
    """
    try:
        content = _content(path)
        value = parse_json(path.read_bytes() if content is None else content)
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise RecordError(f"{path} holds no json object.")
    return value


def write_text(path: Path, text: str) -> None:
    """Replace a file through a temporary one, synced, so that it is never half written."""
    temporary = path.with_name(path.name + ".tmp")
    with reporting(path):
        with temporary.open("wb", buffering=0) as file:
            _write(file.fileno(), text.encode())
        os.replace(temporary, path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` on success and is deleted on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _dump_line(line: Mapping[str, object]) -> str:
    return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _write(fd: int, data: bytes) -> None:
    # A nearly full disk takes part of the data first and refuses only the rest.
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fsync(fd)


@contextlib.contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Translate an OSError on a result file into one of ours that names the file.

    Raises:
        OutputRefused: the path cannot be a file's.
        DiskError: any other failure.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise OutputRefused(
                f"cannot write {path}: {error.strerror}. Name another file or folder."
            ) from error
        raise DiskError(
            f"cannot write {path}: {error.strerror or error}. What was measured so far is kept; "
            "make room and run the same command again to go on from there."
        ) from error
