"""Types of a machine's description in files: its parts, its state in a turn. Free of torch."""

from __future__ import annotations

from typing import NotRequired, TypeAlias

from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on only

CudaSettings: TypeAlias = dict[str, bool | int | str | None]


class GpuState(TypedDict, total=False):
    """State of a GPU; None: it does not report that."""

    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle: list[str] | None  # reasons in force; idling is none
    other_processes: int | None  # that compute, without this one


class Gpu(TypedDict):
    """An NVIDIA GPU."""

    name: str
    memory_gib: NotRequired[int]
    driver: NotRequired[str]


class Hardware(TypedDict, total=False):
    """A machine; files of other programs know less of theirs."""

    cpu: str | None
    cpus: int | None
    cores: int | None
    cpus_usable: int
    pinned_to: str
    governor: str | None
    threads_set: dict[str, str]
    memory_gib: int
    cache_bytes: int | None  # of the last caches, of all CPUs that a process may run on
    gpus: list[Gpu]
    cuda_visible_devices: str | None
    system: str


class GitState(TypedDict, total=False):
    """The code of a run."""

    commit: str | None  # None before the first one
    dirty: bool  # code or configuration differs from it, new files included
    changes: str  # where it does, a hash of the differences


class Machine(TypedDict):
    """The machine, packages and code of a run; constant within it."""

    hardware: Hardware
    versions: dict[str, str]
    git: GitState | None
    code: str | None
    cuda_settings: CudaSettings
