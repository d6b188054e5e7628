"""Records become pictures with the numbers and standings of their tables."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis import figures, residuals
from analysis.figures import pictures_of, task_bars
from analysis.papers.pictures import bar_series
from analysis.plots.pictures import (
    acceptance_picture,
    budget_picture,
    caption_of,
    load_picture,
)
from analysis.runs import leaders
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs, usable_runs
from analysis.runs.sweeps import sweeps, swept_knobs
from tests.analysis.folders import EXPERIMENTS, RECORDS, edit_manifest
from tests.analysis.test_figures import containers, ends, legend, white


@pytest.fixture(scope="module")
def comparison():
    return make_comparisons(load_runs([RECORDS]))[0]


@pytest.fixture(scope="module")
def swept():
    """Runs of N-Grammys over k and w on one data set."""
    runs, _ = usable_runs([EXPERIMENTS / "ngrammys_figure3"])
    return make_comparisons([run for run in runs if run.dataset == "gsm8k"])[0]


def with_knobs(run, **knobs):
    """Change the run's knobs, by label."""
    labels = {
        label: info.model_copy(update={"knobs": knobs.get(label, info.knobs)})
        for label, info in run.manifest.labels.items()
    }
    manifest = run.manifest.model_copy(update={"labels": labels, "overrides": []})
    return replace(run, manifest=manifest)


def with_verdicts(monkeypatch, **verdicts):
    """Set the verdicts against plain decoding by label; others are undecided."""

    def over_plain(comparison):
        entries = comparison.ranked
        return {(e.run.path, e.label): verdicts.get(e.label, "undecided") for e in entries}

    monkeypatch.setattr("analysis.plots.pictures.over_plain", over_plain)


def test_the_command_writes_pictures_and_says_what_went(results, monkeypatch, capsys):
    monkeypatch.setattr(figures, "pictures_of", lambda c: [("mat", task_bars(c, "mat"))])
    assert figures.main([str(results)]) == 0
    names = {path.name for path in (results / "figures").iterdir()}
    assert names == {f"vicuna7b_specbench_mat.{suffix}" for suffix in ("png", "pdf")}
    assert "vicuna7b_specbench_mat" in capsys.readouterr().out
    for option in ("--width", "--caption"):
        with pytest.raises(SystemExit) as stopped:
            figures.main([str(results), option, "page"])
        assert stopped.value.code == 2 and option in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cacheback_table1", "ngrammys_figure1", "../records"])
def test_a_second_machine_has_figures_of_its_own(name, monkeypatch):
    monkeypatch.setattr(figures, "pictures_of", lambda c: [("mat", None)])
    runs, _ = usable_runs([EXPERIMENTS / name], surfaces=True)
    machine = {"hardware": {"cpu": "Other CPU", "cpus_usable": 2, "gpus": []}}
    others = [
        replace(r, path=r.path / "else", manifest=r.manifest.model_copy(update=machine))
        for r in runs
    ]
    once = [stem for stem, _ in figures.figures_of(runs)]
    twice = [stem for stem, _ in figures.figures_of([*runs, *others])]
    assert {f"{stem}_2" for stem in once} | set(once) == set(twice)
    assert len(twice) == 2 * len(once) > 0


def test_bars_and_ranks_are_the_table_s_numbers_and_standings(comparison, monkeypatch):
    with_verdicts(monkeypatch, cacheback="faster", no_frozen="slower")
    drawn = dict(pictures_of(comparison))
    assert list(drawn) == ["ranked", "mat_speedup", "speedup_by_task", "mat"]
    entries = sorted(comparison.drafting, key=lambda e: -e.overall["speedup"])
    labels = [entry.label for entry in entries]
    bars = containers(drawn["speedup_by_task"].axes[0])
    dots = containers(drawn["mat_speedup"].axes[0], "has_yerr")
    (axes,) = drawn["ranked"].axes
    assert list(bars) == [text.get_text() for text in axes.get_yticklabels()] == labels
    for entry, rank in zip(entries, axes.containers, strict=True):
        overall = entry.overall
        expected = [entry.rows[task]["speedup"] for task in [*comparison.tasks, "overall"]]
        assert [bar.get_height() for bar in bars[entry.label]] == expected
        assert rank.lines[0].get_xdata()[0] == overall["speedup"]
        position = dots[entry.label].lines[0].get_xydata()[0]
        assert tuple(position) == (overall["mat"], overall["speedup"])
        hollow = entry.label == "pld"
        assert (bars[entry.label][0].get_facecolor() == (1, 1, 1, 1)) == hollow
        assert (rank.lines[0].get_markerfacecolor() == "white") == hollow
    title = drawn["speedup_by_task"].title
    assert title.startswith(f"{labels[0]} has the highest speedup in ")


