"""No table, panel, section or W&B key mixes predicted times with measured ones.

Nor do claims of other models or hardware on a bar. Golden runs of every kind of table and figure
are taken, as measured and as predicted, and everything that is made of both is looked through.
"""

import csv
import dataclasses
import functools
import re

import pytest

from analysis import dashboards, figures, publish, report, tables
from analysis.papers import REPRODUCTIONS, by_reproduction
from analysis.papers.pictures import claims_text, task_panel
from analysis.runs import comparisons, estimates
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import Run, usable_runs
from specbench.results.conditions import SENTENCES
from specbench.results.manifest import ModelInfo
from specbench.results.names import display_name
from specbench.results.statistics.bootstrap import log_ratios
from tests.analysis.folders import EXPERIMENTS, RECORDS, claim

PREDICTED = SENTENCES["PREDICTED"]
# What a predicted run's numbers are multiplied by, so that they are known wherever they turn up.
FACTOR = 1000.0
# One experiment of each kind of table and figure.
EACH_KIND = (
    "cacheback_figure3", "cacheback_figure4", "cacheback_table1", "card_figure5", "card_figure6",
    "draft_models", "ngrammys_figure2", "ngrammys_table1", "specbench_board", "ssd_store_size",
    "token_recycling_figure4",
)  # fmt: skip


def predicted(run: Run) -> Run:
    """Copy the run with predicted times, a thousandth of the measured ones."""
    times = ("prefill_s", "decode_s", "wall_s")
    records = [
        r.replace(timing="predicted", **{name: getattr(r, name) / FACTOR for name in times})
        for r in run.records
    ]
    return dataclasses.replace(
        run, path=run.path.with_name(f"{run.path.name}_predicted"), records=records
    )


@pytest.fixture(scope="module", autouse=True)
def _few_resamples():
    """Resample little, since no test here checks intervals."""
    with pytest.MonkeyPatch.context() as patch:
        few = functools.partial(comparisons.summarize, n_resamples=20)
        patch.setattr(comparisons, "summarize", few)
        patch.setattr(estimates, "log_ratios", functools.partial(log_ratios, n_resamples=20))
        yield


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """Golden runs, and a predicted copy of each measured one."""
    originals, _ = usable_runs([*(EXPERIMENTS / name for name in EACH_KIND), RECORDS])
    return [*originals, *(predicted(r) for r in originals if r.records and r.timing == "measured")]


@pytest.fixture(scope="module")
def synthetic(runs) -> Run:
    return next(run for run in runs if run.path.name == "synthetic")


def says(text: str) -> set[str]:
    """Return the kinds of times in a caption, by its comparisons' lines."""
    lines = [line for line in text.splitlines() if re.search(r" on \S+.*: \d+ .*cases?\.", line)]
    return {"predicted" if PREDICTED in line else "measured" for line in lines}


def test_no_table_of_a_paper_has_both(runs):
    reproduced, _ = by_reproduction(runs)
    kinds = {reproduction.name: set() for reproduction in REPRODUCTIONS}
    for reproduction, members in reproduced:
        assert len({run.timing for run in members}) == 1, reproduction.name
        for table in reproduction.tables(members):
            assert len(says(table.caption)) <= 1, table.title
            kinds[reproduction.name] |= says(table.caption)
    assert sum(timings == {"measured", "predicted"} for timings in kinds.values()) > 5


@pytest.mark.slow  # over a second
def test_no_figure_has_both_and_no_golden_bar_bears_a_claim(runs):
    """The golden runs' processor is none that a claim is about."""
    claimed: set[str] = set()
    drawn = []
    for stem, figure in figures.figures_of(runs):
        drawn.append((stem, figure.caption))
        with_bars = [axes for axes in figure.axes if axes.patches]
        claimed |= {line.get_label() for axes in with_bars for line in axes.lines}
    assert len({stem for stem, _ in drawn}) == len(drawn)
    assert all(len(says(caption)) <= 1 for _, caption in drawn)
    kinds = [kind for _, caption in drawn for kind in says(caption)]
    assert min(kinds.count("measured"), kinds.count("predicted")) > 5
    assert not {label for label in claimed if label.startswith("claimed")}


