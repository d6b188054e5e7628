"""The papers' tables and figures: their runs and numbers, and that each experiment has one."""

import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis import tables
from analysis.papers import REPRODUCTIONS, by_reproduction
from analysis.runs.acceptance import (
    by_depth,
    by_position,
    conditional_by_depth,
    stream_parts,
)
from analysis.runs.estimates import mat, over_repeats, pooled_ratio, tokens_per_s
from analysis.runs.load import load_runs, load_surfaces, usable_runs
from analysis.tabular.table import ResultTable
from specbench.results.cells import NumberCell
from specbench.results.statistics.summary import summarize
from tests.analysis.folders import EXPERIMENTS, GOLDEN, edit_manifest

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf" / "experiment"
# Experiments of our own have no paper's size.
PAPERS = {path.stem for path in (CONF / "paper").glob("*.yaml")}


def reproduction(name):
    return next(candidate for candidate in REPRODUCTIONS if candidate.name == name)


@pytest.fixture(scope="module")
def run():
    (loaded,) = load_runs([EXPERIMENTS / "token_recycling_table1"])
    return loaded


def test_every_experiment_has_an_artifact_and_says_its_command():
    assert {name for entry in REPRODUCTIONS for name in entry.experiments} == PAPERS
    for name in PAPERS:
        for folder, scale in ((".", ""), ("paper", " scale=paper")):
            path = CONF / folder / f"{name}.yaml"
            first, command = path.read_text().splitlines()[:2]
            assert first == "# @package _global_"
            assert command.startswith(f"# python run.py experiment={name}{scale}"), path


def test_runs_are_told_apart_by_their_experiment():
    runs, _ = usable_runs([EXPERIMENTS, GOLDEN / "records"], surfaces=True)
    reproduced, others = by_reproduction(runs)
    assert [entry for entry, _ in reproduced] == [*REPRODUCTIONS]
    assert [run.path.name for run in others] == ["synthetic"]
    for entry, members in reproduced:
        assert {run.experiment for run in members} == set(entry.experiments)


def test_the_grid_of_speedups_serves_for_tokens_per_call_where_these_were_not_run():
    for run_here, used in (((3, 5), "ngrammys_figure5"), ((3,), "ngrammys_figure3")):
        runs = load_runs([EXPERIMENTS / f"ngrammys_figure{number}" for number in run_here])
        members = {entry.name: members for entry, members in by_reproduction(runs)[0]}
        assert {run.experiment for run in members["ngrammys_figure5"]} == {used}
    drawn = reproduction("ngrammys_figure5").figures(members["ngrammys_figure5"])
    assert [part for part, _ in drawn] == ["mistral7b"]


def test_a_surface_without_an_experiment_is_no_artifact_and_a_damaged_one_exits_2(tmp_path, capsys):
    home = shutil.copytree(EXPERIMENTS / "ngrammys_figure1", tmp_path / "cost")
    assert len(load_surfaces([tmp_path])) == 1
    (home / "surface.json").write_text("{")
    assert tables.main([str(tmp_path)]) == 2
    assert "surface.json cannot be read" in capsys.readouterr().err
    shutil.copy(EXPERIMENTS / "ngrammys_figure1" / "surface.json", home)
    edit_manifest(home, overrides=[])
    assert load_surfaces([tmp_path]) == []


def test_claims_of_other_artifacts_stay_away():
    (run,) = load_runs([EXPERIMENTS / "cacheback_table1"])
    (comparison,) = reproduction("cacheback_table1").comparisons([run])
    assert {entry.claim.exhibit for entry in comparison.entries if entry.claim} == {"table1"}
    assert comparison.not_run == []
    (comparison,) = reproduction("token_recycling_table1").comparisons([run])
    assert "token_recycling" in {claim.method for claim in comparison.not_run}


def test_a_caption_says_for_which_model_and_hardware_its_claims_are():
    for name, text in (
        ("cacheback_table1", "Claimed for Vicuna-7B, hardware: 1 to 4 RTX 4090"),
        ("card_table3", "3 A800-80GB with NVLink"),
        ("token_recycling_table1", "1 A100-80GB (Turning Trash into Treasure)"),
    ):
        first, *_ = reproduction(name).tables(load_runs([EXPERIMENTS / name]))
        assert text in first.caption.split("\n")[0]