def test_no_speedups_without_a_baseline_and_a_label_of_two_runs_is_drawn_for_each(results):
    edit_manifest(results / "one", baseline=None)
    (run,) = load_runs([results])
    (comparison,) = make_comparisons([run])
    assert [name for name, _ in pictures_of(comparison)] == ["mat"]
    (comparison,) = make_comparisons([run, replace(run, path=run.path.with_name("again"))])
    assert sorted(series.name for series in bar_series([(comparison, "overall")], "mat")) == sorted(
        f"{label} ({where})"
        for label in ("cacheback", "no_frozen", "pld")
        for where in ("one", "again")
    )


# --- a sweep --------------------------------------------------------------------------------------


def test_two_knobs_end_in_heatmaps_with_the_sweep_s_numbers(swept, comparison, monkeypatch):
    assert swept_knobs(swept) == ["k", "w"]
    drawn = dict(pictures_of(swept))
    assert list(drawn) == ["k_w_speedup", "k_w_mat"]
    (sweep,) = sweeps(swept, "k", "w")
    for key in ("speedup", "mat"):
        table = [[sweep.entries[k, w].overall[key] for w in (2, 6)] for k in (1, 5)]
        assert np.allclose(drawn[f"k_w_{key}"].axes[0].images[0].get_array(), table)
        k, w = max(sweep.entries, key=lambda cell: sweep.entries[cell].overall[key])
        assert f"{np.max(table):.2f}, at k {k}, w {w}" in drawn[f"k_w_{key}"].title
    assert "predicted" in drawn["k_w_speedup"].axes[-1].get_ylabel(), "without its caption, too"
    assert "error, which is unknown" in drawn["k_w_speedup"].caption
    # Labels outside the sweep are drawn too.
    monkeypatch.setattr(figures, "overview_pictures", lambda _: [("ranked", None)])
    (pld,) = [entry for entry in comparison.drafting if entry.label == "pld"]
    with_pld = replace(swept, entries=[*swept.entries, pld])
    assert {"k_w_speedup", "ranked"} <= {name for name, _ in pictures_of(with_pld)}


def test_one_knob_ends_in_lines_whose_title_names_the_highest(swept):
    runs = [run for run in swept.runs if run.knobs("ngrammys").get("w") == 2]
    (line,) = make_comparisons(runs)
    ((name, figure),) = pictures_of(line)
    assert name == "k"
    values = {e.knobs["k"]: e.overall["speedup"] for e in line.drafting}
    drawn = containers(figure.axes[0], "has_yerr")["ngrammys"].lines[0]
    assert dict(drawn.get_xydata()) == pytest.approx(values)
    highest = max(values, key=values.get)
    assert f"{values[highest]:.2f}, at k {highest}" in figure.title
    assert legend(figure)[0] == "ngrammys", "methods before marks"


def test_an_error_that_all_predictions_share_leaves_no_cell_undecided(swept):
    """Cells are compared on their prompts, although each prediction may miss by 30 %."""
    speeds = {(1, 2): 110.0, (1, 6): 120.0, (5, 2): 150.0, (5, 6): 130.0}

    def predicted(run):
        knobs = run.knobs("ngrammys")
        speed = {"ar": 100.0, "ngrammys": speeds[knobs["k"], knobs["w"]]}
        times = [(r, (r.n_new - 1) / speed[r.label]) for r in run.records]
        records = [
            r.replace(decode_s=s, wall_s=r.prefill_s + s, prediction_error=0.3) for r, s in times
        ]
        return replace(run, records=records)

    (repredicted,) = make_comparisons([predicted(run) for run in swept.runs])
    (sweep,) = sweeps(repredicted, "k", "w")
    assert sweep.leaders("speedup") == [(5, 2)]
    everyone = leaders.leaders(list(sweep.entries.values()), "speedup")
    assert len(everyone) == 4, "by itself each may be anywhere within its prediction's error"
    assert "the predictions' error, 30.0%" in caption_of(repredicted)


# --- budgets, heads, loads ------------------------------------------------------------------------


def budgets_of(comparison, *settings, run=None):
    """Draw the comparison's PLD with these settings as its entries."""
    (pld,) = [entry for entry in comparison.drafting if entry.label == "pld"]
    run = run or pld.run
    entries = [
        replace(pld, run=with_knobs(replace(run, path=run.path / f"{i}"), pld=knobs))
        for i, knobs in enumerate(settings)
    ]
    return budget_picture(replace(comparison, runs=[e.run for e in entries], entries=entries))


