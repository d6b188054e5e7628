"""The report: all of it in one file that stands alone, readable on a phone and without a mouse."""

import base64
import io
import re
import shutil
from html.parser import HTMLParser

import pandas as pd
import pytest

from analysis import report
from analysis.figures import task_bars
from analysis.plots.style import REFERENCE
from analysis.runs.comparisons import make_comparisons
from analysis.runs.leaders import leaders_of
from analysis.runs.load import load_runs
from analysis.tabular import provenance
from analysis.tabular.table import ResultTable
from specbench.results.estimate import Estimate, numeric_columns
from specbench.results.records import CaseRecord
from tests.analysis import browser
from tests.analysis.folders import GOLDEN, RECORDS, edit_manifest, edit_records

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """Elements with their attributes; raises where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self._open = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert report.main([str(RECORDS), "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def text(page):
    return page.read_text()


@pytest.fixture(scope="module")
def read(text):
    return Reader(text)


@pytest.fixture
def run(tmp_path):
    shutil.copytree(RECORDS / "synthetic", tmp_path / "run")
    (found,) = load_runs([tmp_path])
    return found


def test_nothing_is_fetched_and_nothing_runs(read, text):
    addresses = [a[key] for _, a in read.found for key in ("src", "href") if key in a]
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert not read.all("script")
    assert "@import" not in text
    assert "url(" not in text
    (policy,) = (a["content"] for a in read.all("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


def test_every_part_is_there_and_reachable(read, text):
    ids = {a["id"] for _, a in read.found if "id" in a}
    links = {a["href"][1:] for a in read.all("a") if a["href"].startswith("#")}
    assert {"summary", "claims", "lossless", "settings", "environment", "runs"} <= ids & links
    assert links <= ids
    assert all(
        words in text for words in ("Synthetic CPU", "max_ngram", "2 near tie", "MAT cannot tell")
    )
    described = {a["aria-describedby"] for _, a in read.found if "aria-describedby" in a}
    assert described <= ids
    assert len(ids) == len([a for _, a in read.found if "id" in a]), "an id occurs twice"


def test_the_summary_comes_first_with_its_warnings(text):
    names = ("summary", "words", "contents", "section-1", "claims")
    order = [text.index(f'id="{name}"') for name in names]
    assert order == sorted(order)
    assert text.index("Synthetic records, not a measurement") < order[0]
    assert order[0] < text.index("against the best") < text.index("<figure>") < order[1]


def test_how_to_repeat_it_is_there_with_the_code_that_no_commit_holds(run):
    run.manifest.overrides[:] = ["compare=[pld,cacheback]", "model=vicuna7b"]
    (run.path / "changes.diff").write_text("+if a < b:\n")
    (run.path / "sources").mkdir()
    (run.path / "sources" / "mine.py").write_text("class Mine: ...\n")
    made = report.page([run])
    assert "python run.py &#39;compare=[pld,cacheback]&#39; model=vicuna7b" in made
    assert "+if a &lt; b:" in made
    assert "class Mine: ..." in made
    assert "@software{specbench," in made
    verdict = "cacheback is 1.81 to 2.03 times as fast as plain decoding; no_frozen may be as fast."
    assert made.index(verdict) < made.index("against the best")


def test_day_and_machine_stand_at_the_head(text, run):
    day = min(record.started_at for record in run.records)[:10]
    head = text[text.index("<header>") : text.index("</header>")]
    assert day in head
    assert "Synthetic CPU, 2 CPUs" in head


def test_a_table_is_a_csv_file_too(read, run):
    files = {a["download"]: a["href"] for a in read.all("a") if "download" in a}
    assert {"methods.csv", "claimed_and_measured.csv", "losslessness.csv", "runs.csv"} <= set(files)
    kind, _, data = files["methods.csv"].partition(",")
    assert kind == "data:text/csv;charset=utf-8;base64"
    frame = pd.read_csv(io.BytesIO(base64.b64decode(data)))
    (comparison,) = make_comparisons([run])
    own = frame[(frame.label == "pld") & (frame.task == "overall")].iloc[0]
    entry = next(entry for entry in comparison.entries if entry.label == "pld")
    assert own.speedup == pytest.approx(entry.overall["speedup"], rel=1e-5)
    assert own.speedup_low < own.speedup < own.speedup_high


def test_names_are_no_markup_folders_are_not_told_and_a_picture_is_drawn_once(
    run, tmp_path, monkeypatch
):
    hostile = "<script>alert(1)</script>"
    run.manifest.hardware["cpu"] = hostile
    run.manifest.labels["pld"].knobs["variant"] = hostile
    run.manifest.overrides = [f"dataset.path={tmp_path}/mine.jsonl"]
    run.manifest.hardware["driver"] = f"{tmp_path}/lib/driver.so"
    run.manifest.model.id = "/home/somebody/weights/vicuna"
    again = shutil.copytree(run.path, tmp_path / "other" / "run")
    edit_manifest(again, run_key="again")
    edit_records(again, lambda record: record | {"run_key": "again"})
    drawn = []

    def picture(figure):
        drawn.append(f"{figure.title}\n{figure.caption}")
        return report.Picture(figure.title, "", "", "data:image/svg+xml;base64,", 100)

    monkeypatch.setattr(report, "picture", picture)
    made = report.page([run, *load_runs([again])])
    assert hostile not in made
    assert made.count("&lt;script&gt;") >= 2
    assert "…/mine.jsonl" in made
    assert "…/driver.so" in made
    assert "other/run" in made  # of two folders of one name
    assert str(tmp_path) not in made
    assert "/home/" not in made
    assert made.count("<figure>") == len(drawn) == len(set(drawn))


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    """Every artifact of the golden records in one page."""
    path = tmp_path_factory.mktemp("papers") / "all.html"
    assert report.main([str(GOLDEN), "-o", str(path)]) == 0
    return path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_of_many_comparisons_each_has_a_row_that_leads_to_its_section(papers):
    first = papers[papers.index('id="summary"') : papers.index("<figure>")]
    read = Reader(papers)
    links = re.findall(r'<th scope="row"><a href="#(section-\d+)">', first)
    assert len(links) > 10
    ids = {a["id"] for _, a in read.found if "id" in a}
    assert set(links) <= ids
    measured = [c for c in make_comparisons(load_runs([GOLDEN])) if c.timing == "measured"]
    assert len(links) == len([c for c in measured if leaders_of(c)])


def test_numbers_are_those_of_the_tables(text):
    (comparison,) = make_comparisons(load_runs([RECORDS]))
    for entry in comparison.entries:
        value = str(entry.measured("mat"))
        assert value in re.sub(r"<[^>]+>", "", text), entry.label


def test_pictures_have_words_and_tables_have_heads(read):
    pictures = read.all("img")
    assert len(pictures) == 5
    assert all(len(picture["alt"]) > 40 for picture in pictures)
    assert len({picture["alt"] for picture in pictures}) == 5
    regions = [a for _, a in read.found if a.get("role") == "region"]
    assert len(regions) >= len(read.all("table"))
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in regions)
    assert {a.get("scope") for a in read.all("th")} == {"row", "col", "rowgroup"}


def test_a_picture_s_words_stand_beside_it_not_in_it(run):
    (comparison,) = make_comparisons([run])
    figure = task_bars(comparison, "mat")
    made = report.picture(figure)
    assert made.title == "Mean accepted tokens by task (Vicuna-7B on Spec-Bench)"
    assert made.caption.startswith("SYNTHETIC RECORDS")
    assert "tokens per target pass" in made.shows
    assert not figure.texts


def test_pictures_are_in_the_project_s_style_with_outlined_text(read):
    for attributes in read.all("img"):
        drawn = base64.b64decode(attributes["src"].partition(",")[2]).decode()
        assert REFERENCE in drawn  # of a line across, or around bars
        assert "<text" not in drawn, "the reader's machine may lack the font"
        assert "SYNTHETIC" not in drawn


def test_the_same_records_give_the_same_bytes(page, tmp_path):
    again = tmp_path / "again.html"
    assert report.main([str(RECORDS), "-o", str(again)]) == 0
    assert again.read_bytes() == page.read_bytes()


def test_a_bug_is_the_first_thing_said(run):
    wrong = next(r.key for r in run.records if (r.label, r.status) == ("pld", "ok"))
    bug = {"verdict": "bug"}
    edit_records(
        run.path, lambda r: r | {"lossless": bug} if CaseRecord.from_json(r).key == wrong else r
    )
    comparisons = make_comparisons(load_runs([run.path]))
    assert report.warnings(comparisons)[0] == (
        "BUG: output that is not plain decoding's",
        "turns: 1",
    )


def test_runs_that_agree_in_their_environment_share_it(run, tmp_path):
    other = shutil.copytree(run.path, tmp_path / "other")
    newer = shutil.copytree(run.path, tmp_path / "newer")
    edit_manifest(newer, versions={"torch": "9"})
    apart, shared = provenance.environments(load_runs([run.path, other, newer]))
    assert (apart.runs, shared.runs) == (["newer"], ["other", "run"])
    assert apart.facts["versions.torch"] == "9"


def test_settings_are_listed_once_with_their_runs(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "other")
    tables = {table.title: table for table in provenance.settings(load_runs([tmp_path]))}
    assert list(tables) == ["ar", "cacheback", "pld"]
    assert [str(row[0]) for row in tables["cacheback"].rows] == ["cacheback", "no_frozen"]
    assert [str(row[-1]) for row in tables["cacheback"].rows] == ["2", "2"]


def test_columns_of_numbers_are_told_from_words():
    rows = [{"a": "x", "b": "1.5", "c": Estimate(2.0)}, {"a": "–", "b": "–", "c": "–"}]
    shown = ResultTable.of("", "", rows).frame
    assert numeric_columns(shown) == [False, True, True]
    assert numeric_columns(shown[:0]) == [False] * 3


def test_nothing_to_show_exits_2(tmp_path, capsys):
    assert report.main([str(tmp_path), "-o", str(tmp_path / "report.html")]) == 2
    assert "no run at or below" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


needs_browser = pytest.mark.skipif(
    browser.executable() is None,
    reason="no Chromium here (Debian: apt-get install chromium): the page was not looked at",
)
# Of a page in a frame: what is focused is seen, and what is printed has no contents to click.
LAYOUT = """(() => {
  const root = document.documentElement, style = (each) => view.getComputedStyle(each);
  const focused = [...document.querySelectorAll(".skip, main .scroll")].slice(0, 2).map((each) => {
    each.focus();
    return [document.activeElement === each, each.getBoundingClientRect().left >= 0,
      style(each).outlineStyle];
  });
  const found = {
    width: view.innerWidth,
    overflow: root.scrollWidth - root.clientWidth,
    broken: [...document.images].filter((each) => !each.complete || !each.naturalWidth).length,
    ground: style(document.body).backgroundColor,
    requests: view.performance.getEntriesByType("resource").map((each) => each.name)
      .filter((name) => !name.startsWith("data:")),
    focused,
  };
  for (const sheet of document.styleSheets)
    for (const rule of sheet.cssRules)
      if (rule.media && rule.media.mediaText === "print") rule.media.mediaText = "all";
  return {...found, printed: [...document.querySelectorAll("nav")].map((e) => style(e).display)};
})()"""


def look(text, folder):
    """What must hold at a phone's and at a desk's width, by day and by night."""
    for scheme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 29)")):
        found, complaints = browser.look(text, LAYOUT, [390, 1280], folder, scheme)
        assert complaints == []
        for width in (390, 1280):
            assert found[str(width)] == {
                "width": width,
                "overflow": 0,
                "broken": 0,
                "ground": ground,
                "requests": [],
                "focused": [[True, True, "solid"]] * 2,
                "printed": ["none"],
            }


@needs_browser
def test_in_a_browser(text, tmp_path):
    look(text, tmp_path)


@needs_browser
def test_the_browser_tells_a_page_that_is_too_wide(tmp_path):
    """The checks above can fail."""
    bad = (
        '<meta name="viewport" content="width=device-width"><nav></nav>'
        '<div style="width: 900px">wide</div><img src="data:image/png;base64,AAAA">'
        "<script>console.error('no')</script>"
    )
    found, complaints = browser.look(bad, LAYOUT, [390], tmp_path)
    assert found["390"]["overflow"] > 0
    assert found["390"]["broken"] == 1
    assert found["390"]["printed"] == ["block"]
    assert complaints


# Where the name of a row is once its table is scrolled, and how long the page is.
SCROLLED = """(() => {
  const box = [...document.querySelectorAll(".scroll")].find((e) => e.scrollWidth > e.clientWidth);
  if (box) box.scrollLeft = 150;
  const name = box && box.querySelector("tbody th[scope=row]").getBoundingClientRect().left;
  return {
    stays: !box || Math.abs(name - box.getBoundingClientRect().left) < 2,
    scrolled: box ? box.scrollLeft > 100 : false,
    height: document.documentElement.scrollHeight,
  };
})()"""
SCREENS = {390: 844, 1280: 800}  # heights of a phone and of a laptop


@needs_browser
def test_the_name_of_a_row_stays_while_its_table_scrolls(text, tmp_path):
    found, _ = browser.look(text, SCROLLED, [390], tmp_path)
    assert found["390"]["scrolled"]
    assert found["390"]["stays"]


@pytest.mark.slow
@needs_browser
def test_every_artifact_in_a_browser(papers, tmp_path):
    look(papers, tmp_path)
    found, _ = browser.look(papers, SCROLLED, [*SCREENS], tmp_path)
    for width, height in SCREENS.items():
        assert found[str(width)]["stays"]
        assert found[str(width)]["height"] <= 12 * height
