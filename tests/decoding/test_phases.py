"""Phase times of the real small model against an outside clock that knows nothing of phases."""

import time

import pytest

from runners.measure import session
from specbench.results import records
from tests.small_run import run_here


@pytest.mark.slow
def test_phases_sum_to_the_wall_time_within_two_percent(monkeypatch, tmp_path):
    """Compare the sum of the five phases with an outside clock around decode."""
    outside = []
    decode = session.Session.decode

    def timed(self, *arguments, **options):
        begin = time.perf_counter()
        result = decode(self, *arguments, **options)
        outside.append((result.timings.phase_s, time.perf_counter() - begin))
        return result

    monkeypatch.setattr(session.Session, "decode", timed)
    typed = ["measure=phases", "measure.reruns=0", "measure.warmup=0", "dataset.limit=2"]
    typed += ["generation.max_new_tokens=48", f"output_dir={tmp_path}/run"]
    assert run_here(typed) == 0
    for phases, wall in outside:
        assert sum(phases.values()) == pytest.approx(wall, rel=0.02)
        named = sum(phases.get(name, 0.0) for name in (*records.PHASES, "prefill", "setup"))
        assert named == pytest.approx(wall, rel=0.02)
    cases, _ = records.read_records(tmp_path / "run")
    assert len(cases) == len(outside) == 8  # two labels, two dialogues of two turns
    for record in cases:
        assert sum(record.phase_s.values()) == pytest.approx(record.wall_s, rel=0.02)
