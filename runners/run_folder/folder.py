"""The output folder: its owner, its lock, and whether it is complete."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from runners.run_folder.manifest import config_diff
from specbench.errors import OutputRefused
from specbench.results import records
from specbench.results.manifest import RunManifest
from specbench.storage import jsonl
from specbench.storage.jsonl import DiskError

# A job that waits for a device polls rarely in order not to disturb the one that measures.
_LOOK_EVERY_S = 1.0


def make_folder(path: Path, key: str = "output_dir") -> None:
    """Create the folder that ``key`` names.

    Raises:
        OutputRefused: the path cannot be a folder, or may not be written.
        DiskError: the disk is full.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if key == "output_dir":  # a filled cache need not be writable
            probe = path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
    except OSError as error:
        raise unwritable(path, error, key) from error


def unwritable(
    path: Path | str, error: OSError, key: str = "output_dir"
) -> OutputRefused | DiskError:
    """Make the error of a ``path`` that cannot be created or written."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(f"cannot write {path}: {reason}. Make room and run the command again.")
    if error.errno == errno.ENAMETOOLONG:
        return OutputRefused(
            f"{path} is too long a path. Type a shorter one: the folder or file, or method.label."
        )
    return OutputRefused(
        f"{key}={path} cannot be used: {reason}. Give a folder that can be created and written: "
        f"{key}=DIR."
    )


def fresh_folder(path: Path) -> Path:
    """Return ``path`` if nothing was measured there, or the first free ``path-2``, ``path-3`` …."""
    candidate, number = path, 2
    while (candidate / records.MANIFEST).exists() or (candidate / records.CASES).exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def is_complete(path: Path) -> bool:
    """Return whether the folder's run is complete."""
    return (path / records.DONE).exists()


def check_owner(path: Path, run_key: str, identity: Mapping[str, Any]) -> None:
    """Refuse a folder that holds another configuration's run; it need not exist.

    ``identity`` is the part of the configuration that ``run_key`` is the hash of, and ``shard``.

    Raises:
        OutputRefused: the folder belongs to another run; names the keys that differ.
    """
    if not (path / records.MANIFEST).exists():
        if (path / records.CASES).exists():
            raise OutputRefused(
                f"{path} holds {records.CASES} but no {records.MANIFEST}, so it cannot be told "
                "which run it belongs to. Give another output_dir, or fresh=true."
            )
        return
    manifest = RunManifest.read(path)
    theirs = manifest.identity or {}
    if manifest.run_key == run_key and theirs.get("shard") == identity.get("shard"):
        return
    differing = "\n".join(config_diff(theirs, identity))
    raise OutputRefused(
        f"{path} belongs to a run with another configuration. Differing keys:\n{differing}\n"
        "Give another output_dir, or fresh=true to measure into a new folder next to it."
    )


class LockHeld(Exception):
    """Another process holds a lock; the message says which."""


@contextlib.contextmanager
def hold_folder(path: Path) -> Iterator[None]:
    """Hold the folder's lock.

    Raises:
        OutputRefused: another process holds it; names its pid and host.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(path / ".lock"))
        except LockHeld as holder:
            raise OutputRefused(
                f"{path} is being written by {holder}. Wait for it, end it, or give another "
                "output_dir."
            ) from None
        except OSError as error:
            raise unwritable(path, error) from error
        yield


@contextlib.contextmanager
def hold_lock(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file; a file next to it names the holder.

    Raises:
        LockHeld: another process holds it, and this one is not to ``wait``.
        OSError: it cannot be written.
    """
    lock, holder = FileLock(path), path.with_name(f"{path.name}.json")
    try:
        lock.acquire(timeout=-1 if wait else 0, poll_interval=_LOOK_EVERY_S)
    except Timeout:
        who = "another process that has just started"
        with contextlib.suppress(OSError, ValueError, KeyError):
            held = json.loads(holder.read_text())
            who = f"process {held['parent']} (child {held['pid']}) on host {held['host']}"
        raise LockHeld(who) from None
    process = {"pid": os.getpid(), "parent": os.getppid(), "host": socket.gethostname()}
    try:
        jsonl.write_json(holder, process)
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink()
        lock.release()