BUDGETS = [{"num_tokens": n} for n in (2, 4, 8)]


def test_settings_are_joined_where_they_differ_in_one_knob_and_hollow_where_undecided(
    comparison, monkeypatch
):
    for verdict, hollow in (("faster", 0), ("slower", 0), ("undecided", 3)):
        with_verdicts(monkeypatch, pld=verdict)
        figure = budgets_of(comparison, *BUDGETS)
        assert len(white(figure.axes[0])) == hollow
        assert any(name.startswith("hollow") for name in legend(figure)) == bool(hollow)
    drawn = containers(figure.axes[0], "has_yerr")["pld"].lines[0]
    assert len(drawn.get_xdata()) == 3 and drawn.get_linestyle() == "-"
    two_knobs = budgets_of(comparison, *({**b, "max_ngram": b["num_tokens"]} for b in BUDGETS))
    assert containers(two_knobs.axes[0], "has_yerr")["pld"].lines[0].get_linestyle() == "None"
    assert budgets_of(comparison, *BUDGETS[:1] * 3) is None


def test_settings_with_wrong_outputs_are_not_drawn(comparison):
    (run,) = comparison.runs
    bug = run.records[0].lossless.replace(verdict="bug")
    records = [r.replace(lossless=bug) if r.label == "pld" else r for r in run.records]
    assert budgets_of(comparison, *BUDGETS, run=replace(run, records=records)) is None


def test_acceptance_is_the_records_share_by_position():
    (board,) = load_runs([EXPERIMENTS / "specbench_board"])
    assert acceptance_picture(make_comparisons([with_knobs(board)])[0]) is None, "there is no head"
    run = with_knobs(board, eagle2={"head": "eagle"}, medusa={"head": "medusa"})
    (heads,) = make_comparisons([run], claims=())
    every, after = (containers(a, "has_yerr") for a in acceptance_picture(heads).axes)
    assert set(every) == {"eagle2", "medusa"}, "pld has no head"
    for name in every:
        steps = np.concatenate([r.committed_per_step for r in run.records if r.label == name])
        for depth, share in every[name].lines[0].get_xydata():
            assert share == pytest.approx((steps > depth).mean())
        for depth, share in after[name].lines[0].get_xydata():
            assert share == pytest.approx((steps > depth).sum() / (steps >= depth).sum())
    uncounted = [record.replace(committed_per_step=()) for record in run.records]
    (empty,) = make_comparisons([replace(run, records=uncounted)], claims=())
    assert acceptance_picture(empty) is None


@pytest.mark.parametrize(
    ("verdicts", "title"),
    [
        ({}, "undecided at 1"),
        ({"pld": "faster"}, "faster at 1"),
        ({"pld": "faster", "cacheback": "too few"}, "faster at 1"),
        (dict.fromkeys(("pld", "cacheback", "no_frozen"), "slower"), "slower at 1"),
        ({"pld": "slower", "cacheback": "too few", "no_frozen": "too few"}, "too few prompts"),
    ],
)
def test_a_load_s_title_is_its_standing_and_not_its_ratio(comparison, monkeypatch, verdicts, title):
    with_verdicts(monkeypatch, **verdicts)
    assert min(entry.overall["speedup"] for entry in comparison.drafting) > 1
    figure = load_picture([comparison])
    assert title in figure.title and figure.title.count(" at ") == 1
    hollow = sum(verdicts.get(e.label, "") not in ("faster", "slower") for e in comparison.ranked)
    assert len(white(figure.axes[0])) == hollow
    drawn = containers(figure.axes[0], "has_yerr")
    for entry in comparison.drafting:
        assert ends(drawn[entry.label]) == [pytest.approx(entry.overall["speedup_ci"])]


def test_residuals_are_drawn_with_the_measured_interval_and_are_none_on_the_diagonal(comparison):
    row = {"label": "pld", "method": "pld", "speedup": 1.5, "speedup_ci": (1.2, 1.9)}
    frame = pd.DataFrame([row | {"speedup_predicted": 1.5, "residual": 0.0}])
    (axes,) = residuals.draw(frame, comparison.runs[0]).axes
    dot = containers(axes, "has_xerr")["pld"]
    assert dot.lines[0].get_xydata().tolist() == [[1.5, 1.5]]
    assert ends(dot) == [pytest.approx((1.2, 1.9))]
    assert "predicted" in axes.get_ylabel() and "measured" in axes.get_xlabel()