def with_wrong_outputs(run, label):
    records = [
        r.replace(lossless=r.lossless.replace(verdict="bug")) if r.label == label else r
        for r in run.records
    ]
    return replace(run, records=records)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("cacheback_table1", "no_frozen"),
        ("cacheback_figure3", "pld"),
        ("card_figure5", "card"),
        ("specbench_board", "pld"),
        ("ssd_stream", "rest"),
        ("token_recycling_figure4", "token_recycling"),
    ],
)
def test_a_label_with_wrong_outputs_is_in_no_picture(name, label):
    runs = load_runs([EXPERIMENTS / name])

    def drawn(runs, left_out=""):
        names = []
        for _, figure in reproduction(name).figures(runs):
            assert left_out in figure.caption.split("\n")[0]
            for axes in figure.axes:
                names += [str(c.get_label()) for c in axes.containers]
                names += [text.get_text() for text in axes.get_yticklabels()]
        return set(names)

    gone = drawn(runs) - drawn([with_wrong_outputs(run, label) for run in runs], label)
    methods = {name for run in runs for name in run.labels if name != run.baseline}
    assert gone & methods == {label}


@pytest.mark.parametrize("reproduction", REPRODUCTIONS, ids=lambda entry: entry.name)
def test_figures_have_words_and_units_and_are_not_drawn_where_plain_decoding_is_wrong(reproduction):
    runs, _ = usable_runs([EXPERIMENTS / name for name in reproduction.experiments], surfaces=True)
    drawn = list(reproduction.figures(runs))
    assert drawn or "figure" not in reproduction.name
    for _, figure in drawn:
        assert figure.title and "SYNTHETIC" in figure.caption
        for axes in figure.axes:
            if axes.axison:
                assert axes.get_ylabel() or axes.get_xlabel() or len(figure.axes) > 2
    wrong = [with_wrong_outputs(run, run.baseline) for run in runs if run.records]
    assert list(reproduction.figures(wrong)) == []


def test_a_setting_with_wrong_outputs_leaves_a_gap_in_a_heatmap():
    first, *runs = load_runs([EXPERIMENTS / "cacheback_figure4"])

    def numbers(runs):
        drawn = reproduction("cacheback_figure4").figures(runs)
        return [int(np.isfinite(f.axes[0].images[0].get_array()).sum()) for _, f in drawn]

    assert numbers([first, *runs]) == [6, 6]
    assert numbers([with_wrong_outputs(first, "cacheback"), *runs]) == [5, 5]
    assert numbers([with_wrong_outputs(run, "cacheback") for run in [first, *runs]]) == []


def test_settings_that_may_be_as_fast_as_the_best_are_named():
    (run,) = (r for r in load_runs([EXPERIMENTS / "ngrammys_table1"]) if r.dataset == "mtbench")
    cost = {"ar": 1.0, "k10_w10": 0.8, "k5_w4": 0.4}  # seconds a token, where the two are far apart
    parted = [
        r.replace(decode_s=cost[r.label] * (r.n_new - 1 + 0.01 * r.repeat)) for r in run.records
    ]

    def best_notes(run):
        (table,) = reproduction("ngrammys_table1").tables([run])
        return [note for note in table.notes if note.startswith("(k*, w*) of")]

    best = "(k*, w*) of mistral7b on mtbench: (5, 4)"
    assert best_notes(run) == [f"{best} or (10, 10), which the data cannot part."]
    assert best_notes(replace(run, records=parted)) == [f"{best}."]


def test_a_model_that_the_paper_does_not_have_gets_all_of_its_claims_below():
    (run,) = (r for r in load_runs([EXPERIMENTS / "ngrammys_table1"]) if r.dataset == "mtbench")
    other = replace(run, records=[r.replace(model="smollm2_135m") for r in run.records])
    (page,) = reproduction("ngrammys_table1").tables([other])
    claimed = {(row[0], row[2]) for row in page.rows if row[-1] == "other model"}
    assert {model for model, _ in claimed} == {"phi3_mini", "mistral7b", "vicuna13b"}
    assert len(claimed) == 6
    assert {row[-1] for row in page.rows if row[0] == "smollm2_135m"} == {""}


