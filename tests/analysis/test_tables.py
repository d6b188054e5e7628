"""The command line of the tables, and their contents."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from analysis import report, tables
from analysis.papers.pictures import task_panel
from analysis.runs.captions import caption, conditions_of
from analysis.runs.claims import VERDICT_RULES
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from analysis.tabular.comparison_tables import comparison_table, settings_table, task_table
from analysis.tabular.table import ResultTable, csv_text, sheet, to_latex, to_markdown, to_rich
from specbench.results.statistics import summary
from tests.analysis.folders import edit_manifest, edit_records

ROOT = Path(__file__).resolve().parents[2]
UNTIMED = {
    **dict.fromkeys(("prefill_s", "decode_s", "drafter_setup_s", "wall_s"), 0.0),
    "timing": "none",
}


def csv_rows(capsys, *arguments):
    assert tables.main([*map(str, arguments), "--csv"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def printed(capsys, *arguments):
    assert tables.main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def only_comparison(folder):
    (comparison,) = make_comparisons(load_runs([folder]))
    return comparison


def keep_cases(folder, keep):
    edit_records(folder, lambda record: record if keep(record) else None)


class TestCommand:
    def test_the_bare_command_prints_six_columns_below_the_verdict(
        self, results, capsys, monkeypatch
    ):
        monkeypatch.setenv("COLUMNS", "120")
        shown = printed(capsys, results)
        verdict, heads = shown.splitlines()[1:3]
        assert verdict.startswith("cacheback is 1.78 to 2.07 times as fast as plain decoding (")
        assert re.split(r" {2,}", heads.strip()) == [
            "method", "MAT", "speedup [95 %]", "end-to-end", "against the best", "outputs",
        ]  # fmt: skip
        assert "SYNTHETIC RECORDS" in shown
        assert "[1.8" in shown, "brackets must not be taken for markup"

    def test_an_empty_or_damaged_folder_exits_2(self, results, tmp_path, capsys):
        (tmp_path / "empty").mkdir()
        assert tables.main([str(tmp_path / "empty")]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert "error: no run at or below" in output.err and "python run.py" in output.err
        (results / "one" / "cases.jsonl").write_text("{}\n{}\n")
        assert tables.main([str(results)]) == 2
        assert "cases.jsonl, line 1" in capsys.readouterr().err

    @pytest.mark.parametrize("command", [tables, report])
    def test_a_path_that_cannot_be_written_or_read_exits_2(
        self, results, capsys, tmp_path, command
    ):
        (tmp_path / "file").touch()
        long = str(tmp_path / ("long" * 100))
        for arguments in ([long], [str(results), "-o", str(tmp_path / "file" / "x")]):
            assert command.main(arguments) == 2
            assert re.search(r"error: .*(long|file)/?.* cannot be used: ", capsys.readouterr().err)

    def test_a_closed_pipe_is_no_error(self):
        code = (
            "import sys; from analysis.runs.cli import reporting_errors\n"
            "sys.exit(reporting_errors(lambda: print('x' * 10**6) or 0))"
        )
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 0

    def test_an_incomplete_run_is_named(self, results, capsys):
        shutil.copytree(results / "one", results / "two")
        (results / "two" / "DONE").unlink()
        assert tables.main([str(results)]) == 0
        captured = capsys.readouterr()
        assert f"not shown, because incomplete: {results / 'two'}" in captured.err
        assert "two" not in captured.out

    def test_the_order_of_records_and_folders_does_not_matter(self, results, capsys):
        shutil.copytree(results / "one", results / "two")
        first = csv_rows(capsys, results, "--pairs")
        path = results / "one" / "cases.jsonl"
        path.write_text("\n".join(reversed(path.read_text().splitlines())) + "\n")
        assert csv_rows(capsys, results / "two", results / "one", "--pairs") == first

    def test_spec_bench_s_estimator_on_request(self, results, capsys):
        paired = csv_rows(capsys, results)
        theirs = csv_rows(capsys, results, "--estimator", "specbench")
        for rows, name in ((paired, "paired"), (theirs, "specbench")):
            assert {row["estimator"] for row in rows} == {name}
        assert [row["mat"] for row in theirs] == [row["mat"] for row in paired]
        assert [row["speedup"] for row in theirs] != [row["speedup"] for row in paired]

    def test_steps_without_times_take_no_measured_run_s_file(self, results, tmp_path, capsys):
        shutil.copytree(results / "one", results / "steps")
        edit_records(results / "steps", lambda record: {**record, **UNTIMED})
        assert {row["timing"] for row in csv_rows(capsys, results)} == {"measured", "none"}
        heading = "### vicuna7b on specbench: steps without times"
        assert heading in printed(capsys, results, "--markdown")
        printed(capsys, results, "--csv", "-o", tmp_path / "out")
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert names == {"tables.csv", "tables_steps.csv"}

    def test_all_columns_are_there_on_request(self, results, capsys):
        wide = printed(capsys, results, "--wide")
        for text in ("geo. mean [95 %]", "MT speedup [95 %]", "claimed on", "\n! SLOW BASELINE: "):
            assert text in wide
        assert VERDICT_RULES[0] in " ".join(wide.split()), "no verdict without its rule"
        assert "over graph ar" not in wide, "nothing was run there"
        assert "not run" not in wide, "methods of other papers are no rows of one's own runs"


class TestRunsOfATable:
    @pytest.fixture(autouse=True)
    def few_records(self, results):
        keep_cases(results / "one", lambda r: int(r["case_id"]) < 100 and not r["repeat"])

    def test_runs_share_a_table_only_if_they_may_be_compared(self, results):
        for name in ("again", "mixed", "model", "machine", "fewer", "shorter", "prompts"):
            shutil.copytree(results / "one", results / name)
        edit_records(results / "mixed", lambda r: {**r, "stream_index": 99 - r["stream_index"]})
        edit_records(results / "model", lambda record: {**record, "model": "mistral7b"})
        other_machine = {"cpu": "Other CPU", "cpus_usable": 8, "gpus": []}
        edit_manifest(results / "machine", hardware=other_machine)
        keep_cases(results / "fewer", lambda record: int(record["case_id"]) < 90)
        config = json.loads((results / "one" / "manifest.json").read_text())["config"]
        limit = {"generation": {"temperature": 0.0, "max_new_tokens": 24}}
        edit_manifest(results / "shorter", config={**config, **limit})
        edit_records(results / "prompts", lambda record: {**record, "prompt_ids": [7, 8, 9]})
        comparisons = make_comparisons(load_runs([results]))
        by_folders = {tuple(run.path.name for run in c.runs): c for c in comparisons}
        assert sorted(by_folders) == [
            ("again", "mixed", "one"), ("fewer",), ("machine",), ("model",), ("prompts",),
            ("shorter",),
        ]  # fmt: skip
        assert conditions_of(by_folders["shorter",])["new tokens a turn"] == "at most 24"

    def test_questions_from_several_files_are_told_apart(self, results, capsys):
        shutil.copytree(results / "one", results / "two")
        for name, path, token in (("one", "/there/a.jsonl", 7), ("two", "/there/b.jsonl", 8)):
            edit_manifest(results / name, identity={"dataset": {"name": "jsonl", "path": path}})
            prompt = {"dataset": "jsonl", "prompt_ids": [token] * 3, "n_prompt": 3}
            edit_records(results / name, lambda record, prompt=prompt: record | prompt)
        comparisons = make_comparisons(load_runs([results]))
        settings = {f"dataset.path={name}.jsonl" for name in "ab"}
        assert {c.title for c in comparisons} == {f"vicuna7b on jsonl, {s}" for s in settings}
        heads = {tuple(row[:3]) for row in comparison_table(*comparisons).rows}
        assert heads == {("vicuna7b", "jsonl", setting) for setting in settings}
        assert {row["settings"] for row in csv_rows(capsys, results)} == settings

    def test_shards_of_a_run_share_a_table(self, results):
        shutil.copytree(results / "one", results / "two")
        for name, rest in (("one", 0), ("two", 1)):
            edit_manifest(results / name, prompt_set_hash="abc")
            keep_cases(results / name, lambda record, rest=rest: int(record["case_id"]) % 2 == rest)
        comparison = only_comparison(results)
        assert [run.path.name for run in comparison.runs] == ["one", "two"]
        # The shards share no case, so their methods are not compared with each other.
        table = comparison_table(comparison).in_short()
        assert set(table.frame["against the best"].map(str)) == {"too few cases"}
        assert table.head[0].startswith("Too few cases")

    def test_rows_that_only_the_run_tells_apart_name_it(self, results):
        shutil.copytree(results / "one", results / "sweep" / "one")
        columns = {"setting": lambda entry: entry.label}
        table = settings_table("t", make_comparisons(load_runs([results])), columns)
        assert [*table.frame][:2] == ["run", "setting"]
        rows = [tuple(row[:2]) for row in table.rows]
        assert len(set(rows)) == len(rows)
        assert ("sweep/one", "pld") in rows, "the folders have one name"
        assert ("–", "medusa") in rows
        alone = settings_table("t", [only_comparison(results / "sweep")], columns)
        assert alone.frame.columns[0] == "setting"

    def test_a_run_without_baseline(self, results):
        edit_manifest(results / "one", baseline=None)
        keep_cases(results / "one", lambda record: record["label"] != "ar")
        rows = comparison_table(only_comparison(results)).frame.set_index("method")
        assert [*rows.index[:3]] == ["cacheback", "no_frozen", "pld"]
        row = rows.loc["cacheback"]
        assert row["MAT [95 %]"].interval is not None
        assert [str(row[name]) for name in ("speedup [95 %]", "end-to-end [95 %]")] == ["–"] * 2
        assert str(row["against the best"]) == "best", "labels are compared all the same"


class TestConditions:
    def test_noise_in_a_task_takes_intervals_of_few_cases(self, results, monkeypatch):
        monkeypatch.setattr(summary, "LEFT_OUT_SHARE", 0.25)
        before = only_comparison(results).drafting[0].rows
        for lost in (["81"], ["81", "82"]):

            def disturb(record, lost=lost):
                noisy = record["label"] == "pld" and record["case_id"] in lost
                return record | ({"status": "disturbed"} if noisy else {})

            edit_records(results / "one", disturb)
            comparison = only_comparison(results)
            entry, n = comparison.drafting[0], 4 - len(lost)
            sizes = {task: (row["n_cases"], row["n_timed"]) for task, row in entry.rows.items()}
            (task,) = (task for task, size in sizes.items() if size == (4, n))
            cells = task_table(comparison, "by task").frame.set_index(["data", "method"])
            assert str(cells.loc[(task, entry.label), "n"]) == f"n = 4 ({n} timed)"
            assert any(f"n = 4 ({n} timed)" in tick for tick in task_panel(comparison, "mat").ticks)
            assert f"23 ({23 - len(lost)} timed) cases" in caption(comparison)
            assert entry.rows[task]["mat"] == before[task]["mat"], "noise moves no count"
            assert entry.measured("mat", task).interval is not None
            assert (entry.rows[task]["speedup_ci"] is None) == (n < 3)
            assert (str(entry.measured("speedup", task)) == "too few cases") == (n < 3)

    def test_a_caption_has_two_lines_and_the_second_warns(self, results):
        manifest = json.loads((results / "one" / "manifest.json").read_text())
        labels, check = manifest["labels"], {"moved": 2, "positions": 21}
        labels["pld"]["budget"], labels["cacheback"]["budget"] = "tuned", "published"
        model = {"device": "cpu", "self_check": check}
        edit_manifest(results / "one", labels=labels, model=model)
        head, warned = caption(only_comparison(results)).splitlines()
        assert "23 cases" in head
        assert "ROUNDINGS MOVE TOKENS" in warned and "at 2 of 21 positions" in warned
        assert "MIXED draft lengths: published (cacheback); tuned (pld)" in warned


class TestSeveralModels:
    @pytest.fixture
    def two_models(self, results):
        shutil.copytree(results / "one", results / "two")
        edit_records(results / "two", lambda record: {**record, "model": "mistral7b"})
        return results

    @pytest.mark.parametrize("width", [80, 200])
    def test_they_stand_in_one_table_that_fits(self, two_models, width):
        table = comparison_table(*make_comparisons(load_runs([two_models]))).in_short()
        console = Console(width=width, file=io.StringIO())
        console.print(to_rich(table))
        lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
        assert max(map(len, lines)) <= width
        heads = [lines.index(f"{model}, specbench") for model in ("mistral7b", "vicuna7b")]
        assert heads[0] < heads[1]
        for head in heads:
            (line,) = [line for line in lines[head : head + 6] if line.startswith("cacheback ")]
            assert line.split()[1:6] == ["2.28", "1.92", "[1.81,", "2.03]", "1.89"]

    def test_they_are_columns_for_a_program_and_once_each_in_a_paper(self, two_models, capsys):
        assert {row["model"] for row in csv_rows(capsys, two_models)} == {"mistral7b", "vicuna7b"}
        text = printed(capsys, two_models, "--latex", "--markdown")
        rows = [line for line in text.splitlines() if line.endswith("\\\\")]
        assert [row.count("Mistral-7B") for row in rows].count(1) == 1
        assert text.count(r"\textbf{1.92}") == 2, "the best of each model"
        assert "| model     | data      | method" in text


HOSTILE = ["=cmd|'/c calc'!A1", "@SUM(A1)", "+1-1", "-x", "<script>alert(1)</script>", "a\\|b\nc"]


class TestNamesOfUsers:
    @pytest.fixture
    def hostile(self):
        rows = [{"method": name, "<b>x</b>": "-1.5"} for name in HOSTILE]
        return ResultTable.from_rows(HOSTILE[4], HOSTILE[4], rows, [HOSTILE[4]])

    def test_they_are_no_formulas_in_csv(self, hostile):
        rows = list(csv.reader(io.StringIO(csv_text(sheet([hostile])))))[1:]
        assert [row[0] for row in rows] == [f"'{name}" for name in HOSTILE[:4]] + HOSTILE[4:]
        assert {row[1] for row in rows} == {"-1.5"}

    def test_they_are_neither_markup_nor_columns_in_markdown(self, hostile):
        text = to_markdown([hostile])
        assert "<script" not in text and "<b>" not in text
        table = [line for line in text.splitlines() if line.startswith("|")]
        assert len(table) == 2 + len(HOSTILE)
        assert r"| a\\\|b c " in table[-1]


class TestLatex:
    def test_names_of_users_are_text(self):
        # A row never begins with what TeX takes for an option of the row before.
        named = ("cacheback (leader_len=1)", "[b]", "*c", *HOSTILE)
        rows = [{"method": name, "x": "1 [0.9, 1.1] | –"} for name in named]
        text = to_latex([ResultTable.from_rows("a_b", "50 % & more", rows)])
        for expected in (
            r"Cacheback (leader\_len=1) & 1 [0.9, 1.1] \textbar{} -- \\",
            "\n{}[b] & ", "\n{}*c & ",
            r"\caption{a\_b. 50 \% \& more}\label{tab:a_b}",
            "$<$script$>$", r"cmd\textbar{}'/c", r"a\textbackslash{}\textbar{}b c",
        ):  # fmt: skip
            assert expected in text

    def test_only_what_is_shown_faster_is_bold(self, results):
        def bold():
            table = comparison_table(only_comparison(results)).in_short()
            return re.findall(r"\\textbf\{.*?\}", to_latex([table]))

        assert bold() == [r"\textbf{1.92}", r"\textbf{1.69}"], "the best and what may be as good"

        def slowed(record):
            slower = record["label"] != "ar"
            return record | ({"decode_s": 3 * record["decode_s"]} if slower else {})

        edit_records(results / "one", slowed)
        edit_records(results / "one", lambda r: r | {"wall_s": r["prefill_s"] + r["decode_s"]})
        assert bold() == []

    def test_a_long_table_is_several_floats_with_one_label(self):
        rows = [{"method": f"m{i}", "x": "1"} for i in range(90)]
        text = to_latex([ResultTable.from_rows("t", "", rows)])
        assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 3
        assert text.count(r"\label{") == 1
        assert "(3 of 3)" in text and "m89" in text
