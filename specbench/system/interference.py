"""CPU time lost to others, load, and state and energy of GPUs, read before and after a turn.

GPUs are read through NVML, which needs nvidia-ml-py (the extra ``gpu``) and a driver; without them
every GPU value is None. They are named by UUID, because NVML counts all GPUs of the machine in its
own order, whatever ``CUDA_VISIBLE_DEVICES`` says. torch is not imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from specbench.errors import ConfigurationError
from specbench.system.environment import allowed_cpus
from specbench.system.hardware import GpuState

_PROC = Path("/proc")
# Bits of NVML's clocks throttle reasons; bit 0 (idle) and 1 (clocks set by a user) slow nothing.
_THROTTLE = {
    0x04: "power_cap",
    0x08: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}


@dataclass(frozen=True, slots=True)
class Interference:
    """Interference of other work in a turn; None where the system does not tell.

    Attributes:
        cpu_steal: share of the time of this process's CPUs that the hypervisor gave to other
            machines; ``cpu_others``: that other processes of this machine used.
        cpu_waiting: seconds that threads of this process were ready but had no CPU, summed over
            threads, per second of the turn.
        cpu_load: processes running or waiting for a CPU, averaged over the last minute.
        gpu: at the turn's end, with the reasons for throttling of start and end.
        energy_j: of the GPUs, with ``measure=energy``.
    """

    cpu_steal: float | None = None
    cpu_waiting: float | None = None
    cpu_others: float | None = None
    cpu_load: float | None = None
    gpu: list[GpuState] | None = None
    energy_j: float | None = None


class _Reading(NamedTuple):
    """Counters at one moment, in seconds; None where the system does not tell.

    ``total``, ``idle`` and ``stolen`` are summed over the CPUs that this process may use.
    """

    at: float
    total: float | None
    idle: float | None
    stolen: float | None
    cpu: float  # of this process and its helpers
    waited: float | None
    energy_j: float | None
    gpu: list[GpuState] | None


class SystemMonitor:
    """Measures interference between two moments.

    ``helpers``: processes that work for the run, whose CPU time counts as the run's.
    """

    def __init__(
        self,
        gpus: Gpus | None = None,
        *,
        energy: bool = False,
        proc: Path = _PROC,
        helpers: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._gpus, self._energy, self._proc, self._helpers = gpus, energy, proc, helpers
        self._first = self._read()

    def begin(self) -> None:
        self._first = self._read()

    def end(self) -> Interference:
        """End a turn: tell what happened since :meth:`begin`."""
        first, last = self._first, self._read()

        def since(name: str) -> float | None:
            before, after = getattr(first, name), getattr(last, name)
            return None if before is None or after is None else max(0.0, after - before)

        def share(seconds: float | None, whole: float | None) -> float | None:
            # A whole of 0: less time has passed than the system's tick.
            return None if seconds is None or not whole else round(max(0.0, seconds) / whole, 4)

        total, idle, stolen = since("total"), since("idle"), since("stolen")
        used = (since("cpu") or 0.0) + (idle or 0.0) + (stolen or 0.0)
        return Interference(
            cpu_steal=share(stolen, total),
            cpu_waiting=share(since("waited"), since("at")),
            cpu_others=share((total or 0.0) - used, total),
            cpu_load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            gpu=_over_turn(first.gpu, last.gpu),
            energy_j=since("energy_j"),
        )

    def _read(self) -> _Reading:
        gpus = self._gpus
        return _Reading(
            time.perf_counter_ns() * 1e-9,
            *_cpu_times(self._proc / "stat"),
            cpu=time.process_time_ns() * 1e-9 + sum(map(_helper_s, self._helpers())),
            waited=_waited_s(self._proc / "self" / "task"),
            energy_j=gpus.energy_j() if gpus is not None and self._energy else None,
            gpu=None if gpus is None else gpus.states(),
        )


def _helper_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _cpu_times(stat: Path) -> tuple[float | None, float | None, float | None]:
    """Read time since boot, idle and stolen part, over the CPUs that this process may use."""
    allowed = {f"cpu{number}" for number in allowed_cpus()}
    try:
        lines = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
        rows = [[int(ticks) for ticks in row[1:9]] for row in lines if row and row[0] in allowed]
        # user nice system idle iowait irq softirq steal; guest times are contained in user and nice
        *busy, idle, waiting, irq, softirq, stolen = map(sum, zip(*rows, strict=True))
    except (OSError, ValueError):
        return None, None, None
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    total = sum(busy) + idle + waiting + irq + softirq + stolen
    return total * tick_s, (idle + waiting) * tick_s, stolen * tick_s


def _waited_s(tasks: Path) -> float | None:
    """Sum the time that this process's threads were ready to run but had no CPU."""
    waited: list[int] = []
    with contextlib.suppress(OSError):
        for task in tasks.iterdir():
            # A thread may end meanwhile.
            with contextlib.suppress(OSError, ValueError, IndexError):
                waited.append(int((task / "schedstat").read_text(encoding="ascii").split()[1]))
    return sum(waited) * 1e-9 if waited else None


