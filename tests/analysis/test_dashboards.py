"""The W&B workspace and report as code: they show what is sent, and need no server to be made."""

import json
import re
import sys

import pytest

from analysis import dashboards, publish
from analysis.runs.load import load_runs
from specbench.results.estimate import Estimate
from tests.analysis.folders import GOLDEN

# Theirs, while they import their own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces.*")


@pytest.fixture(scope="module")
def runs():
    pytest.importorskip("wandb_workspaces", reason="the extra [wandb] is not installed")
    return load_runs([GOLDEN / "records"])


@pytest.fixture(scope="module")
def compared(runs):
    return dashboards.subject_of(runs, entity="team")


def parts(made, kind):
    """All parts of a kind in what :func:`dashboards.description` gives."""
    if isinstance(made, dict):
        own = [made] if made.get("kind") == kind else []
        return own + [part for value in made.values() for part in parts(value, kind)]
    if isinstance(made, list):
        return [part for value in made for part in parts(value, kind)]
    return []


def names(made):
    return {metric["name"] for metric in parts(made, "SummaryMetric")}


@pytest.mark.parametrize("make", [dashboards.workspace, dashboards.report])
def test_every_panel_shows_a_key_that_is_sent(make, compared):
    entries = [e for comparison in compared.comparisons for e in comparison.entries]
    sent = {key for entry in entries for key in publish.label_numbers(entry)}
    shown = names(dashboards.description(make(compared)))
    assert shown <= sent
    assert {"speedup", "mat", "tokens_per_s", "tokens_per_pass", "bug", "task/qa/mat"} <= shown


def test_the_workspace_groups_by_setting_and_filters(compared):
    made = dashboards.workspace(compared)
    assert (made.entity, made.project) == ("team", "specbench")
    first, *others = made.sections
    assert first.name.startswith("Speedup")
    assert first.is_open
    assert first.panels[0].groupby.name == "setting"
    assert [each.name for each in made.runset_settings.groupby] == ["setting"]
    filters = made.runset_settings.filters
    wanted = {"model": "vicuna7b", "dataset": "specbench", "timing": "measured"}
    assert all(key in filters and value in filters for key, value in wanted.items())
    assert "Lossless" in [section.name for section in others]


def test_a_sweep_has_parallel_coordinates_and_budget_curves():
    pytest.importorskip("wandb_workspaces", reason="the extra [wandb] is not installed")
    swept = dashboards.subject_of(load_runs([GOLDEN / "experiments" / "cacheback_figure4"]))
    panels = [p for shown in dashboards.sections(swept).values() for p in shown]
    (coordinates,) = (p for p in panels if type(p).__name__ == "ParallelCoordinatesPlot")
    columns = [column.metric.name for column in coordinates.columns]
    assert columns == ["knobs.leader_len", "knobs.follower_len", "mat", "predicted_speedup"]
    scatters = [p for p in panels if type(p).__name__ == "ScatterPlot"]
    assert [p.x.name for p in scatters] == ["tokens_per_pass", "mat"]


def test_the_report_has_the_table_with_its_caption_and_claims(compared):
    made = dashboards.description(dashboards.report(compared))
    text = "\n".join(block["text"] for block in parts(made, "MarkdownBlock"))
    (comparison,) = compared.comparisons
    pld = next(entry for entry in comparison.entries if entry.label == "pld")
    assert str(Estimate(pld.overall["speedup"], pld.overall["speedup_ci"])) in text
    assert re.search(r"\| pld .*\| 1\.53 +\| 1\.75 +\|", text), "claimed speedup and MAT"
    assert "SYNTHETIC RECORDS" in text
    assert all(runset["project"] == "specbench" for runset in parts(made, "Runset"))


def test_a_figure_that_no_run_has_gets_no_panel():
    pytest.importorskip("wandb_workspaces", reason="the extra [wandb] is not installed")
    without = load_runs([GOLDEN / "experiments" / "ngrammys_figure2"])
    assert {run.timing for run in without} == {"none"}
    made = dashboards.description(dashboards.workspace(dashboards.subject_of(without)))
    assert {name.rsplit("/", 1)[-1] for name in names(made)} <= {"mat", *dashboards.VERDICTS}
    assert next(part["name"] for part in parts(made, "Section")).startswith("MAT")


def test_entity_and_project_come_from_the_runs_where_none_is_given(runs):
    node = {"name": "wandb", "entity": "ours", "project": "theirs"}
    runs[0].manifest.config["logger"] = node
    try:
        made = dashboards.subject_of(runs)
        given = dashboards.subject_of(runs, "me", "mine")
    finally:
        del runs[0].manifest.config["logger"]
    assert (made.entity, made.project) == ("ours", "theirs")
    assert (given.entity, given.project) == ("me", "mine")


@pytest.mark.usefixtures("runs")
def test_without_push_a_file_is_written_and_what_to_type_is_said(tmp_path, capsys):
    texts = []
    for name in ("first", "again"):
        path = tmp_path / f"{name}.json"
        assert dashboards.main([str(GOLDEN / "records"), "-o", str(path)]) == 0
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    assert set(json.loads(texts[0])) == {"workspace", "report"}
    out = capsys.readouterr().out
    assert "Nothing was sent" in out
    assert "wandb login" in out
    assert f"analysis.dashboards {GOLDEN / 'records'} --entity NAME" in out


class Saved:
    url = "https://example.invalid/saved"


@pytest.mark.usefixtures("runs")
def test_push_saves_both_for_the_account_s_own_entity(monkeypatch, capsys):
    import wandb
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    saved = []

    def save(made):
        saved.append((type(made).__name__, made.entity))
        return Saved

    class Api:
        default_entity = "account"

    monkeypatch.setattr(ws.Workspace, "save", save)
    monkeypatch.setattr(wr.Report, "save", save)
    monkeypatch.setattr(wandb, "Api", Api)
    assert dashboards.main([str(GOLDEN / "records"), "--push"]) == 0
    assert saved == [("Workspace", "account"), ("Report", "account")]
    assert capsys.readouterr().out.count(Saved.url) == 2


@pytest.mark.usefixtures("runs")
def test_what_goes_wrong_is_reported_with_what_to_type(monkeypatch, capsys):
    def refuse(_):
        raise RuntimeError("no key")

    monkeypatch.setattr(dashboards, "push", refuse)
    assert dashboards.main([str(GOLDEN / "records"), "--push"]) == 1
    err = capsys.readouterr().err
    assert "no key" in err
    assert "wandb login" in err
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert dashboards.main([str(GOLDEN / "records")]) == 2
    assert "[wandb]" in capsys.readouterr().err
    assert dashboards.main([str(GOLDEN / "experiments" / "ngrammys_figure1")]) == 2
    assert "no run in this folder has speeds" in capsys.readouterr().err
