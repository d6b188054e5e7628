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
from typing import Any

import psutil

from specbench.errors import ConfigurationError
from specbench.system.environment import allowed_cpus
from specbench.system.noted import GpuState

_PROC = Path("/proc")
# user nice system idle iowait irq softirq steal; guest times are contained in user and nice.
_N_CPU_FIELDS = 8
_IDLE_FIELDS = (3, 4)
_STEAL_FIELD = 7
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
    """What else the machine did in a turn; None where the system does not tell.

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


@dataclass(frozen=True, slots=True)
class _Reading:
    """Counters at one moment; ticks are hundredths of a second over the CPUs it may use."""

    at_ns: int
    ticks: tuple[int, ...] | None
    own_ns: int
    waited_ns: int | None
    gpu: list[GpuState] | None
    energy_j: float | None


class SystemMonitor:
    """Compares two moments.

    ``helpers``: processes that work for the run, whose CPU time is its own.
    """

    def __init__(
        self,
        gpus: Gpus | None = None,
        *,
        energy: bool = False,
        proc: Path = _PROC,
        helpers: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._helpers = helpers
        self._gpus = gpus
        self._energy = energy
        self._proc = proc
        self._first = self._read()

    def begin(self) -> None:
        self._first = self._read()

    def end(self) -> Interference:
        """The turn is over: what happened since :meth:`begin`."""
        first, last = self._first, self._read()
        elapsed_s = (last.at_ns - first.at_ns) * 1e-9
        steal = others = waiting = energy = None
        if first.ticks is not None and last.ticks is not None:
            spent = [max(0, b - a) for a, b in zip(first.ticks, last.ticks, strict=True)]
            total = sum(spent)
            if total:  # else less time has passed than the system counts in
                steal = round(spent[_STEAL_FIELD] / total, 4)
                idle = sum(spent[field] for field in (*_IDLE_FIELDS, _STEAL_FIELD))
                own = (last.own_ns - first.own_ns) * 1e-9 * os.sysconf("SC_CLK_TCK")
                others = round(max(0.0, total - idle - own) / total, 4)
        if first.waited_ns is not None and last.waited_ns is not None and elapsed_s > 0:
            waiting = round(max(0, last.waited_ns - first.waited_ns) * 1e-9 / elapsed_s, 4)
        if first.energy_j is not None and last.energy_j is not None:
            energy = last.energy_j - first.energy_j
        load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
        return Interference(steal, waiting, others, load, _over_turn(first.gpu, last.gpu), energy)

    def _read(self) -> _Reading:
        return _Reading(
            at_ns=time.perf_counter_ns(),
            ticks=_cpu_ticks(self._proc / "stat"),
            own_ns=time.process_time_ns() + sum(map(_helper_ns, self._helpers())),
            waited_ns=_waited_ns(self._proc / "self" / "task"),
            gpu=None if self._gpus is None else self._gpus.states(),
            energy_j=self._gpus.energy_j() if self._gpus is not None and self._energy else None,
        )


def _helper_ns(pid: int) -> int:
    """CPU time of another process; 0 where it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0
    return int((times.user + times.system) * 1e9)


def _cpu_ticks(stat: Path) -> tuple[int, ...] | None:
    """CPU time since boot by kind, in clock ticks, over the CPUs that this process may use."""
    try:
        lines = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
        allowed = {f"cpu{number}" for number in allowed_cpus()}
        by_cpu = [
            [int(value) for value in fields[1 : 1 + _N_CPU_FIELDS]]
            for fields in lines
            if len(fields) > _N_CPU_FIELDS and fields[0] in allowed
        ]
    except (OSError, ValueError):
        return None
    return tuple(map(sum, zip(*by_cpu, strict=True))) or None


def _waited_ns(tasks: Path) -> int | None:
    """Time that this process's threads were ready to run but had no CPU, since they began."""
    waited: list[int] = []
    with contextlib.suppress(OSError):
        for task in tasks.iterdir():
            # A thread may end meanwhile.
            with contextlib.suppress(OSError, ValueError, IndexError):
                waited.append(int((task / "schedstat").read_text(encoding="ascii").split()[1]))
    return sum(waited) if waited else None


def _over_turn(first: list[GpuState] | None, last: list[GpuState] | None) -> list[GpuState] | None:
    """The states at the turn's end, with the reasons for throttling of both ends."""
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
        readings = [self._ask("nvmlDeviceGetTotalEnergyConsumption", h) for h in self._handles]
        if not readings or any(reading is None for reading in readings):
            return None
        return float(sum(readings)) * 1e-3

    def close(self) -> None:
        if self._handles:
            self._handles = []
            self._nvml.nvmlShutdown()

    def _state(self, handle: Any) -> GpuState:
        nvml = self._nvml
        power = self._ask("nvmlDeviceGetPowerUsage", handle)
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if reasons is None:  # its later name
            reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        return {
            "sm_mhz": self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            "temperature_c": self._ask(
                "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "power_w": None if power is None else power / 1000,
            "throttle": None
            if reasons is None
            else [name for bit, name in _THROTTLE.items() if reasons & bit],
            "other_processes": None if processes is None else _others([p.pid for p in processes]),
        }

    def _ask(self, name: str, handle: Any, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):  # nvidia-ml-py drops names now and then
            return None


def open_gpus(uuids: Sequence[str]) -> Gpus | None:
    """The GPUs with these UUIDs; None without GPUs, nvidia-ml-py or a driver."""
    if not uuids:
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
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
            "NVML cannot be asked: it needs an NVIDIA driver and nvidia-ml-py "
            "(pip install -e '.[gpu]')"
        )
    raise ConfigurationError(
        f"measure=energy reads the GPU's energy counter through NVML, and {reason}. "
        "Type measure=timed."
    )


def _others(pids: Sequence[int]) -> int:
    """Processes besides this one.

    In a container NVML gives the host's pids. This process computes on the GPU, so one of the
    entries is this process under whatever number.
    """
    return sum(pid != os.getpid() for pid in pids) if os.getpid() in pids else max(0, len(pids) - 1)
