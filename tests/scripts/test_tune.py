"""`scripts/tune.py` on the tiny model: every method by the same effort, files for conf/pair."""

import json
from contextlib import nullcontext

import pytest
from omegaconf import OmegaConf

from runners import search
from scripts import tune
from specbench.config import compose
from specbench.errors import ConfigurationError
from specbench.paths import CONF_DIR

SMALL_GRID = {
    "contexts": [32, 200], "tree_rows": [1, 8, 32], "batch_contexts": [32], "batch_k": [1, 8],
    "batch_w": [1, 12],
}  # fmt: skip


@pytest.fixture
def here(monkeypatch):
    """Runs are made in this process, and garbage is left to the tests."""
    from runners.launch import dispatch
    from runners.measure import live

    monkeypatch.setattr(dispatch, "run_in_child", lambda work, job, _: work(job))
    monkeypatch.setattr(search, "GRID", SMALL_GRID)
    monkeypatch.setattr(live, "gc_paused", nullcontext)


@pytest.mark.slow  # a recording, a surface and three rounds of runs
def test_replayed_and_live_methods_are_tuned_with_one_effort(small, here, tmp_path, capsys):
    keys = [word for word in small if not word.startswith("method=")]
    arguments = [*keys, "--methods", "pld,jacobi,sps", "--settings", "3", "--out", str(tmp_path)]
    assert tune.main(arguments) == 0
    report = json.loads((tmp_path / "tuned.json").read_text())
    rows = {row["method"]: row for row in report["rows"]}
    assert report["cases"] == 5
    assert (rows["pld"]["way"], rows["jacobi"]["way"]) == (tune.REPLAYED, tune.LIVE)
    for name in ("pld", "jacobi"):
        assert rows[name]["settings"] == 3
        # 3 on 2 cases, 2 or 3 (its own setting stays) on 3, 1 to 3 on all 5.
        assert 3 * 2 + 2 * 1 + 1 * 2 <= rows[name]["replays"] <= 3 * 5
        assert rows[name]["speedup"] >= rows[name]["own"] > 0
    assert rows["sps"]["way"] == tune.NOT_RUN
    assert "pair=random_draft" in rows["sps"]["reason"]
    shown = capsys.readouterr().out
    assert "PREDICTED" in shown
    assert not [*tmp_path.glob("sps_*")]
    (file,) = tmp_path.glob("pld_*.yaml")
    assert OmegaConf.to_container(OmegaConf.load(file)) == {"method": rows["pld"]["knobs"]}
    # Again: all of it is there, so that the same is chosen without one replay or run.
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("**/*.jsonl")}
    assert tune.main(arguments) == 0
    assert json.loads((tmp_path / "tuned.json").read_text()) == report
    unchanged = {path for path in files if path.name in ("cases.jsonl", "replayed.jsonl")}
    assert {path.stat().st_mtime_ns for path in unchanged} == {files[path] for path in unchanged}


def test_a_pair_file_keeps_what_was_not_searched():
    cfg = compose.compose(["method=ar"])
    node = OmegaConf.create(tune.pair_file(cfg, "eagle2", {"total": 7}, "why"))
    present = OmegaConf.load(CONF_DIR / "pair/eagle2_smollm2_135m.yaml").method
    assert node.method == {**present, "total": 7} and "vocabulary" in present
    assert node.defaults == ["draft_smollm2_135m@pair", "_self_"]
    # A file of its own takes the place of the model's common one, which names the draft model.
    node = OmegaConf.create(tune.pair_file(cfg, "sps", {"gamma": 2}, "why"))
    assert node.defaults == ["draft_smollm2_135m@pair", "_self_"]
    part = {"method": "suffix_decoding", "factor": 2.5, "draft": "tree"}
    node = OmegaConf.create(tune.pair_file(cfg, "adaptive", {"drafter": part}, "why"))
    assert node.method.drafter == part  # and not what the file has of another draft


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "pdl"], "Did you mean 'pld'"),
        (["--methods", "oracle"], "search space"),
        (["--settings", "0"], "at least 1"),
        (["pld"], "--methods"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        tune.main(arguments)
