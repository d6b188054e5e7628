"""Residuals of predicted speedups: computed by hand, and runs that do not match."""

import json
import math

import pytest

from analysis import residuals
from analysis.runs.load import load_runs
from specbench.results import prediction_error
from specbench.results.records import CASES, MANIFEST
from specbench.storage import jsonl
from tests.analysis.folders import vouch
from tests.small_run import case_record


def write(folder, timing, seconds, cases=("a", "b")):
    folder.mkdir(parents=True)
    lines = [
        case_record(
            case, label, 11, committed_per_step=[2] * 5, stream_index=i,
            decode_s=s, wall_s=s, timing=timing,
        ).to_json()
        for i, case in enumerate(cases)
        for label, s in seconds.items()
    ]  # fmt: skip
    jsonl.rewrite_jsonl(folder / CASES, lines)
    labels = {label: {} for label in seconds}
    surface = {
        "model": {"name": "m", "dtype": "float32"},
        "machine": {"hardware": {"cpu": "a CPU", "gpus": []}},
    }
    manifest = {"schema_version": 2, "labels": labels, "baseline": "ar", "surface": surface}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    vouch(folder)
    return folder


def test_by_hand(tmp_path, capsys, monkeypatch):
    # Measured 2.0 and 4.0 times; predicted 2.2 (+10 %) and 3.8 (-5 %): the median error is 7.5 %.
    live = write(tmp_path / "live", "measured", {"ar": 4.0, "pld": 2.0, "sam": 1.0})
    again = write(tmp_path / "again", "predicted", {"ar": 4.18, "pld": 1.9, "sam": 1.1})
    frame = residuals.residuals(*load_runs([live]), *load_runs([again]))
    assert list(frame.label) == ["pld", "sam"]
    assert list(frame.residual) == pytest.approx([0.1, -0.05])
    assert residuals.median_error(frame) == pytest.approx(0.075)
    assert residuals.main([str(live), str(again)]) == 1
    assert residuals.main([str(live), str(again), "--limit", "0.08"]) == 0
    shown = capsys.readouterr().out
    assert "+10.0%" in shown
    assert "7.5%" in shown
    error = math.sqrt((math.log(1.1) ** 2 + math.log(0.95) ** 2) / 2)
    assert residuals.surface_error(frame) == pytest.approx(error)
    monkeypatch.setattr(prediction_error, "KEPT", tmp_path / "errors.json")
    assert residuals.main([str(live), str(again), "--limit", "0.08", "--keep"]) == 0
    surface = load_runs([again])[0].manifest.surface
    stated, _ = prediction_error.stated_error(surface["model"], surface["machine"], 0.0)
    assert stated == pytest.approx(error)


def test_only_common_cases_count(tmp_path):
    live = write(tmp_path / "live", "measured", {"ar": 4.0, "pld": 2.0})
    again = write(tmp_path / "again", "predicted", {"ar": 4.0, "pld": 2.0}, cases=("b",))
    frame = residuals.residuals(*load_runs([live]), *load_runs([again]))
    assert list(frame.residual) == [0]


def test_runs_that_do_not_belong_together_are_refused(tmp_path, capsys):
    live = str(write(tmp_path / "live", "measured", {"ar": 4.0, "pld": 2.0}))
    other = str(write(tmp_path / "other", "predicted", {"ar": 4.0, "sam": 2.0}))
    for folders, why in (
        ((live, other), "no common cases"),
        ((live, live), "must have predicted times, got measured"),
        ((other, live), "must have measured times, got predicted"),
    ):
        assert residuals.main(folders) == 2
        assert why in capsys.readouterr().err
