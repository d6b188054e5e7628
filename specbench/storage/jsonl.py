"""Files that stay readable whatever happens to the process or the disk.

A file is either replaced as a whole, or grows by groups of lines that are there completely or can
be recognised as cut off.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from specbench.errors import ConfigurationError, SpecBenchError

# What a file holds before it becomes a typed value.
JsonObject: TypeAlias = dict[str, Any]


class RecordError(ConfigurationError):
    """A file of a run folder cannot be read as what it should be (file, line, reason)."""


class DiskError(SpecBenchError):
    """Results cannot be written (disk full, quota, I/O error); what was written stays valid."""


def read_jsonl(path: Path) -> tuple[list[JsonObject], bool]:
    """The objects of a file and whether its last line was cut off (and is left out).

    Raises:
        RecordError: a line before the last one is not a json object.
    """
    if not path.exists():
        return [], False
    lines = path.read_bytes().split(b"\n")
    # A whole file ends in a newline, so whatever follows the last newline was cut off.
    truncated = bool(lines.pop())
    objects: list[JsonObject] = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("not a json object")
        except ValueError as error:
            if number == len(lines) and not truncated:
                return objects, True
            raise RecordError(
                f"{path}, line {number}: {error}. The file was damaged by something other than an "
                "interrupted run; restore it, or measure again with fresh=true."
            ) from error
        objects.append(value)
    return objects, truncated


def mend_jsonl(
    path: Path, keep: Callable[[JsonObject], bool] = lambda line: True
) -> list[JsonObject]:
    """The objects to keep; a line that was cut off and all others go from the file too."""
    lines, truncated = read_jsonl(path)
    kept = [line for line in lines if keep(line)]
    if truncated or len(kept) < len(lines):
        rewrite_jsonl(path, kept)
    return kept


def append_jsonl(path: Path, lines: Iterable[JsonObject]) -> None:
    """Add a group of lines to a file, which is made if missing, so that a cut-off is recognised.

    The group goes out in one write and is synced to disk; where the disk refuses, the file is cut
    back to the end of the last whole group.

    Raises:
        DiskError: the disk is full or broken; nothing of the group remains in the file.
    """
    data = "".join(_dump_line(line) for line in lines).encode()
    with reporting(path), path.open("ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            if data:
                _write_all(file.fileno(), data)
                os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def rewrite_jsonl(path: Path, lines: Iterable[JsonObject]) -> None:
    """Replace a file by the given lines, all at once."""
    write_text(path, "".join(_dump_line(line) for line in lines))


def write_json(path: Path, value: Any) -> None:
    """Replace a json file, all at once."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> JsonObject:
    """A json object from a file.

    Raises:
        RecordError: the file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise RecordError(f"{path} holds no json object.")
    return value


def write_text(path: Path, text: str) -> None:
    """Replace a file through a temporary one beside it, synced, so that it is never half there."""
    temporary = path.with_name(path.name + ".tmp")
    with reporting(path):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(fd, text.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside ``path``: it takes its place in the end, or goes after a failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _dump_line(line: JsonObject) -> str:
    return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _write_all(fd: int, data: bytes) -> None:
    # A nearly full disk takes part of the data first and refuses only the rest.
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Turn an OSError on a result file into a DiskError that names the file."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"cannot write {path}: {error.strerror or error}. What was measured so far is kept; "
            "make room and run the same command again to go on from there."
        ) from error
