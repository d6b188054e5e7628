"""The average over data sets, each of which counts the same."""

import json
import math

import pytest

from analysis import tables
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import Run, load_runs
from analysis.tabular import macro_table as macro_module
from analysis.tabular.macro_table import macro_table
from specbench.errors import ResultsError
from tests.analysis.folders import copy_run

# How often each question is in a set, and pld's speedup there.
SETS = {"large": (8, 1.5), "small": (1, 0.6), "other": (1, 0.6)}


def write_set(results, name, times, ratio, leave_out=()):
    copy_run(results / "one", results / name, name)
    path = results / name / "cases.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    lines = []
    for record in records:
        if record["case_id"] in ("90", *["81"] * (name == "large")) or record["label"] not in {
            "ar",
            "pld",
        } - {*leave_out}:
            continue  # 90 fails
        seconds = (record["n_new"] - 1) * 0.1 / (ratio if record["label"] == "pld" else 1)
        timed = {"dataset": name, "decode_s": seconds, "wall_s": seconds + record["prefill_s"]}
        lines += [record | timed | {"case_id": f"{record['case_id']}.{i}"} for i in range(times)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def runs(results):
    for name, (times, ratio) in SETS.items():
        write_set(results, name, times, ratio)
    return [results / name for name in SETS]


def cells(folders):
    frame = macro_table(make_comparisons(load_runs(folders))).frame.set_index("method")
    return {name.removesuffix(" [95 %]"): frame.loc["pld", name] for name in frame}


def test_a_method_that_is_fast_on_the_large_set_alone_loses_the_macro_average(runs):
    pld = cells(runs)
    assert pld["macro tokens/s"].value == pytest.approx(10 * (1.5 + 0.6 + 0.6) / 3)
    assert pld["macro speedup"].value == pytest.approx(0.9) and pld["pooled speedup"].value > 1.05
    alone = [c.entries[1].overall for c in make_comparisons(load_runs(runs))]
    for name, key in (("macro MAT", "mat"), ("macro MAT per turn", "mat_per_request")):
        assert pld[name].value == pytest.approx(sum(x[key] for x in alone) / 3)
        assert alone[0][key] != pytest.approx(alone[1][key])
    assert pld["geomean speedup"].value == pytest.approx(math.cbrt(1.5 * 0.6 * 0.6))


def test_two_sets_of_the_same_questions_halve_the_variance(runs):
    pld = cells(runs[1:])
    single = make_comparisons(load_runs(runs[1:2]))[0].entries[1]
    assert pld["macro MAT per turn"].value == pytest.approx(single.overall["mat_per_request"])
    spread = [
        math.log(high / low) for low, high in (single.overall["mat_ci"], pld["macro MAT"].interval)
    ]
    # And Student's factor falls, with twice the degrees of freedom.
    assert math.sqrt(2) < spread[0] / spread[1] < 1.3 * math.sqrt(2), spread


def test_a_method_without_a_number_in_a_set_has_no_average(results, runs):
    write_set(results, "fourth", 1, 2.0, leave_out=["pld"])
    assert all(str(cell) == "–" for cell in cells([*runs, results / "fourth"]).values())


def test_what_cannot_be_averaged_is_refused(results, runs, capsys):
    assert tables.main(["--macro", str(runs[0])]) == 2
    assert "one run of each of several data sets" in capsys.readouterr().err
    assert tables.main(["--macro", "--markdown", *map(str, runs)]) == 0
    assert "Macro average of large, other, small" in capsys.readouterr().out


def test_runs_that_are_not_made_alike_are_refused(runs, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(macro_module, "conditions", lambda run: (run.dataset,))
        with pytest.raises(ResultsError, match="made alike"):
            cells(runs)
    monkeypatch.setattr(
        Run, "knobs", lambda run, label: {"num_tokens": run.dataset * (label == "pld")}
    )
    with pytest.raises(ResultsError, match="one set of knobs of a method, got more of pld"):
        cells(runs)
