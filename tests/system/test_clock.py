"""The clock: what belongs to prefill, to steps, to the drafter; and that a GPU is left alone."""

import time

import pytest

from specbench.system.clock import CudaClock, make_clock


class FakeDevice:
    """A device whose time the test sets, and which counts how often the host waited for it."""

    def __init__(self):
        self.now = 0.0
        self.waits = 0
        self.events = 0
        self.log = []

    def work(self, seconds):
        self.now += seconds

    def new_event(self):
        self.events += 1
        return {}

    def record(self, event):
        event["at"] = self.now
        self.log.append("record")

    def elapsed_s(self, first, second):
        assert self.log[-1] == "wait", "times are read only after the device was waited for"
        return second["at"] - first["at"]

    def synchronize(self):
        self.waits += 1
        self.log.append("wait")


def drive(timer, pass_time, n_steps=3):
    """A turn: prefill 5, indexing 2, steps of draft 1 + verify 4 + observe 1 (+ 1), end 3."""
    timer.begin()
    pass_time(5)
    timer.prefill_done()
    pass_time(2)
    timer.setup_done()
    for _ in range(n_steps):
        pass_time(1)
        timer.phase("draft")
        pass_time(4)
        timer.phase("verify")
        pass_time(1)
        timer.phase("observe")
        pass_time(1)
        timer.step_done()
    timer.finish_begin()
    pass_time(3)
    return timer.end()


def on_fake_device(phases, n_steps=3):
    device = FakeDevice()

    timer = CudaClock(device, phases)
    return device, timer, drive(timer, device.work, n_steps)


@pytest.mark.parametrize("phases", [False, True])
def test_what_belongs_where(phases):
    device, _, times = on_fake_device(phases)
    assert times.prefill_s == 5
    assert times.decode_s == 2 + 3 * 7 + 3
    assert times.drafter_setup_s == 2 + 3, "indexing the prompt, and inserting at the end"
    assert times.wall_s == times.prefill_s + times.decode_s
    assert times.step_s == [7, 7, 7]
    by_phase = {"prefill": 5, "setup": 5, "draft": 3, "verify": 12, "observe": 3, "other": 3}
    assert times.phase_s == (by_phase if phases else None)
    assert sum(by_phase.values()) == times.wall_s
    assert device.waits == 2 and device.log[0] == device.log[-1] == "wait"  # at the ends alone
    marks = len(["begin", "prefill", "setup", "finish", "end"]) + 3 * (4 if phases else 1)
    assert device.log.count("record") == marks  # marks must vanish beside a step
    more = times.with_setup(10.0)
    assert (more.prefill_s, more.decode_s, more.drafter_setup_s) == (5, 36, 15)
    assert more.wall_s == 41 and more.step_s == times.step_s
    assert more.phase_s is None or sum(more.phase_s.values()) == 41


def test_events_are_reused_and_the_pool_grows_when_it_must():
    device, timer, _ = on_fake_device(phases=False)
    drive(timer, device.work)
    before = device.events
    times = drive(timer, device.work, n_steps=5000)
    assert before < 5000 < device.events and times.step_s == [7] * 5000
    drive(timer, device.work, n_steps=5000)
    assert device.events == 2 * before


def test_a_turn_may_be_abandoned_or_end_with_its_first_token_and_has_an_order():
    device = FakeDevice()
    timer = CudaClock(device)
    timer.begin()
    device.work(100)
    timer.prefill_done()
    timer.begin()  # the case failed there, and nobody called end
    device.work(4)
    timer.prefill_done()
    device.work(1)
    timer.finish_begin()
    device.work(2)
    times = timer.end()
    assert (times.prefill_s, times.decode_s, times.drafter_setup_s) == (4, 3, 3)
    assert times.step_s == []
    timer.begin()
    with pytest.raises(RuntimeError, match="prefill_done"):
        timer.end()


@pytest.mark.parametrize("phases", [False, True])
def test_the_cpu_clock_agrees_with_the_host(phases):
    timer = make_clock("cpu", phases)
    before = time.perf_counter()
    times = drive(timer, lambda units: time.sleep(units * 1e-3))
    wall = time.perf_counter() - before
    slept = 5 + 2 + 3 * 7 + 3
    assert slept * 1e-3 <= times.wall_s <= wall
    assert 0.005 <= times.prefill_s < times.decode_s
    assert len(times.step_s) == 3
    if phases:
        assert sum(times.phase_s.values()) == pytest.approx(times.wall_s, rel=1e-9)


@pytest.mark.gpu
def test_cuda_events_agree_with_the_host():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    matrix = torch.randn(4096, 4096, device="cuda")

    def work(units):
        for _ in range(20 * units):
            matrix @ matrix

    timer = make_clock("cuda", phases=True)
    drive(timer, work)
    torch.cuda.synchronize()
    before = time.perf_counter()
    times = drive(timer, work)
    wall = time.perf_counter() - before
    assert times.wall_s == pytest.approx(wall, rel=0.02)
    assert sum(times.phase_s.values()) == pytest.approx(times.wall_s, rel=0.02)
    assert times.phase_s["verify"] == pytest.approx(4 * times.phase_s["draft"], rel=0.1)
