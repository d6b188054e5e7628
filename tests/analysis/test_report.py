"""The report: all of it in one file that stands alone, readable on a phone and without a mouse."""

import base64
import io
import re
import shutil
from html.parser import HTMLParser

import pandas as pd
import pytest

from analysis import report
from analysis.runs.comparisons import make_comparisons
from analysis.runs.leaders import verdict_of
from analysis.runs.load import load_runs
from specbench.results.records import CaseRecord
from tests.analysis import browser
from tests.analysis.folders import EXPERIMENTS, RECORDS, edit_manifest, edit_records

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """Elements with their attributes; raises where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self._open = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert report.main([str(RECORDS), "-o", str(path)]) == 0
    return path.read_text()


@pytest.fixture(scope="module")
def read(text):
    return Reader(text)


@pytest.fixture
def run(tmp_path):
    shutil.copytree(RECORDS / "synthetic", tmp_path / "run")
    (loaded,) = load_runs([tmp_path])
    return loaded


def visible_text(markup):
    return " ".join(re.sub(r"<[^>]+>", " ", markup).split())


def test_nothing_is_fetched_and_nothing_runs(read, text):
    addresses = [a[key] for _, a in read.elements for key in ("src", "href") if key in a]
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert not read.all("script")
    assert "@import" not in text and "url(" not in text
    (policy,) = (a["content"] for a in read.all("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


def test_warnings_come_first_then_the_verdict_the_table_and_one_picture(text, read, run):
    verdict = verdict_of(*make_comparisons([run]))
    parts = ('class="warnings"', verdict, "<thead>", "<figure>", "Synthetic CPU")
    order = [text.index(part, text.index("<main>")) for part in parts]
    assert order == sorted(order)
    assert min(record.started_at for record in run.records)[:10] in text[: order[0]]
    assert len(read.all("img")) == 1
    assert read.all("img")[0]["alt"]
    drawn = base64.b64decode(read.all("img")[0]["src"].partition(",")[2]).decode()
    assert "<text" not in drawn, "the reader's machine may lack the font"
    regions = [a for _, a in read.elements if a.get("role") == "region"]
    assert len(regions) >= len(read.all("table"))
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in regions)


def test_rows_are_sorted_by_speedup_with_the_tables_numbers(text):
    names = re.findall(r'<th scope="row">(\w+)</th><td class="number">', text)
    (comparison,) = make_comparisons(load_runs([RECORDS]))
    speedups = {entry.label: entry.overall["speedup"] for entry in comparison.entries}
    assert names == sorted(speedups, key=speedups.get, reverse=True)
    for entry in comparison.entries:
        assert str(entry.measured("speedup")) in visible_text(text)


def test_all_numbers_are_a_csv_file_too(read, run):
    ((address,),) = ([a["href"]] for a in read.all("a") if "download" in a)
    kind, _, data = address.partition(",")
    assert kind == "data:text/csv;charset=utf-8;base64"
    frame = pd.read_csv(io.BytesIO(base64.b64decode(data)))
    (comparison,) = make_comparisons([run])
    row = frame[(frame.label == "pld") & (frame.task == "overall")].iloc[0]
    entry = next(entry for entry in comparison.entries if entry.label == "pld")
    assert row.speedup == pytest.approx(entry.overall["speedup"], rel=1e-5)
    assert row.speedup_low < row.speedup < row.speedup_high


def test_names_are_no_markup_and_folders_are_cut(run, tmp_path):
    hostile = "<script>alert(1)</script>"
    run.manifest.hardware["cpu"] = hostile
    run.manifest.overrides = [f"dataset.path={tmp_path}/mine.jsonl"]
    again = shutil.copytree(run.path, tmp_path / "other" / "run")
    edit_manifest(again, run_key="again")
    edit_records(again, lambda record: record | {"run_key": "again"})
    text = report.page([run, *load_runs([again])])
    assert hostile not in text
    assert "&lt;script&gt;" in text
    assert "python run.py dataset.path=…/mine.jsonl" in text
    assert "other/run" in text  # of two folders of one name
    assert str(tmp_path) not in text


def test_wrong_outputs_are_the_first_thing_said(run):
    wrong = next(r.key for r in run.records if (r.label, r.status) == ("pld", "ok"))
    bug = {"verdict": "bug"}
    edit_records(
        run.path, lambda r: r | {"lossless": bug} if CaseRecord.from_json(r).key == wrong else r
    )
    text = report.page(load_runs([run.path]))
    box = text[text.index('<ul class="warnings">') : text.index("Which method to take")]
    first = visible_text(box[: box.index("</li>")])
    assert "pld" in first and "WRONG" in first


def test_the_same_records_give_the_same_bytes(text):
    assert report.page(load_runs([RECORDS])) == text


def test_nothing_to_show_exits_2(tmp_path, capsys):
    assert report.main([str(tmp_path), "-o", str(tmp_path / "report.html")]) == 2
    assert "no run at or below" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


# Of a page in a frame: focus is seen, and the names of rows stay while their table scrolls.
LAYOUT = """(() => {
  const root = document.documentElement, style = (each) => view.getComputedStyle(each);
  const focused = [...document.querySelectorAll(".skip, main .scroll")].slice(0, 2).map((each) => {
    each.focus();
    return [document.activeElement === each, style(each).outlineStyle];
  });
  const box = [...document.querySelectorAll(".scroll")].find((e) =>
    e.scrollWidth > e.clientWidth && e.querySelector("tbody th[scope=row]"));
  if (box) box.scrollLeft = 150;
  const name = box && box.querySelector("tbody th[scope=row]").getBoundingClientRect().left;
  return {
    overflow: root.scrollWidth - root.clientWidth,
    broken: [...document.images].filter((each) => !each.complete || !each.naturalWidth).length,
    ground: style(document.body).backgroundColor,
    stays: !box || Math.abs(name - box.getBoundingClientRect().left) < 2,
    requests: view.performance.getEntriesByType("resource").map((each) => each.name)
      .filter((name) => !name.startsWith("data:")),
    focused,
  };
})()"""


def look(text, folder):
    """Check the layout at a phone's and a desk's width, in light and dark mode."""
    for scheme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 29)")):
        layout, complaints = browser.look(text, LAYOUT, [390, 1280], folder, scheme)
        assert complaints == []
        for width in ("390", "1280"):
            assert layout[width] == {
                "overflow": 0, "broken": 0, "ground": ground, "stays": True, "requests": [],
                "focused": [[True, "solid"]] * 2,
            }  # fmt: skip


@pytest.mark.slow  # over a second
def test_of_many_comparisons_each_is_linked_to_its_section(tmp_path):
    path = tmp_path / "all.html"
    folders = [EXPERIMENTS / name for name in ("cacheback_figure4", "ngrammys_figure1")]
    assert report.main([*map(str, [RECORDS, *folders]), "-o", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    read = Reader(text)
    ids = [a["id"] for _, a in read.elements if "id" in a]
    links = [a["href"][1:] for a in read.all("a") if a["href"].startswith("#section")]
    assert len(links) == 3
    assert set(links) <= set(ids)
    assert len(ids) == len(set(ids))
    if browser.executable() is not None:
        look(text, tmp_path)
