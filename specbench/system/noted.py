"""What files keep of a machine: its parts, its state while a turn ran. Free of torch."""

from __future__ import annotations

from typing import NotRequired, TypeAlias

from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on only

CudaSettings: TypeAlias = dict[str, bool | int | str | None]


class GpuState(TypedDict, total=False):
    """What a GPU was doing; None: it does not report that.

    Attributes:
        throttle: names of the reasons in force (idling is none).
        other_processes: compute processes besides this one.
    """

    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle: list[str] | None
    other_processes: int | None


class Gpu(TypedDict):
    """An NVIDIA GPU."""

    name: str
    memory_gib: NotRequired[int]
    driver: NotRequired[str]


class Hardware(TypedDict, total=False):
    """A machine; files of other programs know less of theirs.

    Attributes:
        cache_bytes: of the last caches before the memory, of all CPUs that a process may run on.
    """

    cpu: str | None
    cpus: int | None
    cores: int | None
    cpus_usable: int
    pinned_to: str
    governor: str | None
    threads_set: dict[str, str]
    memory_gib: int
    cache_bytes: int | None
    gpus: list[Gpu]
    cuda_visible_devices: str | None
    system: str


class GitState(TypedDict, total=False):
    """The code of a run.

    Attributes:
        commit: None before the first one.
        dirty: code or configuration differs from it, new files included; ``changes``: where it
            does, a hash of the differences.
    """

    commit: str | None
    dirty: bool
    changes: str


class Machine(TypedDict):
    """Where a run takes place; stable within it."""

    hardware: Hardware
    versions: dict[str, str]
    git: GitState | None
    code: str | None
    cuda_settings: CudaSettings
