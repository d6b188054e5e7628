"""Runs of several engines: separate in tables and figures, side by side in the engine table."""

import csv
import io

import pytest

from analysis import tables
from analysis.plots.pictures import by_load, load_picture
from analysis.runs.comparisons import make_comparisons
from analysis.runs.leaders import verdict_of
from analysis.runs.load import load_runs
from analysis.tabular.comparison_tables import engine_table
from tests.servers.fake import serving
from tests.servers.served_run import run

# Two engines on the same questions, one of them under two loads.
SERVED = [("SGLang 0.6.2", 1), ("vLLM 0.30.1", 1), ("vLLM 0.30.1", 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("engines")
    for engine, loads in (("vllm", (1, 2)), ("sglang", (1,))):
        drafts = {"accepted": (2, 0, 5), "drafted": 6, "idle": 1}
        with (
            serving(engine=engine, wait_s=0.002) as (plain, _),
            serving(engine=engine, wait_s=0.002, **drafts) as (drafting, _),
        ):
            where = [f"server.base_url={drafting}", f"server.plain_url={plain}"]
            for load in loads:
                options = [f"server.concurrency={load}", "server.label=mtp"]
                run(path / f"{engine}{load}", *where, *options, "server.speculation=mtp")
    return path


@pytest.fixture(scope="module")
def comparisons(folder):
    return make_comparisons(load_runs([folder]))


def test_they_are_never_put_together_but_side_by_side_in_a_table(folder, comparisons):
    runs = [[(run.engine, run.concurrency) for run in served.runs] for served in comparisons]
    assert sorted(runs) == [[served] for served in SERVED]
    cells = engine_table(comparisons).frame.to_dict("records")
    assert [(c["engine"], c["at once"], c["method"]) for c in cells] == [
        (engine, str(load), label) for engine, load in SERVED for label in ("ar", "mtp")
    ]
    assert {c["MAT [95 %]"].value for c in cells if c["method"] == "mtp"} == {11 / 4}
    assert engine_table(make_comparisons(load_runs([folder / "vllm1"]))) is None


def test_the_sentence_at_two_users_is_about_both_together(comparisons):
    sentences = {c.load: verdict_of(c) for c in comparisons if c.runs[0].engine == "vLLM 0.30.1"}
    assert sentences[2].startswith("All 2 users together: ")
    assert "together" not in sentences[1]


def test_captions_and_lines_for_a_program_name_the_engine_and_the_load(folder, capsys):
    assert tables.main([str(folder)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for text in (
        "ANOTHER ENGINE: vLLM 0.30.1",
        "ANOTHER ENGINE: SGLang 0.6.2, weights in bfloat16, fp8",
        "At which load to draft",
        "Engines, each over its own plain decoding",
    ):
        assert text in printed
    assert tables.main([str(folder), "--csv"]) == 0
    lines = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert {(line["engine"], int(line["concurrency"])) for line in lines} == {*SERVED}


def test_a_sweep_over_loads_is_one_chart(comparisons):
    (group,) = by_load(comparisons)
    (axes,) = load_picture(group).axes
    assert axes.get_xlabel() == "concurrent requests"
    assert [list(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) > 1]