# --- numbers that a summary does not have ---------------------------------------------------------


def rows_overall(records, run):
    rows = summarize(records, run.labels, "ar", seed=run.seed)
    return {row["label"]: row for row in rows if row["task"] == "overall"}


def test_estimates_agree_with_the_summary(run):
    row = rows_overall(run.records, run)["pld"]
    records = [record for record in run.records if record.label == "pld"]
    assert (mat(records, run.seed).value, tokens_per_s(records).value) == pytest.approx(
        (row["mat"], row["tokens_per_s"])
    )
    assert mat(records, run.seed).interval == pytest.approx(row["mat_ci"])


def test_intervals_are_left_out_or_bounded_and_a_table_says_so(run):
    assert pooled_ratio([], lambda r: 1.0, lambda r: 1.0) == NumberCell(None)
    assert pooled_ratio(run.records, lambda r: 1.0, lambda r: 0.0) == NumberCell(None)
    share = pooled_ratio(run.records, lambda r: r.n_new - 1, lambda r: r.n_new, at_most=1)
    assert share.interval[0] < share.value < share.interval[1] <= 1
    records = [record for record in run.records if record.label == "pld"]
    cases = sorted({record.case_id for record in records})
    few = [record for record in records if record.case_id in cases[:2]]
    assert (mat(few).interval, tokens_per_s(few).interval) == (None, None)
    cells = {"MAT [95 %]": mat(few), "x": NumberCell(0.71, (0.71, 0.71))}
    page = ResultTable.from_rows("t", "c", [cells], ["a note"])
    assert [str(cell).partition(" ")[2] for cell in page.rows[0]] == ["[–]", "[=]"]
    assert [*page.notes] == ["a note"]
    assert "fewer than 3 cases" in " ".join(page.foot) and "without width" in " ".join(page.foot)
    assert str(NumberCell(0.0001, (0.00008, 0.00012), 4)) == "0.0001 [0.0001, 0.0001]"


def test_spread_over_repeats_by_hand():
    (run, *_) = load_runs([EXPERIMENTS / "ngrammys_table1" / "mtbench"])
    repeats = [[r for r in run.records if r.repeat == repeat] for repeat in range(3)]
    ratios = [rows_overall(records, run)["k5_w4"]["speedup"] for records in repeats]
    mean_and_sd = statistics.mean(ratios), statistics.stdev(ratios)
    assert over_repeats(run.records, "k5_w4", "ar") == pytest.approx(mean_and_sd)
    assert over_repeats(repeats[0], "k5_w4", "ar") is None


def test_acceptance_by_depth_by_hand(run):
    records = [record for record in run.records if record.label == "pld"]
    steps = [n for record in records for n in record.committed_per_step]
    shares = {depth: share.value for depth, share in by_depth(records)}
    assert max(shares) == max(steps) - 1
    assert [*shares.values()] == pytest.approx(
        [sum(n > depth for n in steps) / len(steps) for depth in shares]
    )
    # Depths: none at every third step, else as deep as what was accepted, or one deeper.
    seen, depths = [], {}
    for record in records:
        accepted = [n - 1 for n in record.committed_per_step]
        deep = [0 if not n and i % 3 == 0 else n + i % 2 for i, n in enumerate(accepted)]
        depths[record.key] = deep
        seen += zip(accepted, deep, strict=True)
    drafts = [accepted for accepted, depth in seen if depth]
    assert 0 < len(drafts) < len(seen)
    marginal = [share.value for _, share in by_depth(records, depths=depths)]
    assert sum(marginal) == pytest.approx(sum(drafts) / len(drafts))
    for d, share in conditional_by_depth(records, depths=depths):
        reached = [accepted for accepted, depth in seen if accepted >= d - 1 and depth >= d]
        assert share.value == pytest.approx(sum(n >= d for n in reached) / len(reached))


