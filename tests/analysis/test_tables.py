"""The command line of the tables, and what a table says."""

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

from analysis import figures, report, tables
from analysis.papers.claimed import task_label
from analysis.runs.captions import caption, conditions_of, warnings_of
from analysis.runs.claims import VERDICT_RULE
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from analysis.tabular.comparison_tables import comparison_table, settings_table, task_table
from analysis.tabular.table import ResultTable, csv_text, sheet, to_latex, to_markdown, to_rich
from specbench.results.decision import verdict_words
from specbench.results.statistics import aggregate
from tests.analysis.folders import edit_manifest, edit_records

METHODS = ("cacheback", "no_frozen", "pld")
ROOT = Path(__file__).resolve().parents[2]


def csv_rows(capsys, *arguments):
    assert tables.main([*map(str, arguments), "--csv"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_the_bare_command_prints_a_table(results, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert tables.main([str(results)]) == 0
    shown = capsys.readouterr().out
    verdict, heads = shown.splitlines()[1:3]
    assert verdict.startswith("cacheback is 1.78 to 2.07 times as fast as plain decoding (")
    assert re.split(r" {2,}", heads.strip()) == [
        "method", "MAT", "speedup [95 %]", "end-to-end", "against the best", "outputs",
    ]  # fmt: skip
    assert "SYNTHETIC RECORDS" in shown
    assert "[1.8" in shown, "brackets must not be taken for markup"


def test_a_folder_that_is_empty_or_damaged_exits_2_and_says_so(results, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert tables.main([str(tmp_path / "empty")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "error: no run at or below" in said.err
    assert "python run.py" in said.err
    (results / "one" / "cases.jsonl").write_text("{}\n{}\n")
    assert tables.main([str(results)]) == 2
    assert "cases.jsonl, line 1" in capsys.readouterr().err


@pytest.mark.parametrize("command", [tables, figures, report])
def test_a_place_that_cannot_be_written_or_read_exits_2(results, capsys, tmp_path, command):
    (tmp_path / "file").touch()
    long = str(tmp_path / ("long" * 100))
    for words in ([long], [str(results), "-o", str(tmp_path / "file" / "x")]):
        assert command.main(words) == 2
        assert re.search(r"error: .*(long|file)/?.* cannot be used: ", capsys.readouterr().err)


def test_a_reader_that_has_seen_enough_is_no_error():
    code = (
        "import sys; from analysis.runs.command import reporting_errors\n"
        "sys.exit(reporting_errors(lambda: print('x' * 10**6) or 0))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_incomplete_runs_are_named(results, capsys):
    shutil.copytree(results / "one", results / "two")
    (results / "two" / "DONE").unlink()
    assert tables.main([str(results)]) == 0
    captured = capsys.readouterr()
    assert f"not shown, because incomplete: {results / 'two'}" in captured.err
    assert "two" not in captured.out
    assert tables.main([str(results), "--incomplete"]) == 0
    assert "two" in capsys.readouterr().out


def test_the_order_of_records_and_folders_does_not_matter(results, capsys):
    shutil.copytree(results / "one", results / "two")
    first = csv_rows(capsys, results, "--pairs")
    path = results / "one" / "cases.jsonl"
    path.write_text("\n".join(reversed(path.read_text().splitlines())) + "\n")
    assert csv_rows(capsys, results / "two", results / "one", "--pairs") == first


def test_runs_share_a_table_only_if_they_may_be_compared(results):
    for name in ("again", "mixed", "model", "machine", "fewer", "shorter", "prompts"):
        shutil.copytree(results / "one", results / name)
    edit_records(results / "mixed", lambda r: {**r, "stream_index": 99 - r["stream_index"]})
    edit_records(results / "model", lambda record: {**record, "model": "mistral7b"})
    edit_manifest(results / "machine", hardware={"cpu": "Other CPU", "cpus_usable": 8, "gpus": []})
    keep_cases(results / "fewer", lambda record: int(record["case_id"]) < 90)
    config = json.loads((results / "one" / "manifest.json").read_text())["config"]
    limit = {"generation": {"temperature": 0.0, "max_new_tokens": 24}}
    edit_manifest(results / "shorter", config={**config, **limit})
    edit_records(results / "prompts", lambda record: {**record, "prompt_ids": [7, 8, 9]})
    comparisons = make_comparisons(load_runs([results]))
    apart = {tuple(run.path.name for run in each.runs): each for each in comparisons}
    assert sorted(apart) == [
        ("again", "mixed", "one"), ("fewer",), ("machine",), ("model",), ("prompts",),
        ("shorter",),
    ]  # fmt: skip
    assert conditions_of(apart["shorter",])["new tokens a turn"] == "at most 24"


def keep_cases(folder, keep):
    edit_records(folder, lambda record: record if keep(record) else None)


def test_questions_from_several_files_are_told_apart_by_what_was_typed(results, capsys):
    for name, path, token in (("one", "/there/a.jsonl", 7), ("two", "/there/b.jsonl", 8)):
        if name == "two":
            shutil.copytree(results / "one", results / "two")
        edit_manifest(results / name, identity={"dataset": {"name": "jsonl", "path": path}})
        prompt = {"dataset": "jsonl", "prompt_ids": [token] * 3, "n_prompt": 3}
        edit_records(results / name, lambda record, prompt=prompt: record | prompt)
    comparisons = make_comparisons(load_runs([results]))
    assert {each.title for each in comparisons} == {
        f"vicuna7b on jsonl, dataset.path={name}.jsonl" for name in "ab"
    }
    heads = {tuple(row[:3]) for row in tables.comparison_table(*comparisons).rows}
    assert heads == {("vicuna7b", "jsonl", f"dataset.path={name}.jsonl") for name in "ab"}
    told = [row["settings"] for row in csv_rows(capsys, results)]
    assert set(told) == {"dataset.path=a.jsonl", "dataset.path=b.jsonl"}


def test_shards_of_a_run_share_a_table(results):
    shutil.copytree(results / "one", results / "two")
    for name, rest in (("one", 0), ("two", 1)):
        edit_manifest(results / name, prompt_set_hash="abc")
        keep_cases(results / name, lambda record, rest=rest: int(record["case_id"]) % 2 == rest)
    (comparison,) = make_comparisons(load_runs([results]))
    assert [run.path.name for run in comparison.runs] == ["one", "two"]
    # They have no case in common, so no method of one is compared with one of the other.
    stands = tables.comparison_table(comparison).in_short().frame["against the best"].map(str)
    assert set(stands) == {"too few cases"}
    (verdict,) = tables.comparison_table(comparison).head
    assert verdict.startswith("Too few cases")


def test_rows_that_only_the_run_tells_apart_name_it(results):
    shutil.copytree(results / "one", results / "sweep" / "one")
    comparisons = make_comparisons(load_runs([results]))
    columns = {"setting": lambda entry: entry.label}
    page = settings_table("t", comparisons, columns)
    assert [*page.frame][:2] == ["run", "setting"]
    rows = [tuple(row[:2]) for row in page.rows]
    assert len(set(rows)) == len(rows)
    assert ("sweep/one", "pld") in rows, "the folders have one name"
    assert ("–", "medusa") in rows
    alone = settings_table("t", make_comparisons(load_runs([results / "sweep"])), columns)
    assert alone.frame.columns[0] == "setting"


def test_noise_in_a_task_is_said_and_takes_intervals_of_few_cases(results, monkeypatch):
    """In its table, in its figure's label, in the whole run's row and in the caption."""
    monkeypatch.setattr(aggregate, "LEFT_OUT_SHARE", 0.25)
    before = make_comparisons(load_runs([results]))[0].drafting[0].rows
    for lost in (["81"], ["81", "82"]):

        def disturb(record, lost=lost):
            noisy = record["label"] == "pld" and record["case_id"] in lost
            return record | ({"status": "disturbed"} if noisy else {})

        edit_records(results / "one", disturb)
        (comparison,) = make_comparisons(load_runs([results]))
        entry, n = comparison.drafting[0], 4 - len(lost)
        (task,) = (t for t, row in entry.rows.items() if (row["n_cases"], row["n_timed"]) == (4, n))
        cells = task_table(comparison, "by task").frame.set_index(["data", "method"])
        assert str(cells.loc[(task, entry.label), "n"]) == f"n = 4 ({n} timed)"
        assert f"n = 4 ({n} timed)" in task_label(comparison, task)
        assert f"23 ({23 - len(lost)} timed) cases" in caption(comparison)
        assert entry.rows[task]["mat"] == before[task]["mat"], "noise moves no count"
        assert entry.measured("mat", task).interval is not None
        assert (entry.rows[task]["speedup_ci"] is None) == (n < 3)
        assert (str(entry.measured("speedup", task)) == "too few cases") == (n < 3)


@pytest.mark.parametrize(
    ("speed", "codes"),
    [
        ({"read_bytes_per_s": 4e10}, {"SLOW_BASELINE"}),
        ({"copy_bytes_per_s": 5e9}, {"BANDWIDTH"}),
        ({"copy_bytes_per_s": 7e9}, set()),
    ],
)
def test_a_slow_baseline_and_an_impossible_share_are_warned_of(results, speed, codes):
    """The golden ``ar`` reads 5.4 GB/s."""
    model = json.loads((results / "one" / "manifest.json").read_text())["model"]
    edit_manifest(results / "one", model=model | speed)
    (comparison,) = make_comparisons(load_runs([results]))
    found = {warned.code for warned in warnings_of(comparison)}
    assert found & {"SLOW_BASELINE", "BANDWIDTH"} == codes
    assert ("SLOW BASELINE" in caption(comparison)) == (codes == {"SLOW_BASELINE"})
    shares = [r["bandwidth_share"] for e in comparison.entries for r in e.rows.values()]
    assert max(shares) <= 1


def test_the_same_hardware_lets_speed_be_compared(results):
    edit_manifest(
        results / "one",
        hardware={"cpu": "c", "gpus": [{"name": "NVIDIA GeForce RTX 4090"}]},
        model={"device": "cuda:0", "dtype": "float16", "passes": {"engine": "eager"}},
    )
    edit_records(results / "one", lambda r: r | {"n_retokenized": r["n_new"]})
    (comparison,) = make_comparisons(load_runs([results]))
    verdicts = {entry.label: entry.verdict() for entry in comparison.entries}
    assert verdicts["no_frozen"] == "cannot tell", "both are compared"
    assert verdicts["cacheback"] == "MAT disagrees, speed cannot tell", (
        "its MAT counts the prompt's pass"
    )
    assert verdicts["pld"] == "MAT cannot tell", "its claim is from another GPU"
    assert verdicts["ar"] == ""


def test_spec_bench_s_estimator_on_request(results, capsys):
    paired = csv_rows(capsys, results)
    theirs = csv_rows(capsys, results, "--estimator", "specbench")
    assert {row["estimator"] for row in paired} == {"paired"}
    assert {row["estimator"] for row in theirs} == {"specbench"}
    assert [row["mat"] for row in theirs] == [row["mat"] for row in paired]
    assert [row["speedup"] for row in theirs] != [row["speedup"] for row in paired]


def test_a_caption_has_two_lines_and_the_second_warns(results):
    manifest = json.loads((results / "one" / "manifest.json").read_text())
    labels, check = manifest["labels"], {"moved": 2, "positions": 21}
    labels["pld"]["budget"], labels["cacheback"]["budget"] = "tuned", "published"
    model = {"device": "cpu", "self_check": check}
    edit_manifest(results / "one", labels=labels, model=model)
    (comparison,) = make_comparisons(load_runs([results / "one"]))
    head, warned = caption(comparison).splitlines()
    assert "23 cases" in head
    assert "ROUNDINGS MOVE TOKENS" in warned and "at 2 of 21 positions" in warned
    assert "MIXED draft lengths: published (cacheback); tuned (pld)" in warned


@pytest.fixture
def two_models(results):
    shutil.copytree(results / "one", results / "two")
    edit_records(results / "two", lambda record: {**record, "model": "mistral7b"})
    return results


def test_several_models_stand_in_one_table_that_fits(two_models):
    table = tables.comparison_table(*make_comparisons(load_runs([two_models]))).in_short()
    for width in (80, 100, 120, 200):
        console = Console(width=width, file=io.StringIO())
        console.print(to_rich(table))
        lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
        assert max(map(len, lines)) <= width
        heads = [lines.index(f"{model}, specbench") for model in ("mistral7b", "vicuna7b")]
        assert heads[0] < heads[1]
        for head in heads:
            (line,) = [each for each in lines[head : head + 6] if each.startswith("cacheback ")]
            assert line.split()[1:6] == ["2.28", "1.92", "[1.81,", "2.03]", "1.89"]


def test_several_models_are_columns_for_a_program_and_a_head_in_a_paper(two_models, capsys):
    assert {row["model"] for row in csv_rows(capsys, two_models)} == {"mistral7b", "vicuna7b"}
    assert tables.main([str(two_models), "--latex", "--markdown"]) == 0
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert sum("Mistral-7B" in row for row in rows) == 1, "a row's model stands once"
    assert text.count(r"\textbf{1.92}") == 2, "the best of each model"
    assert "| model     | data      | method" in text


def test_columns_are_chosen_by_the_names_of_csv_files(results, capsys):
    rows = csv_rows(capsys, results, "--columns", "end_to_end_speedup,claimed_mat")
    assert [*rows[0]] == [
        "run", "model", "dataset", "task", "label", "end_to_end_speedup", "end_to_end_speedup_low",
        "end_to_end_speedup_high", "claimed_mat",
    ]  # fmt: skip
    assert tables.main([str(results), "--columns", "claimed_mat, tokens_per_s"]) == 0
    shown = capsys.readouterr().out
    assert re.split(r" {2,}", shown.splitlines()[2].strip()) == [
        "method", "claimed MAT", "tokens/s [95 %]",
    ]  # fmt: skip
    assert "token_recycling" not in shown, "claimed, but not run"
    assert tables.main([str(results), "--columns", "mat,speedups"]) == 2
    said = capsys.readouterr().err
    assert "--columns speedups: no such column" in said
    assert "against_the_best, outputs" in said
    assert tables.main([str(results), "--columns", " ,"]) == 2, "nothing is no column"


def test_steps_without_times_take_no_measured_run_s_place(results, tmp_path, capsys):
    shutil.copytree(results / "one", results / "steps")
    untimed = dict.fromkeys(("prefill_s", "decode_s", "drafter_setup_s", "wall_s"), 0.0)
    edit_records(results / "steps", lambda record: {**record, **untimed, "timing": "none"})
    assert {row["timing"] for row in csv_rows(capsys, results)} == {"measured", "none"}
    assert tables.main([str(results), "--markdown"]) == 0
    assert "### vicuna7b on specbench: steps without times" in capsys.readouterr().out
    assert tables.main([str(results), "--csv", "-o", str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"tables.csv", "tables_steps.csv"}


def test_all_columns_and_the_tasks_are_there_on_request(results, capsys):
    assert tables.main([str(results), "--wide"]) == 0
    wide = capsys.readouterr().out
    for words in ("geo. mean [95 %]", "MT speedup [95 %]", "claimed on"):
        assert words in wide
    assert VERDICT_RULE in " ".join(wide.split()), "no verdict without its rule"
    assert "over graph ar" not in wide and "not run" not in wide
    assert tables.main([str(results), "--tasks"]) == 0
    by_task = capsys.readouterr().out.partition("vicuna7b on specbench: by task")[2]
    assert "summarization, n = 3" in by_task
    assert "speedups over ar" in by_task


def test_a_run_without_baseline(results):
    edit_manifest(results / "one", baseline=None)
    keep_cases(results / "one", lambda record: record["label"] != "ar")
    (comparison,) = make_comparisons(load_runs([results]))
    rows = tables.comparison_table(comparison).frame.set_index("method")
    assert [*rows.index[:3]] == [*METHODS]
    row = rows.loc["cacheback"]
    assert str(row["MAT [95 %]"]).startswith("2.28 [")
    assert [str(row[name]) for name in ("speedup [95 %]", "end-to-end [95 %]")] == ["–"] * 2
    assert str(row["against the best"]) == "highest", "labels of a run are compared all the same"


def test_a_caption_says_that_nothing_was_audited_without_counting():
    assert verdict_words({"not_audited": 84}, counted=False) == "not audited"
    found = verdict_words({"equal": 3, "not_audited": 84}, counted=False)
    assert found == "3 equal, others not audited"
    assert verdict_words({"equal": 3, "not_audited": 84}) == "3 equal, 84 not audited"
    assert verdict_words({"equal": 3, "bug": 2}) == "2 BUG, 3 equal"


def test_what_nobody_audited_is_no_column(results, tmp_path):
    edit_records(results / "one", lambda r: r | {"lossless": {"verdict": "not_audited"}})
    (comparison,) = make_comparisons(load_runs([results]))
    table = comparison_table(comparison).in_short()
    assert {str(cell) for cell in table.frame["outputs"]} == {"–"}
    text = to_latex([table])
    assert "outputs" not in text


HOSTILE = ["=cmd|'/c calc'!A1", "@SUM(A1)", "+1-1", "-x", "<script>alert(1)</script>", "a\\|b\nc"]


def hostile_page():
    rows = [{"method": name, "<b>x</b>": "-1.5"} for name in HOSTILE]
    return ResultTable.of(HOSTILE[4], HOSTILE[4], rows, [HOSTILE[4]])


def test_names_in_csv_are_no_formulas():
    rows = list(csv.reader(io.StringIO(csv_text(sheet([hostile_page()])))))[1:]
    assert [row[0] for row in rows] == [f"'{name}" for name in HOSTILE[:4]] + HOSTILE[4:]
    assert {row[1] for row in rows} == {"-1.5"}


def test_names_in_markdown_are_neither_markup_nor_columns():
    text = to_markdown([hostile_page()])
    assert "<script" not in text
    assert "<b>" not in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(HOSTILE)
    assert r"| a\\\|b c " in table[-1]


def test_latex_shows_names_and_symbols_as_text():
    rows = [
        {"method": "cacheback (leader_len=1)", "x": "1 [0.9, 1.1] | –"},
        # A row never begins with what TeX takes for an option of the row before.
        *({"method": name, "x": "1"} for name in ("[b]", "*c")),
    ]
    text = to_latex([ResultTable.of("a_b", "50 % & more", rows)])
    assert r"Cacheback (leader\_len=1) & 1 [0.9, 1.1] \textbar{} -- \\" in text
    assert "{}[b] & 1 \\\\\n{}*c & 1 \\\\\n" in text
    assert r"\caption{a\_b. 50 \% \& more}\label{tab:a_b}" in text
    text = to_latex([hostile_page()])
    assert "$<$script$>$" in text
    assert r"cmd\textbar{}'/c" in text
    assert r"a\textbackslash{}\textbar{}b c" in text


class TestLatex:
    def test_only_what_is_shown_faster_is_bold(self, results):
        def bold():
            table = comparison_table(*make_comparisons(load_runs([results]))).in_short()
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
        text = to_latex([ResultTable.of("t", "", rows)])
        assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 3
        assert text.count(r"\label{") == 1
        assert "(3 of 3)" in text and "m89" in text
