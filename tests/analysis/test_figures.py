"""Figures are written, the same for the same records, and one method keeps its colour."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from analysis import figures
from analysis.groups import make_groups
from analysis.load import load_runs
from analysis.style import bar_style

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "records"


@pytest.fixture
def results(tmp_path):
    shutil.copytree(GOLDEN / "synthetic", tmp_path / "one")
    return tmp_path


@pytest.fixture
def group():
    return make_groups(load_runs([GOLDEN]))[0]


def test_png_and_svg_are_written_beside_the_runs(results, capsys):
    assert figures.main([str(results)]) == 0
    names = sorted(path.name for path in (results / "figures").iterdir())
    assert names == sorted(
        f"vicuna7b_specbench_{figure}.{suffix}"
        for figure in ("speedup_by_task", "mat")
        for suffix in ("png", "svg")
    )
    assert all(path.stat().st_size > 5_000 for path in (results / "figures").iterdir())
    assert str(results / "figures" / names[0]) in capsys.readouterr().out


def test_the_same_records_give_the_same_bytes(results, tmp_path):
    for name in ("first", "again"):
        assert figures.main([str(results / "one"), "-o", str(tmp_path / name)]) == 0
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_tables_with_one_name_do_not_overwrite_each_other(results):
    shutil.copytree(results / "one", results / "two")
    path = results / "two" / "manifest.json"
    path.write_text(path.read_text().replace("Synthetic CPU", "Other CPU"))
    assert figures.main([str(results)]) == 0
    assert len(list((results / "figures").glob("*.png"))) == 4


def test_bars_are_the_table_s_numbers_with_their_intervals(group):
    axes = figures.speedup_by_task(group).axes[0]
    bars = [c for c in axes.containers if hasattr(c, "patches")]
    entries = [entry for entry in group.entries if entry.label != "ar"]
    assert len(bars) == len(entries)
    for container, entry in zip(bars, entries, strict=True):
        expected = [entry.rows[task]["speedup"] for task in [*group.tasks, "overall"]]
        assert [bar.get_height() for bar in container] == expected
        segments = container.errorbar.lines[2][0].get_segments()
        low, high = entry.overall["speedup_ci"]
        assert segments[-1][:, 1] == pytest.approx([low, high])


def test_axes_have_units(group):
    assert "ratio of tokens/s" in figures.speedup_by_task(group).axes[0].get_ylabel()
    assert "tokens per target pass" in figures.mean_accepted_tokens(group).axes[0].get_ylabel()


def test_no_speedup_figure_without_a_baseline(results):
    path = results / "one" / "manifest.json"
    path.write_text(path.read_text().replace('"baseline": "ar"', '"baseline": null'))
    (group,) = make_groups(load_runs([results]))
    assert figures.speedup_by_task(group) is None
    assert figures.mean_accepted_tokens(group) is not None


def test_an_empty_folder_exits_2(tmp_path, capsys):
    assert figures.main([str(tmp_path)]) == 2
    assert "no run at or below" in capsys.readouterr().err


def test_every_method_looks_different_and_always_the_same():
    methods = sorted({path.stem for path in (ROOT / "conf" / "method").glob("[!_]*.yaml")})
    styles = {method: tuple(bar_style(method).values()) for method in methods}
    assert len(set(styles.values())) == len(methods)
    assert bar_style("unheard_of") == bar_style("unheard_of")
    assert bar_style("pld", 1) != bar_style("pld", 0)
    assert bar_style("pld", 1)["facecolor"] == bar_style("pld", 0)["facecolor"]


def test_a_huge_interval_does_not_flatten_the_bars():
    from types import SimpleNamespace

    from analysis import figures

    row = {"speedup": 2.0, "speedup_ci": (0.0, 2000.0), "method": "pld", "n_cases": 2}
    entry = SimpleNamespace(rows={"qa": row}, overall=row, label="pld")
    group = SimpleNamespace(title="t", entries=[entry], tasks=["qa"])
    original = figures._name, figures._task_label, figures.caption
    figures._name, figures._task_label, figures.caption = (
        lambda *_: "pld",
        lambda *_: "qa",
        lambda *_: "c",
    )
    try:
        axes = figures._bars(group, [entry], ["qa"], "speedup", "speedup").axes[0]
    finally:
        figures._name, figures._task_label, figures.caption = original
    assert axes.get_ylim()[1] <= 2.0 * figures._HEADROOM
    assert any(line.get_marker() == "^" for line in axes.lines)
