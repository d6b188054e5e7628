"""The devices a run computes on, and the lock that keeps other timed jobs away from them."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from runners.job import Job
from runners.run_folder.folder import LockHeld, hold_lock
from specbench.config.schema import DraftConfig, draft_weights
from specbench.errors import OutputRefused
from specbench.models import loading
from specbench.paths import file_name
from specbench.system import interference

log = logging.getLogger(__name__)


def names(job: Job, drafts: Iterable[DraftConfig] = ()) -> list[str]:
    """List the devices of the run and its ``drafts``: ``cpu``, or the UUIDs of its GPUs."""
    import torch

    model = job.config.model
    device = loading.choose_device(model.device)
    indices = set(range(torch.cuda.device_count()))
    if device.type != "cuda" or model.device_map is None:
        others = [torch.device(d.device) for d in drafts if d.device and draft_weights(d, model)]
        # A draft whose device is missing shares the target's.
        indices &= {used.index or 0 for used in (device, *others) if used.type == "cuda"}
    gpus = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in indices]
    return sorted([*gpus, *(["cpu"] if device.type == "cpu" else [])])


@contextlib.contextmanager
def hold_device(job: Job, drafts: Iterable[DraftConfig] = ()) -> Iterator[interference.Gpus | None]:
    """Keep this project's other timed jobs away from the run's devices.

    It takes a lock per machine and device in ``cache_dir``. If another job holds it, this one
    waits: so the jobs of a parallel launcher run one after the other on one device and in
    parallel on several. ``measure.exclusive=false`` takes no lock. ``drafts`` are its labels'
    draft models, which may be on other devices.

    Yields:
        The GPUs in NVML, None without GPUs or NVML.

    Raises:
        OutputRefused: ``cache_dir`` cannot be written.
    """
    devices = names(job, drafts)
    with contextlib.ExitStack() as stack:
        for device in devices if job.config.measure.exclusive else ():
            _hold(stack, Path(job.config.cache_dir) / "locks", device)  # sorted: no deadlock
        gpus = interference.open_gpus([device for device in devices if device.startswith("GPU-")])
        if gpus is not None:
            stack.callback(gpus.close)
        yield gpus


def _hold(stack: contextlib.ExitStack, folder: Path, device: str) -> None:
    # The folder may be shared by machines; their devices are not.
    path = folder / file_name(f"{socket.gethostname()}-{device}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            stack.enter_context(hold_lock(path))
        except LockHeld as holder:
            log.warning(
                "waiting: %s is measuring on %s. Timed jobs never share a device "
                "(measure.exclusive=false does not wait).",
                holder,
                device,
            )
            stack.enter_context(hold_lock(path, wait=True))
    except OSError as error:
        raise OutputRefused(
            f"{path} cannot be written: {error.strerror or error}. Give a folder that can: "
            "cache_dir=DIR (or take no lock: measure.exclusive=false)."
        ) from error
