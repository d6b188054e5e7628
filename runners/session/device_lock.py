"""The devices a run computes on, and the lock that keeps other timed jobs away from them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from runners.job import Job
from specbench.config.draft import draft_weights
from specbench.config.schema import DraftConfig
from specbench.errors import OutputRefused
from specbench.models import loading
from specbench.paths import file_name
from specbench.storage import jsonl
from specbench.system import interference

log = logging.getLogger(__name__)

_LOCKS = "locks"
# A waiting job looks so seldom in order not to disturb the one that measures.
_LOOK_EVERY_S = 1.0


def names(job: Job, drafts: Iterable[DraftConfig] = ()) -> list[str]:
    """What the run computes on, its ``drafts`` too: ``cpu``, or the UUIDs of its GPUs."""
    import torch

    model = job.config.model
    device = loading.choose_device(model.device)
    if device.type == "cuda" and model.device_map is not None:
        indices = set(range(torch.cuda.device_count()))
    else:
        apart = [draft for draft in drafts if draft.device and draft_weights(draft, model)]
        own = [torch.device(str(draft.device)) for draft in apart]
        named = {each.index or 0 for each in (device, *own) if each.type == "cuda"}
        # A draft whose device is not there shares the target's.
        indices = named & set(range(torch.cuda.device_count()))
    gpus = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in indices]
    return sorted([*gpus, *(["cpu"] if device.type == "cpu" else [])])


@contextlib.contextmanager
def hold_device(job: Job, drafts: Iterable[DraftConfig] = ()) -> Iterator[interference.Gpus | None]:
    """Have the run's devices for oneself, as far as this project's timed jobs go.

    A lock per machine and device in ``cache_dir``. Where another job holds it, this one waits:
    so the jobs of a parallel launcher come one after the other on one device and side by side on
    several. ``measure.exclusive=false`` takes no lock. ``drafts`` are its labels' draft models,
    which may be on devices of their own.

    Yields:
        The GPUs in NVML, None where there are none or it cannot be asked.

    Raises:
        OutputRefused: ``cache_dir`` cannot be written.
    """
    devices = names(job, drafts)
    with contextlib.ExitStack() as stack:
        if job.config.measure.exclusive:
            folder = Path(job.config.cache_dir) / _LOCKS
            for device in devices:  # sorted, so that two jobs never wait for each other
                stack.enter_context(_lock(folder, device))
        gpus = interference.open_gpus([device for device in devices if device.startswith("GPU-")])
        if gpus is not None:
            stack.callback(gpus.close)
        yield gpus


@contextlib.contextmanager
def _lock(folder: Path, device: str) -> Iterator[None]:
    # The folder may be shared by machines; their devices are not.
    name = file_name(f"{socket.gethostname()}-{device}")
    path = folder / f"{name}.lock"
    holder = path.with_suffix(".json")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.warning(
                "waiting: %s is measuring on %s. Timed jobs never share a device "
                "(measure.exclusive=false does not wait).",
                _who(holder),
                device,
            )
            lock.acquire(poll_interval=_LOOK_EVERY_S)
    except OSError as error:
        raise OutputRefused(
            f"{path} cannot be written: {error.strerror or error}. Give a folder that can: "
            "cache_dir=DIR (or take no lock: measure.exclusive=false)."
        ) from error
    try:
        jsonl.write_json(holder, {"pid": os.getpid(), "host": socket.gethostname()})
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink()
        lock.release()


def _who(holder: Path) -> str:
    try:
        found = json.loads(holder.read_text())
        return f"process {found['pid']}"
    except (OSError, ValueError, KeyError):
        return "another process"
