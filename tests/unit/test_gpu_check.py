"""The GPU check runs on a CPU too, small: its report must be complete before a GPU is at hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_trial_on_the_cpu(gpu_check, tmp_path):
    code = gpu_check.main(
        ["--device", "cpu", "--models", "tiny", "--tokens", "6", "--repeats", "1",
         "--contexts", "32,64", "--only", "bandwidth,decoding,rows,steps", "--out", str(tmp_path)]
    )  # fmt: skip
    report = (tmp_path / "gpu_check.md").read_text()
    data = json.loads((tmp_path / "gpu_check.json").read_text())
    assert code == 0, data["missing"]
    rows = data["results"]["rows tiny"]
    assert {(r["engine"], r["context"]) for r in rows} == {
        (e, c) for e in ("eager", "graph") for c in (32, 64)
    }
    assert all(r["ms"] > 0 for r in rows)
    assert data["results"]["decoding tiny"]["passes"]["engine"] == "graph"
    for word in ("CPU (a trial)", "Copy bandwidth", "| tiny |", "cacheback", "token_recycling"):
        assert word in report
    assert (tmp_path / "gpu_check.png").stat().st_size > 5000


def test_a_part_that_fails_is_named_and_the_others_go_on(gpu_check, tmp_path, monkeypatch):
    def fail(check: object) -> None:
        raise RuntimeError("no such kernel\nmore")

    monkeypatch.setattr(gpu_check, "bandwidth", fail)
    code = gpu_check.main(
        ["--device", "cpu", "--models", "tiny", "--only", "bandwidth", "--out", str(tmp_path)]
    )
    assert code == 1
    assert (
        "not measured: bandwidth: RuntimeError: no such kernel"
        in (tmp_path / "gpu_check.md").read_text()
    )


def test_a_machine_without_a_gpu_is_told_what_to_type(gpu_check, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        gpu_check.main(["--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "--device cpu --models tiny" in capsys.readouterr().err
