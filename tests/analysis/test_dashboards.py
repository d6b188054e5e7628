"""The W&B workspace and report as code: they show what is sent, and need no server to be made."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from analysis import dashboards, publish
from analysis.runs.load import load_runs
from tests.analysis.folders import GOLDEN

# Theirs, while they import their own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces.*")


@pytest.fixture(scope="module", autouse=True)
def _library():
    pytest.importorskip("wandb_workspaces", reason="the extra [wandb] is not installed")


@pytest.fixture(scope="module")
def runs():
    return load_runs([GOLDEN / "records"])


@pytest.fixture(scope="module")
def subject(runs):
    return dashboards.Subject.from_runs(runs, entity="team")


def parts(page, kind):
    """Collect all parts of a kind in a workspace or a report, as dictionaries."""
    if dataclasses.is_dataclass(page):
        fields = {f.name: getattr(page, f.name) for f in dataclasses.fields(page)}
        matches = [fields] if type(page).__name__ == kind else []
        return matches + parts(list(fields.values()), kind)
    if isinstance(page, list | tuple):
        return [part for value in page for part in parts(value, kind)]
    return []


def names(page):
    return {metric["name"] for metric in parts(page, "SummaryMetric")}


@pytest.mark.parametrize("make", [dashboards.workspace, dashboards.report])
def test_every_panel_shows_a_key_that_is_sent(make, subject, runs, monkeypatch):
    monkeypatch.setattr(publish, "pictures_of", lambda _: ())
    sent = {key for content in publish.wandb_runs(runs) for key in content.summary}
    shown = names(make(subject))
    assert shown <= sent
    assert {"speedup", "mat", "tokens_per_s", "tokens_per_pass", "bug", "task/qa/mat"} <= shown


def test_the_workspace_groups_by_setting_and_filters_and_the_report_has_the_tables(subject):
    page = dashboards.workspace(subject)
    assert (page.entity, page.project) == ("team", "specbench")
    assert page.sections[0].panels[0].groupby.name == "setting"
    assert [group.name for group in page.runset_settings.groupby] == ["setting"]
    filters = page.runset_settings.filters
    expected = {"model": "vicuna7b", "dataset": "specbench", "timing": "measured"}
    assert all(key in filters and value in filters for key, value in expected.items())
    text = "\n".join(block["text"] for block in parts(dashboards.report(subject), "MarkdownBlock"))
    (comparison,) = subject.comparisons
    pld = next(entry for entry in comparison.entries if entry.label == "pld")
    assert str(pld.measured("speedup")) in text


def test_a_sweep_has_parallel_coordinates_and_scatter_plots():
    swept = dashboards.Subject.from_runs(load_runs([GOLDEN / "experiments" / "cacheback_figure4"]))
    panels = [p for shown in dashboards.sections(swept).values() for p in shown]
    (coordinates,) = (p for p in panels if type(p).__name__ == "ParallelCoordinatesPlot")
    columns = [column.metric.name for column in coordinates.columns]
    assert columns == ["knobs.leader_len", "knobs.follower_len", "mat", "predicted_speedup"]
    scatters = [p for p in panels if type(p).__name__ == "ScatterPlot"]
    assert [p.x.name for p in scatters] == ["tokens_per_pass", "mat"]


def test_a_metric_that_no_run_has_gets_no_panel():
    without = load_runs([GOLDEN / "experiments" / "ngrammys_figure2"])
    assert {run.timing for run in without} == {"none"}
    shown = names(dashboards.workspace(dashboards.Subject.from_runs(without)))
    assert {name.rsplit("/", 1)[-1] for name in shown} <= {"mat", *dashboards.OUTPUTS}


def test_without_push_nothing_is_sent_and_what_to_type_is_printed(capsys):
    assert dashboards.main([str(GOLDEN / "records")]) == 0
    out = capsys.readouterr().out
    assert "wandb login" in out and f"dashboards {GOLDEN / 'records'} --entity NAME" in out


def test_push_saves_both_where_the_runs_or_the_account_say(runs, monkeypatch, capsys):
    import wandb
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    saved = []

    def save(page):
        saved.append((type(page).__name__, page.entity))
        return SimpleNamespace(url="https://example.invalid/saved")

    monkeypatch.setattr(ws.Workspace, "save", save)
    monkeypatch.setattr(wr.Report, "save", save)
    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(default_entity="account"))
    assert dashboards.main([str(GOLDEN / "records"), "--push"]) == 0
    assert saved == [("Workspace", "account"), ("Report", "account")]
    assert capsys.readouterr().out.count("https://example.invalid/saved") == 2
    node = {"name": "wandb", "entity": "ours", "project": "theirs"}
    monkeypatch.setitem(runs[0].manifest.config, "logger", node)
    subject = dashboards.Subject.from_runs(runs)
    assert (subject.entity, subject.project) == ("ours", "theirs")


def test_what_goes_wrong_is_reported_with_what_to_type(monkeypatch, capsys):
    import wandb_workspaces.workspaces as ws

    def refuse(_):
        raise RuntimeError("no key")

    monkeypatch.setattr(ws.Workspace, "save", refuse)
    assert dashboards.main([str(GOLDEN / "records"), "--push", "--entity", "me"]) == 1
    err = capsys.readouterr().err
    assert "no key" in err and "wandb login" in err
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert dashboards.main([str(GOLDEN / "records")]) == 2
    assert "[wandb]" in capsys.readouterr().err
    assert dashboards.main([str(GOLDEN / "experiments" / "ngrammys_figure1")]) == 2
