"""Interference in a turn: CPU time lost, GPU state and energy, real and faked."""

import os
import sys
import time
import types

import pytest

from specbench.errors import ConfigurationError
from specbench.system import interference
from specbench.system.interference import SystemMonitor


class FakeProc:
    """A /proc whose counters a test sets."""

    def __init__(self, folder):
        self.folder = folder
        self.set_ticks(user=1000, idle=1000, steal=10)
        self.set_waited(7_000_000)

    def set_ticks(self, *, user, idle, steal):
        cpu = min(os.sched_getaffinity(0))
        other = 1 + max(os.sched_getaffinity(0))
        (self.folder / "stat").write_text(
            "cpu  9999 9 9 9999 9 9 9 9999 9 9\n"
            f"cpu{cpu} {user} 0 50 {idle} 5 0 0 {steal} 7 7\n"
            f"cpu{other} {9 * user} 0 0 0 0 0 0 {9 * steal} 0 0\n"
            "intr 1 2 3\n"
        )

    def set_waited(self, *nanoseconds):
        for i, waited in enumerate(nanoseconds):
            task = self.folder / "self" / "task" / str(100 + i)
            task.mkdir(parents=True, exist_ok=True)
            (task / "schedstat").write_text(f"5 {waited} 1\n")


def test_shares_of_the_time_of_the_cpus_it_may_use(tmp_path, monkeypatch):
    process_ns, proc = [0], FakeProc(tmp_path)
    monkeypatch.setattr(time, "process_time_ns", lambda: process_ns[0])
    watch = SystemMonitor(proc=proc.folder)
    assert watch.end().cpu_steal is None  # less than a tick says nothing
    proc.set_ticks(user=1000, idle=1000, steal=500)
    watch.begin()  # forgets what was before
    proc.set_ticks(user=1000, idle=1000, steal=10)
    watch.begin()
    proc.set_ticks(user=1000 + 60, idle=1000 + 10, steal=10 + 30)  # 100 ticks in all
    process_ns[0] = 45 * 10**9 // os.sysconf("SC_CLK_TCK")  # 45 ticks are this process's
    result = watch.end()
    assert result.cpu_steal == pytest.approx(0.30)
    assert result.cpu_others == pytest.approx(0.15)
    assert result.cpu_load is not None
    assert (result.gpu, result.energy_j) == (None, None)
    # Of waiting threads the seconds are summed, per second.
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    proc.set_waited(10**9, 0)
    watch.begin()
    proc.set_waited(2 * 10**9, 5 * 10**8)
    now[0] = 2 * 10**9
    assert watch.end().cpu_waiting == pytest.approx(1.5 / 2)


@pytest.mark.parametrize(
    "text", ["", "cpu0 1 2 3\n", "cpu0 a b c d e f g h\n", "intr 1 2 3 4 5 6 7 8 9\n", None]
)
def test_where_the_system_tells_nothing_it_is_none(tmp_path, text):
    if text is not None:
        (tmp_path / "stat").write_text(text)
    result = SystemMonitor(proc=tmp_path).end()
    assert (result.cpu_steal, result.cpu_others, result.cpu_waiting) == (None, None, None)


class FakeNvml(types.ModuleType):
    """An NVML with two GPUs; the second one reports neither power nor energy."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self):
        super().__init__("pynvml")
        self.open = 0
        self.millijoules = 5_000
        self.pids = [os.getpid(), -1]
        self.reasons = 0x01 | 0x04 | 0x40

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in ("GPU-a", "GPU-b"):
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1410, 2: 2619}[kind]

    def nvmlDeviceGetTemperature(self, handle, kind):
        return 71

    def reported(self, handle, value):
        if handle == "GPU-b":
            raise self.NVMLError
        return value

    def nvmlDeviceGetPowerUsage(self, handle):
        return self.reported(handle, 250_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self.reported(handle, self.millijoules)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [types.SimpleNamespace(pid=pid) for pid in self.pids]


@pytest.fixture
def fake(monkeypatch):
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_the_state_of_a_gpu(fake):
    gpus = interference.open_gpus(["GPU-a", "GPU-b"])
    first, second = gpus.states()
    assert first == {
        "sm_mhz": 1410,
        "memory_mhz": 2619,
        "temperature_c": 71,
        "power_w": 250.0,
        "throttle": ["power_cap", "hardware_thermal"],
        "other_processes": 1,
    }
    assert second["power_w"] is None
    gpus.close()
    gpus.close()
    assert fake.open == 0, "NVML is shut down again, once"


def test_a_name_that_nvml_dropped_ends_no_run(fake, monkeypatch):
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksThrottleReasons")
    gpus = interference.open_gpus(["GPU-a"])
    assert gpus.states()[0]["throttle"] is None
    name = "nvmlDeviceGetCurrentClocksEventReasons"
    monkeypatch.setattr(FakeNvml, name, lambda self, handle: 0x04, raising=False)
    assert gpus.states()[0]["throttle"] == ["power_cap"]
    for pids, others in ([], 0), ([-1], 0), ([-1, -2, -3], 2):
        fake.pids = pids  # in a container the host's, one of which is ours
        assert gpus.states()[0]["other_processes"] == others


def test_energy_and_throttling_over_a_turn(fake):
    watch = SystemMonitor(interference.open_gpus(["GPU-a"]), energy=True)
    unasked = SystemMonitor(interference.open_gpus(["GPU-a"]))
    fake.millijoules, fake.reasons = 45_500, 0x80
    result = watch.end()
    assert result.energy_j == pytest.approx(40.5)
    assert result.gpu[0]["throttle"] == ["power_cap", "hardware_thermal", "power_brake"]
    assert unasked.end().energy_j is None


def test_without_nvml_or_with_an_unknown_gpu_there_is_none(fake, monkeypatch):
    assert interference.open_gpus(["GPU-a", "GPU-z"]) is None
    assert fake.open == 0  # given back
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert interference.open_gpus(["GPU-a"]) is None
    assert interference.open_gpus([]) is None


@pytest.mark.parametrize(
    ("uuids", "devices", "message"),
    [
        ([], ["cpu"], "this run computes on the CPU"),
        (["GPU-b"], ["GPU-b"], "GPU-b has no energy counter"),
        (["GPU-z"], ["GPU-z"], "needs an NVIDIA driver and nvidia-ml-py"),
    ],
)
def test_energy_is_refused_where_it_cannot_be_read(fake, uuids, devices, message):
    with pytest.raises(ConfigurationError, match=message) as refusal:
        interference.check_energy(interference.open_gpus(uuids), devices)
    assert "Type measure=timed." in str(refusal.value)
    interference.check_energy(interference.open_gpus(["GPU-a"]), ["GPU-a"])
