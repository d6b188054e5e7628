"""Measured tables and figures of the documents are those of their records (``make shown``)."""

import re
from pathlib import Path

import matplotlib as mpl
import pytest
from PIL import Image, ImageChops

from analysis.runs.load import load_runs
from scripts.shown import (
    DOCUMENTS,
    FIGURES,
    GALLERY,
    SHOWN,
    figure,
    gallery_page,
    index,
    read,
    with_tables,
)
from specbench.paths import PROJECT
from specbench.results.manifest import BASELINE
from specbench.results.names import display_name
from specbench.results.records import DONE
from specbench.results.statistics.summary import summarize

# One picture of each kind in the fast suite; the others take half a second each.
QUICK = {"bench_speedup", "cacheback_figure3", "growth", "ranked", "kw_speedup"}
TABLE = re.compile(r"(?:^|\n)([^\n]*)\n\n(\|(?:.*\n)+?)(?!\|)")
DECIMALS = "<!-- decimals: of the files linked in each row -->"
PAPERS = "docs/measurements/cpu-epyc-2core.md"
# What a document says while a summary that it shows is of the rule before.
EARLIER = {PAPERS: "were taken under an earlier rule about disturbed turns"}
FINDINGS = "docs/findings.md"


def text(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def images() -> list[str]:
    """Pictures that the documents show, as paths below the root."""
    found = []
    for name in (*DOCUMENTS, GALLERY):
        folder = (PROJECT / name).parent
        links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text(name))
        found += [str((folder / link).resolve().relative_to(PROJECT)) for link in links]
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_shown_tables_are_those_of_their_records(document):
    assert with_tables(text(document)) == text(document), "run `make shown`"


def test_a_number_that_was_typed_is_found():
    readme = text("README.md")
    (cell,) = re.findall(r"\| PLD \(5 tokens\) \| (\d\.\d\d) \|", readme)
    typed = readme.replace(f"| {cell} |", "| 9.99 |")
    assert typed != readme
    assert with_tables(typed) == readme


def test_the_findings_name_no_winner_that_the_run_does_not_show():
    leaders = read(index()["tables"]["day"]["records"][0])["leaders"]
    words = " ".join(text(FINDINGS).split())
    (named,) = re.findall(r"The fastest here: (.+?)\.", words)
    assert named == " or ".join(map(display_name, leaders))


def test_the_kept_run_s_summary_is_that_of_its_records():
    """Every number shown of it can be made again from the cases in the repository."""
    for name in {path for table in index()["tables"].values() for path in table["records"]}:
        folder = (PROJECT / name).parent
        if not name.endswith("/summary.json") or not (folder / DONE).exists():
            continue
        (run,) = load_runs([folder])
        found = summarize(
            run.records, run.labels, run.baseline, run.seed, run.estimator, n_resamples=2
        )
        shown = {(row["label"], row["task"]): row for row in read(name)["rows"]}
        for row in found:
            kept = shown[row["label"], row["task"]]
            for key in ("n_cases", "n_timed", "mat", "tokens_per_s", "speedup", "lossless"):
                wanted = None if kept[key] is None else pytest.approx(kept[key], rel=1e-12)
                assert row[key] == wanted, (name, row["label"], key)


@pytest.mark.parametrize(("document", "words"), EARLIER.items())
def test_documents_say_under_which_rule_about_disturbed_turns_their_runs_were_timed(
    document, words
):
    tables = [index()["tables"][found[2]] for found in SHOWN.finditer(text(document))]
    files = [read(path) for table in tables for path in table["records"] if path.endswith(".json")]
    summaries = [found for found in files if isinstance(found, dict) and "pairs" in found]
    assert summaries
    earlier = any("disturbed" not in found for found in summaries)
    assert (words in " ".join(text(document).split())) == earlier


def test_index_code_and_documents_name_the_same_tables_and_figures():
    names = [found[2] for name in DOCUMENTS for found in SHOWN.finditer(text(name))]
    assert sorted(names) == sorted(index()["tables"])
    assert set(images()) == set(index()["figures"])
    assert len(FIGURES) == len(index()["figures"])


def test_the_gallery_says_what_its_records_and_commands_are():
    assert text(GALLERY) == gallery_page(), "run `make shown`"
    assert f"]({GALLERY})" in text("README.md")
    for section in index()["gallery"]["sections"]:
        assert section["figures"], section["title"]
    kinds = ("_speedup.png)", "_mat.png)", "ranked.png)", "prompts.png)", "budget.png)")
    assert all(kind in text(GALLERY) for kind in kinds)


@pytest.mark.parametrize("name", index()["figures"])
def test_pictures_in_the_repository_are_small(name):
    assert (PROJECT / name).stat().st_size <= 100_000


@pytest.mark.skipif(
    f"matplotlib=={mpl.__version__}\n" not in text("constraints.txt"),
    reason="another matplotlib than constraints.txt has: letters differ by pixels",
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if Path(name).stem in QUICK else pytest.mark.slow)
        for name in index()["figures"]
    ],
)
def test_figures_are_those_of_their_records(name):
    with Image.open(PROJECT / name) as picture:
        shown = picture.convert("RGB")
    drawn = figure(name).convert("RGB")
    assert drawn.size == shown.size, "run `make shown`"
    assert ImageChops.difference(drawn, shown).getbbox() is None, "run `make shown`"


def test_every_measured_table_names_its_record_or_says_that_there_is_none():
    for name in DOCUMENTS:
        for before, table in TABLE.findall(text(name)):
            header = table.splitlines()[0]
            if "MAT" in header or (name != "README.md" and "| question |" not in header):
                recorded = r"shown: \w+|no record kept; made again by `.+`"
                marked = re.fullmatch(f"<!-- ({recorded}) -->", before)
                assert marked or before == DECIMALS, header


def test_decimals_of_the_papers_table_are_those_of_the_linked_files():
    """The cells are sentences; each decimal in them is a number of the CSV, perhaps in percent."""
    found = text(PAPERS).split(DECIMALS)[1:]
    tables = [part.strip().partition("\n\n")[0].splitlines()[2:] for part in found]
    rows = [line.strip("| ").split(" | ") for table in tables for line in table]
    assert len(rows) == 21
    for row in rows:
        link = re.search(r"\]\((.*)\.md\)", row[0]).group(1)
        recorded = re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text(f"docs/measurements/{link}.csv"))
        numbers = [float(number) * factor for number in recorded for factor in (1, 100)]
        for shown in re.findall(r"\d+\.\d+", row[3]):
            half = 0.5001 * 10.0 ** -len(shown.partition(".")[2])
            assert any(abs(number - float(shown)) <= half for number in numbers), (link, shown)


def test_the_quickstart_s_output_is_its_record_s():
    printed = text("README.md").split("```text\n")[1].split("```")[0].splitlines()[2:]
    rows = read("docs/measurements/cpu-xeon-2core/quickstart.json")["rows"]
    for line, row in zip(printed, rows, strict=True):
        interval = (
            "" if row["label"] == BASELINE else " [{:.2f}, {:.2f}]".format(*row["speedup_ci"])
        )
        assert line.split()[:2] == [row["label"], f"{row['mat']:.2f}"]
        assert f" {row['speedup']:.2f}{interval} " in line
        assert f" {row['end_to_end_speedup']:.2f} " in line
        assert line.endswith(f" {row['lossless']['equal']} equal")