def _over_turn(first: list[GpuState] | None, last: list[GpuState] | None) -> list[GpuState] | None:
    """Return the states at the turn's end, with the reasons for throttling of both ends."""
    for before, after in zip(first or (), last or (), strict=True):
        if after["throttle"] is not None:
            after["throttle"] = [*dict.fromkeys([*(before["throttle"] or ()), *after["throttle"]])]
    return last


class Gpus:
    """The GPUs of a run, open in NVML (the module ``pynvml``) until :meth:`close`."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._handles = list(handles)

    def states(self) -> list[GpuState]:
        return [self._state(handle) for handle in self._handles]

    def energy_j(self) -> float | None:
        """Read the joules taken since the driver was loaded; None where a GPU cannot tell.

        The counter moves every 20 to 100 ms: a turn of some seconds is exact to a few percent.
        """
        readings = [self._ask("TotalEnergyConsumption", h) for h in self._handles]
        if not readings or any(reading is None for reading in readings):
            return None
        return float(sum(readings)) * 1e-3

    def close(self) -> None:
        """Shut NVML down; a second call does nothing."""
        if self._handles:
            self._handles = []
            self._nvml.nvmlShutdown()

    def _state(self, handle: Any) -> GpuState:
        nvml = self._nvml
        power = self._ask("PowerUsage", handle)
        reasons = self._ask("CurrentClocksThrottleReasons", handle)
        if reasons is None:  # its later name
            reasons = self._ask("CurrentClocksEventReasons", handle)
        active = None if reasons is None else [n for bit, n in _THROTTLE.items() if reasons & bit]
        processes = self._ask("ComputeRunningProcesses", handle)
        return {
            "sm_mhz": self._ask("ClockInfo", handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": self._ask("ClockInfo", handle, nvml.NVML_CLOCK_MEM),
            "temperature_c": self._ask("Temperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "power_w": None if power is None else power / 1000,
            "throttle": active,
            "other_processes": None if processes is None else _others([p.pid for p in processes]),
        }

    def _ask(self, name: str, handle: Any, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, f"nvmlDeviceGet{name}")(handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):  # nvidia-ml-py removes names now and then
            return None


def open_gpus(uuids: Sequence[str]) -> Gpus | None:
    """Open the GPUs with these UUIDs; None without GPUs, nvidia-ml-py or a driver."""
    if not uuids:
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            return Gpus(nvml, [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids])
        except nvml.NVMLError:
            nvml.nvmlShutdown()
    return None


def check_energy(gpus: Gpus | None, devices: Sequence[str]) -> None:
    """Refuse ``measure=energy`` where no energy can be read; ``devices``: what the run uses.

    Raises:
        ConfigurationError: says what is missing.
    """
    if gpus is not None and gpus.energy_j() is not None:
        return
    where = ", ".join(devices)
    if gpus is not None:
        reason = f"{where} has no energy counter (Volta and newer GPUs have one)"
    elif all(device == "cpu" for device in devices):
        reason = "this run computes on the CPU"
    else:
        reason = (
            "NVML is not available: it needs an NVIDIA driver and nvidia-ml-py "
            "(pip install -e '.[gpu]')"
        )
    raise ConfigurationError(
        f"measure=energy reads the GPU's energy counter through NVML, and {reason}. "
        "Type measure=timed."
    )


def _others(pids: Sequence[int]) -> int:
    """Count the processes without this one.

    In a container NVML gives the host's pids. This process computes on the GPU, so one of the
    entries is this process under whatever number.
    """
    return sum(pid != os.getpid() for pid in pids) if os.getpid() in pids else max(0, len(pids) - 1)