def test_acceptance_by_position_and_part_of_the_stream(run):
    records = [record for record in run.records if record.label == "pld"]
    stretches = by_position(records, width=8)
    assert [at for at, _ in stretches] == [4.0 + 8 * i for i in range(len(stretches))]
    ((_, whole),) = by_position(records, width=10_000)
    assert whole.value == pytest.approx(mat(records).value), "one stretch that holds everything"
    parts = stream_parts(records, 5)
    turns = [turn for _, members in parts for turn in members]
    assert turns == sorted(records, key=lambda r: (r.stream_index, r.turn))
    sizes = [size for size, _ in parts]
    assert sizes == sorted(sizes)
    assert len(stream_parts(records[:2], 5)) == 2


# --- missing counters -----------------------------------------------------------------------------


def draft_model_rows(change):
    """Make the table of resources by method, after ``change`` of every record's counters."""
    runs = load_runs([EXPERIMENTS / "draft_models"])
    for run in runs:
        run.records[:] = [r.replace(drafter=change(r.method, r.drafter)) for r in run.records]
    table = reproduction("draft_models").tables(runs)[0]
    return {row["method"]: row for row in table.frame.to_dict("records")}


def test_a_union_shows_what_its_parts_counted_and_nobody_s_counts_are_absent_and_not_0():
    """A union's counters bear the part's name; what a part counted is the union's."""
    plain = draft_model_rows(lambda method, counts: counts)
    named = draft_model_rows(lambda method, counts: {f"{method}.{k}": counts[k] for k in counts})
    assert plain["card"]["hit rate [95 %]"].value > 0
    assert named == plain
    counted = ["hit rate [95 %]", "draft passes [95 %]", "draft tokens [95 %]", "devices"]
    for row in draft_model_rows(lambda method, counts: {"accepted_from_pld": 3}).values():
        assert {str(row[column]) for column in [*counted, "draft Params × L_new"]} == {"–"}
    (run,) = load_runs([EXPERIMENTS / "card_table3"])
    run.records[:] = [r.replace(drafter={}) if r.label == "sps" else r for r in run.records]
    (table,) = reproduction("card_table3").tables([run])
    (row,) = table.frame[table.frame["method"] == "sps"].to_dict("records")
    drafted = [h for h in row if "draft" in h and "claimed" not in h]
    assert {str(row[heading]) for heading in drafted} == {"–"}


def test_a_part_that_drafts_beside_the_target_has_no_share_of_time_unless_emulated():
    (phased,) = [run for run in load_runs([EXPERIMENTS / "draft_models"]) if run.phases]
    column = "draft share [95 %]"

    def share():
        table = reproduction("draft_models").tables([phased])[0].frame
        return {row["method"]: row[column].value for row in table.to_dict("records")}

    emulated = share()
    assert min(emulated.values()) > 0
    phased.manifest.model.overlap = "thread"
    phased.manifest.model.overlapping = ["card", "pearl"]
    assert share() == emulated | {"card": None, "pearl": None}
    phased.manifest.model.overlapping = None
    assert set(share().values()) == {None}, "it is not known who overlapped"


def test_table_3_compares_speed_on_its_own_model_and_hardware():
    (run,) = load_runs([EXPERIMENTS / "card_table3"])
    machine = {"gpus": [{"name": "NVIDIA A800-SXM4-80GB"}] * 3}
    model = run.manifest.model.model_copy(
        update={"device": "cuda:0", "passes": {"engine": "eager"}}
    )
    there = replace(
        run, manifest=run.manifest.model_copy(update={"hardware": machine, "model": model})
    )
    llama2 = replace(there, records=[r.replace(model="llama2_70b") for r in there.records])
    for measured, card, opt_tree in (
        (run, "not compared", "other model"),
        (there, "disagrees", "other model"),
        (llama2, "other model", "cannot tell"),
    ):
        (table,) = reproduction("card_table3").tables([measured])
        verdicts = {row[1]: row[-1] for row in table.rows}
        assert (verdicts["card"], verdicts["opt_tree"]) == (card, opt_tree)
