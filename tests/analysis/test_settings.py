"""Labels of several runs are distinguished by settings, never by a hash or a folder's number."""

import json
import shutil

import pandas as pd
import pytest

from analysis import sweep
from analysis.plots.pictures import own_sweeps
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from analysis.runs.settings import setting_texts, varied_knobs
from analysis.runs.sweeps import sweeps
from tests.analysis.folders import copy_run, edit_manifest, edit_records


@pytest.fixture
def runs_of(results):
    """Runs of ar and ``cacheback`` that differ in knobs and in other settings."""
    repeats = {"ar": 0, "cacheback": 0}
    edit_records(results / "one", lambda r: r if r["repeat"] == repeats.get(r["label"]) else None)

    def make_runs(*settings):
        for number, (knobs, other) in enumerate(settings):
            folder = results / f"cacheback-{number}{number}{number}"
            copy_run(results / "one", folder, f"key{number}")
            labels = json.loads((folder / "manifest.json").read_text())["labels"]
            labels["cacheback"]["knobs"] |= knobs
            identity = {"method": labels["cacheback"]["knobs"], **other}
            edit_manifest(folder, labels=labels, identity=identity)
        shutil.rmtree(results / "one")
        return load_runs([results])

    return make_runs


def texts_of(runs, label):
    return setting_texts([(run, label) for run in runs])


def compared(runs):
    (comparison,) = make_comparisons(runs, claims=())
    return comparison


def test_labels_are_named_by_their_own_knobs_that_differ(runs_of):
    runs = runs_of(
        ({"leader_len": 1, "merge": True, "tables": None}, {}),
        ({"leader_len": 2, "merge": True, "tables": None}, {}),
        ({"leader_len": 2, "merge": False, "tables": [{"kind": "dynamic"}]}, {}),
    )
    assert texts_of(runs, "cacheback") == [
        "leader_len=1, merge=true, tables=null",
        "leader_len=2, merge=true, tables=null",
        'leader_len=2, merge=false, tables=[{"kind":"dynamic"}]',
    ]
    # A label without knobs that differ: its runs' settings, by the keys that were typed.
    assert texts_of(runs, "ar")[1] == "method.leader_len=2, method.merge=true, method.tables=null"
    varied = varied_knobs([(run, "cacheback") for run in runs])
    assert [knobs["leader_len"] for knobs in varied] == [1, 2, 2]
    comparison = compared(runs)
    names = [comparison.name_of(entry) for entry in comparison.entries]
    assert len(set(names)) == len(names)
    assert not any("-000" in name or "key" in name for name in names)
    first = runs[0]
    assert setting_texts([(first, label) for label in first.labels]) == ["", ""], (
        "nothing to tell apart"
    )


def test_other_settings_are_named_where_knobs_do_not_differ(runs_of):
    runs = runs_of(
        ({"leader_len": 1}, {"seed": 1, "engine": {"name": "eager"}, "compare": ["pld"]}),
        ({"leader_len": 1}, {"seed": 2, "engine": {"name": "eager"}, "compare": []}),
    )
    assert texts_of(runs, "cacheback") == ["seed=1", "seed=2"]


def test_the_same_settings_twice_are_told_apart_by_their_folders(runs_of):
    comparison = compared(runs_of(*[({"leader_len": 1}, {"seed": 1})] * 2))
    names = [comparison.name_of(entry) for entry in comparison.drafting]
    assert names == ["cacheback (cacheback-000)", "cacheback (cacheback-111)"]


def test_a_sweep_is_of_runs_that_were_told_the_same_besides(runs_of):
    settings = [({"leader_len": leader}, {"seed": seed}) for leader in (1, 2, 3) for seed in (7, 8)]
    comparison = compared(runs_of(*settings, ({"leader_len": 1, "merge": True}, {"seed": 7})))
    cells = {s.fixed_settings: sorted(s.entries) for s in sweeps(comparison, "leader_len")}
    # A setting without others to compare with is no sweep.
    assert cells == {"seed 7": [(1,), (2,), (3,)], "seed 8": [(1,), (2,), (3,)]}


def test_a_setting_measured_twice_leaves_other_figures_to_be_drawn(runs_of, caplog):
    comparison = compared(runs_of(*[({"leader_len": ll}, {}) for ll in (1, 2, 2)]))
    assert own_sweeps(comparison)[1] == []
    assert "leader_len 2 was run twice with the same settings" in caplog.text


@pytest.mark.slow  # over a second
def test_a_sweep_over_two_knobs_ends_in_a_table_and_heatmaps(runs_of, results, capsys):
    runs_of(*[({"leader_len": ll, "follower_len": fl}, {}) for ll in (1, 2) for fl in (10, 9)])
    home = results / "sweep-leader_len-follower_len"
    assert sweep.main([str(results), "-o", str(home)]) == 0
    out = capsys.readouterr().out
    table = out[out.index("\nmethod ") :]  # below the verdict
    rows = [line.partition(")")[0] for line in table.splitlines() if line.startswith("cacheback (")]
    assert rows == [
        f"cacheback (leader_len={ll}, follower_len={fl}" for ll in (1, 2) for fl in (9, 10)
    ]
    for name in ("speedup", "mat"):
        path = home / f"vicuna7b_specbench_leader_len_follower_len_{name}.png"
        assert path.stat().st_size > 5_000
        assert f"  {path.stem}\n" in out
    sheet = pd.read_csv(home / "tables.csv").query("task == 'overall' and label == 'cacheback'")
    cells = sheet[["leader_len", "follower_len"]].astype(int).values.tolist()
    assert sorted(cells) == [[1, 9], [1, 10], [2, 9], [2, 10]]
