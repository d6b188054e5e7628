"""What NVIDIA's management library (NVML) tells of the GPUs a run uses: state and energy.

It needs nvidia-ml-py (the extra ``gpu``) and a driver; without one of them there is nothing to
ask, and everything here says so by None. GPUs are named by UUID, because NVML counts all GPUs of
the machine in its own order, whatever ``CUDA_VISIBLE_DEVICES`` says.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from specbench.errors import ConfigurationError

# Bits of NVML's clocks throttle reasons; bit 0 (idle) and 1 (clocks set by a user) slow nothing.
_THROTTLE = {
    0x04: "power_cap",
    0x08: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}


class Gpus:
    """The GPUs of a run, open in NVML (the module ``pynvml``) until :meth:`close`."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._handles = list(handles)

    def states(self) -> list[dict[str, Any]]:
        """What each GPU is doing now; what it does not report is None.

        ``throttle`` has the names of the reasons in force (idling is none), ``other_processes``
        counts compute processes besides this one.
        """
        return [self._state(handle) for handle in self._handles]

    def energy_j(self) -> float | None:
        """Joules the GPUs have taken since their driver was loaded; None where one cannot tell.

        The counter moves every 20 to 100 ms (Volta and newer have one), so a difference over a
        turn of some seconds is exact to a few percent.
        """
        readings = [self._ask("nvmlDeviceGetTotalEnergyConsumption", h) for h in self._handles]
        if not readings or any(reading is None for reading in readings):
            return None
        return float(sum(readings)) * 1e-3

    def close(self) -> None:
        if self._handles:
            self._handles = []
            self._nvml.nvmlShutdown()

    def _state(self, handle: Any) -> dict[str, Any]:
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
            "throttle": None if reasons is None else _names(reasons),
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
    """Refuse ``measure=energy`` where no energy can be read, and say what is missing.

    ``devices`` are what the run computes on, in words.
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


def _names(reasons: int) -> list[str]:
    return [name for bit, name in _THROTTLE.items() if reasons & bit]


def _others(pids: Sequence[int]) -> int:
    """Processes besides this one.

    In a container NVML gives the host's pids. This process computes on the GPU, so one of the
    entries is this process under whatever number.
    """
    return sum(pid != os.getpid() for pid in pids) if os.getpid() in pids else max(0, len(pids) - 1)
