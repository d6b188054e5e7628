"""`python -m scripts.bench predicted_pairs` on the tiny model: pairs, their error, going on."""

import json

import pytest

from scripts.bench import __main__ as bench
from scripts.bench import predicted_pairs
from specbench.config.compare import compose_entry
from specbench.config.compose import compose
from specbench.errors import ConfigurationError
from specbench.replay import prediction_error
from tests.config.test_composition import made
from tests.scripts.test_tune import here

__all__ = ["here"]

ITEMS = [
    *({"method": "pld", "num_tokens": n} for n in (2, 4, 8)),
    *({"method": "suffix_decoding", "max_spec_tokens": n} for n in (2, 8)),
    {"method": "sam", "automata": "dynamic", "max_predicts": 4},
    {"method": "jacobi"},
]


@pytest.mark.slow  # composes every method
def test_the_list_has_over_forty_settings_that_methods_take():
    cfg = compose(["method=ar", "budgets=published"])
    for item in predicted_pairs.ENTRIES:
        made(compose_entry(cfg, item).method)
    assert len(predicted_pairs.ENTRIES) >= 44
    assert len({item["method"] for item in predicted_pairs.ENTRIES}) >= 15


@pytest.mark.slow  # a surface, a recording and a run
def test_settings_are_run_and_predicted_and_the_error_is_kept(
    small, here, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(prediction_error, "KEPT", tmp_path / "errors.json")
    (tmp_path / "items.json").write_text(json.dumps(ITEMS))
    keys = [word for word in small if not word.startswith("method=")]
    out = tmp_path / "pairs.json"
    arguments = [
        *(
            "predicted_pairs",
            f"data_dir={tmp_path}",
            *keys,
            "--entries",
            str(tmp_path / "items.json"),
            "--keep",
        ),
        *("--folder", str(tmp_path / "work"), "--out", str(out)),
    ]
    assert bench.main(arguments) == 0
    found = json.loads(out.read_text())
    assert [pair["method"] for pair in found["pairs"]] == [i["method"] for i in ITEMS[:6]]
    assert "cannot be replayed" in found["left_out"]["jacobi_6"]
    for pair in found["pairs"]:
        assert pair["rows"] >= 1
        for key in ("live", "predicted"):
            low, high = pair[f"{key}_ci"]
            assert low < pair[key] < high
    assert len(found["questions"]) == 5
    assert found["command"].startswith("python -m scripts.bench predicted_pairs ")
    assert "data_dir=DIR" in found["command"]
    kept = json.loads((tmp_path / "errors.json").read_text())["errors"]
    assert [line["pairs"] for line in kept] == [6]
    assert kept[0]["rms"] == found["error"]["rms"] > 0
    assert "Predicted and live speedups" in capsys.readouterr().out
    # Again: all of it is there.
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("work/**/*.jsonl")}
    assert bench.main(arguments) == 0
    assert json.loads(out.read_text())["pairs"] == found["pairs"]
    done = {path for path in files if path.name == "cases.jsonl" or "replayed" in path.name}
    assert len(done) == 3
    assert all(path.stat().st_mtime_ns == files[path] for path in done)


@pytest.mark.parametrize("text", ["{", "[1]", '{"method": "pld"}'])
def test_a_file_of_other_things_is_refused(tmp_path, text):
    (tmp_path / "items.json").write_text(text)
    with pytest.raises(ConfigurationError, match="--entries"):
        bench.main(["predicted_pairs", "--entries", str(tmp_path / "items.json")])
