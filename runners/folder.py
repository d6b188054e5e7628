"""The output folder: whose it is, who may write, and what of it is already done."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from runners.differences import differences
from specbench import durable, records
from specbench.durable import DiskError
from specbench.errors import OutputRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from runners.job import Job
    from specbench.records import CaseRecord

log = logging.getLogger(__name__)

_LOCK = ".lock"
_HOLDER = ".holder.json"


def make_folder(path: Path) -> None:
    """Create the folder.

    Raises:
        OutputRefused: the path cannot be a folder, or may not be written.
        DiskError: the disk is full.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path | str, error: OSError) -> OutputRefused | DiskError:
    """What to tell the user when ``path`` cannot be created or written."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(f"cannot write {path}: {reason}. Make room and run the command again.")
    return OutputRefused(
        f"output_dir={path} cannot be used: {reason}. Give a folder that can be created and "
        "written: output_dir=DIR."
    )


def fresh_folder(path: Path) -> Path:
    """``path`` where nothing was measured yet, else the first free of ``path-2``, ``path-3`` …."""
    candidate, number = path, 2
    while (candidate / records.MANIFEST).exists() or (candidate / records.CASES).exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def is_complete(path: Path) -> bool:
    """Whether everything of the folder's run was measured."""
    return (path / records.DONE).exists()


def check_owner(path: Path, run_key: str, identity: Mapping[str, Any]) -> None:
    """Refuse a folder that holds another configuration's run.

    Args:
        path: the folder; it need not exist.
        run_key: this run's.
        identity: the part of the configuration that ``run_key`` is the hash of, and ``shard``.

    Raises:
        OutputRefused: the folder belongs to another run; names the keys that differ.
    """
    manifest_path = path / records.MANIFEST
    if not manifest_path.exists():
        if (path / records.CASES).exists():
            raise OutputRefused(
                f"{path} holds {records.CASES} but no {records.MANIFEST}, so it cannot be told "
                "which run it belongs to. Give another output_dir, or fresh=true."
            )
        return
    manifest = durable.read_json(manifest_path)
    theirs = manifest.get("identity", {})
    if manifest.get("run_key") == run_key and theirs.get("shard") == identity.get("shard"):
        return
    differing = differences(theirs, identity)
    raise OutputRefused(
        f"{path} belongs to a run with another configuration. Differing keys:\n"
        + "\n".join(differing)
        + "\nGive another output_dir, or fresh=true to measure into a new folder beside it."
    )


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the folder's lock.

    Raises:
        OutputRefused: another process holds it; names its pid and host.
    """
    lock = FileLock(path / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise OutputRefused(
            f"{path} is being written by {_holder(path)}. Wait for it, end it, or give another "
            "output_dir."
        ) from None
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        holder = {"pid": os.getpid(), "parent": os.getppid(), "host": socket.gethostname()}
        durable.write_json(path / _HOLDER, holder)
        yield
    finally:
        with contextlib.suppress(OSError):
            (path / _HOLDER).unlink()
        lock.release()


def _holder(path: Path) -> str:
    try:
        holder = json.loads((path / _HOLDER).read_text())
        return f"process {holder['parent']} (child {holder['pid']}) on host {holder['host']}"
    except (OSError, ValueError, KeyError):
        return "another process that has just started"


class ResultFiles:
    """The growing files of a run, opened under the lock; whole blocks only.

    Attributes:
        done: records of the complete blocks, in the order they were written.
        redone: number of blocks that were found incomplete and dropped.
    """

    def __init__(self, job: Job) -> None:
        self._folder = job.folder
        self.done, self.redone = self._keep_complete_blocks(job)
        self._cases = durable.JsonlWriter(job.folder / records.CASES)
        self._errors = durable.JsonlWriter(job.folder / records.ERRORS)
        self._steps = durable.JsonlWriter(job.folder / records.STEPS_LOG)

    def _keep_complete_blocks(self, job: Job) -> tuple[list[CaseRecord], int]:
        folder = self._folder
        found, truncated = records.read_records(folder / records.CASES)
        present = {record.key for record in found}
        complete = {
            (block.repeat, block.case.case_id)
            for block in job.blocks()
            if block.keys(job.labels) <= present
        }
        started = {(record.repeat, record.case_id) for record in found}
        incomplete = started - complete
        redone = max(len(incomplete), int(truncated))
        if redone:
            log.info(
                "%s: the last run was cut off in the middle of a case%s; %d incomplete block%s "
                "dropped and measured again",
                folder / records.CASES,
                " (truncated line)" if truncated else "",
                redone,
                "s are" if redone > 1 else " is",
            )
        kept = [record for record in found if (record.repeat, record.case_id) in complete]
        if redone:
            durable.rewrite_jsonl(folder / records.CASES, (r.to_json() for r in kept))
        # These two are written before the block's records, so they may run ahead of them.
        for name in (records.ERRORS, records.STEPS_LOG):
            lines, cut = durable.read_jsonl(folder / name)
            keep = [line for line in lines if (line["repeat"], line["case_id"]) in complete]
            if cut or len(keep) < len(lines):
                durable.rewrite_jsonl(folder / name, keep)
        return kept, redone

    def append(
        self,
        block: list[CaseRecord],
        errors: list[dict[str, Any]],
        steps: list[records.StepTrace],
    ) -> None:
        """Write a finished block; its records go last, as one write, and make it count.

        Raises:
            DiskError: the disk is full or broken; the block is then redone on resume.
        """
        self._steps.append(trace.to_json() for trace in steps)
        self._errors.append(errors)
        self._cases.append(record.to_json() for record in block)
        self.done.extend(block)

    def finish(self, summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Write the closing files; ``DONE`` last."""
        folder = self._folder
        self.close()
        traces, _ = durable.read_jsonl(folder / records.STEPS_LOG)
        records.write_steps(folder / records.STEPS, traces)
        durable.write_json(folder / records.SUMMARY, summary)
        durable.write_json(folder / records.MANIFEST, manifest)
        durable.write_text(folder / records.DONE, "")
        (folder / records.STEPS_LOG).unlink()

    def close(self) -> None:
        """Close the growing files."""
        for writer in (self._cases, self._errors, self._steps):
            writer.close()
