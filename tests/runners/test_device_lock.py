"""Timed jobs never share a device: a lock per machine and device, for which a second job waits."""

import multiprocessing
import socket
import threading
import types

import pytest
import torch

from runners.measure import device_lock
from runners.run_folder import folder
from specbench.config.schema import DraftConfig, MeasureConfig, ModelConfig, RunConfig
from specbench.errors import ConfigurationError, OutputRefused
from specbench.models import loading
from specbench.system import interference
from tests.small_run import run_here


def job(cache, *, device="cpu", exclusive=True, device_map=None):
    config = RunConfig(
        model=ModelConfig(device=device, device_map=device_map),
        measure=MeasureConfig(exclusive=exclusive),
        cache_dir=str(cache),
    )
    return types.SimpleNamespace(config=config)


def measure_elsewhere(cache, started, may_end):
    with device_lock.hold_device(job(cache)):
        started.set()
        may_end.wait(60)


@pytest.fixture
def other(tmp_path):
    """Another process that measures on the CPU until it is told to end."""
    context = multiprocessing.get_context("spawn")
    started, may_end = context.Event(), context.Event()
    process = context.Process(target=measure_elsewhere, args=(tmp_path, started, may_end))
    process.start()
    started.wait(60)
    yield types.SimpleNamespace(pid=process.pid, end=may_end.set)
    may_end.set()
    process.join()


@pytest.mark.slow  # over a second
def test_a_second_job_waits_and_says_for_whom(tmp_path, other, caplog, monkeypatch):
    monkeypatch.setattr(folder, "_LOOK_EVERY_S", 0.02)
    held = threading.Event()

    def second():
        with device_lock.hold_device(job(tmp_path)):
            held.set()

    waiting = threading.Thread(target=second)
    waiting.start()
    assert not held.wait(0.3)
    with device_lock.hold_device(job(tmp_path, exclusive=False)):
        pass  # who does not mind takes no lock
    other.end()
    waiting.join(60)
    assert held.is_set()
    assert f"(child {other.pid}) on host {socket.gethostname()} is measuring on cpu" in caplog.text
    assert "measure.exclusive=false" in caplog.text


def test_the_lock_is_given_back_and_names_machine_and_device(tmp_path):
    for _ in range(2):
        with device_lock.hold_device(job(tmp_path)) as gpus:
            assert gpus is None
            names = sorted(path.name for path in (tmp_path / "locks").iterdir())
            assert f"{socket.gethostname()}-cpu.lock.json" in names
    assert not list((tmp_path / "locks").glob("*.json"))


def test_a_cache_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputRefused), device_lock.hold_device(job(tmp_path / "file")):
        pass


def test_an_error_of_the_run_is_not_taken_for_one_of_the_lock(tmp_path):
    with pytest.raises(OSError, match="mine"), device_lock.hold_device(job(tmp_path)):
        raise OSError("mine")


class FakeCuda:
    def __init__(self, n):
        self.n = n

    def device_count(self):
        return self.n

    def get_device_properties(self, index):
        return types.SimpleNamespace(uuid=f"{index}")


@pytest.mark.parametrize(
    ("device", "device_map", "draft", "expected"),
    [
        ("cuda", None, None, ["GPU-0"]),
        ("cuda:1", None, None, ["GPU-1"]),
        ("cuda:0", "auto", None, ["GPU-0", "GPU-1", "GPU-2"]),
        ("cpu", "auto", None, ["cpu"]),
        ("cuda:0", None, DraftConfig(id="d", device="cuda:1"), ["GPU-0", "GPU-1"]),
        ("cuda:1", None, DraftConfig(id="d"), ["GPU-1"]),
        ("cuda:0", None, DraftConfig(device="cuda:1"), ["GPU-0"]),  # names no model
        ("cpu", None, DraftConfig(id="d", device="cuda:1"), ["GPU-1", "cpu"]),
        ("cuda:0", None, DraftConfig(id="d", device="cpu"), ["GPU-0"]),
    ],
)
def test_the_devices_of_target_and_draft_are_held_and_watched_by_the_names_others_know(
    tmp_path, monkeypatch, device, device_map, draft, expected
):
    monkeypatch.setattr(torch, "cuda", FakeCuda(3))
    monkeypatch.setattr(loading, "choose_device", torch.device)
    opened = []
    monkeypatch.setattr(interference, "open_gpus", lambda uuids: opened.extend(uuids))
    held_job = job(tmp_path, device=device, device_map=device_map)
    with device_lock.hold_device(held_job, [draft] if draft else []):
        held = {path.stem for path in (tmp_path / "locks").glob("*.lock")}
    assert held == {f"{socket.gethostname()}-{name}" for name in expected}
    assert opened == [name for name in expected if name != "cpu"]


def test_energy_on_the_cpu_is_refused_before_the_model_is_loaded(small, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda *a: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigurationError, match="measure=energy reads the GPU's energy counter"):
        run_here([*small, "measure=energy", f"output_dir={tmp_path}/run"])