def test_no_file_of_tables_has_both(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.runs.cli.usable_runs", lambda *_, **__: (runs, []))
    assert tables.main([str(tmp_path), "-o", str(tmp_path / "out"), "--csv"]) == 0
    files = {path.stem: path.read_text() for path in (tmp_path / "out").iterdir()}
    for stem in ("tables", "cacheback_table1"):
        assert {stem, f"{stem}_predicted"} <= files.keys()
    speeds = {
        stem: [float(row["tokens_per_s"]) for row in csv.DictReader(files[stem].splitlines())]
        for stem in ("tables", "tables_predicted")
    }
    assert max(speeds["tables"]) < min(speeds["tables_predicted"])


def test_no_part_of_a_report_has_both(runs, monkeypatch):
    given: list[set[str]] = []
    real = report.comparison_table

    def keep(*compared):
        given.append({comparison.timing for comparison in compared})
        return real(*compared)

    monkeypatch.setattr(report, "comparison_table", keep)
    monkeypatch.setattr("analysis.papers.pictures.KINDS", {})
    monkeypatch.setattr(report, "pictures_of", lambda _: iter(()))
    # A few of each kind: a section stands for every table that is looked at above.
    chosen = ("cacheback_table1", "cacheback_figure4", "ngrammys_figure2")
    page = report.page([run for run in runs if run.experiment in chosen])
    assert "Cacheback, Table 1: predicted times" in page
    assert all(len(timings) == 1 for timings in given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces.*")  # theirs
def test_the_wandb_report_has_a_part_for_each(synthetic):
    pytest.importorskip("wandb_workspaces", reason="the extra [wandb] is not installed")
    both = [synthetic, predicted(synthetic)]
    page = dashboards.report(dashboards.Subject.from_runs(both, entity="team"))
    (text,) = (b.text for b in page.blocks if "###" in str(getattr(b, "text", "")))
    parts = text.split("### ")[1:]
    assert [PREDICTED in part for part in parts] == [False, True]
    assert ["predicted times" in part.splitlines()[0] for part in parts] == [False, True]


def test_nothing_that_is_sent_of_a_predicted_run_has_a_measured_one_s_key(synthetic, monkeypatch):
    monkeypatch.setattr(publish, "pictures_of", lambda _: [("speedup_by_task", None)])
    sent = [[*publish.wandb_runs([run])] for run in (synthetic, predicted(synthetic))]
    keys = [{k for c in contents for k in (*c.summary, *c.tables, *c.figures)} for contents in sent]
    both = {key.rsplit("/", 1)[-1] for key in keys[0] & keys[1]}
    assert not {key for key in both if "speed" in key or "tokens_per_s" in key or key == "cases"}
    assert {"predicted_cases", "predicted_speedup", "predicted_verdict"} <= keys[1]


# --- claims on bars -------------------------------------------------------------------------------


def on(run: Run, gpu: str, engine: str = "eager") -> Run:
    model = ModelInfo(device="cuda", passes={"engine": engine})
    hardware = {"gpus": [{"name": gpu}]}
    return dataclasses.replace(
        run, manifest=run.manifest.model_copy(update={"model": model, "hardware": hardware})
    )


RTX = "NVIDIA GeForce RTX 4090"


@pytest.mark.parametrize(
    ("gpu", "change", "run_with", "drawn"),
    [
        (RTX, {}, {}, [1.5, 1.86, 2.42]),
        (RTX, {"qualifier": "up to"}, {}, []),
        # Other hardware, another model, predicted: on no bar.
        ("NVIDIA A100-SXM4-80GB", {}, {}, []),
        (RTX, {"model": "vicuna13b"}, {}, []),
        (RTX, {}, {"timing": "predicted"}, []),
        # A speed that is another ratio than the bar's.
        (RTX, {}, {"estimator": "paired"}, [2.42]),
        (RTX, {}, {"engine": "graph"}, [2.42]),
    ],
)
def test_a_claim_of_the_same_kind_alone_stands_on_its_bar(synthetic, gpu, change, run_with, drawn):
    run = on(synthetic, gpu, run_with.get("engine", "eager"))
    run = predicted(run) if "timing" in run_with else run
    stated = claim(method="pld", **change)
    (comparison,) = make_comparisons([run], run_with.get("estimator", "end_to_end"), [stated])
    series = [line for key in ("mat", "speedup") for line in task_panel(comparison, key).series]
    points = [point for line in series for point in line.claimed]
    assert sorted(p.y for p in points) == drawn
    named = f"Claimed for {display_name(stated.model)}, hardware: h (t)."
    assert claims_text([comparison], "mat", "speedup") == (named if drawn else "")
