"""What the pages name exists: links, paths, modules, make targets."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *("README.md", "CONTRIBUTING.md", "surfaces/README.md", "assets/draft_smollm2_135m/README.md"),
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
]
PAGES = [page for page in PAGES if not (ROOT / page).with_suffix(".csv").is_file()]  # its words
# What readers write themselves: their machine's settings, and the examples of how to add a method.
READERS_OWN = re.compile(
    r"conf/local/default\.yaml"
    r"|docs/measurements/(gpu|h100|NAME|<gpu>)/.*"  # of a GPU
    r"|(methods|conf/method)/(my_method|successor_walk|likeliest_chain)\.\w+"
)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_blocks(name: str) -> str:
    """The shell blocks of a document, comments removed."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", text(name), re.S | re.M)
    return "\n".join(line.split(" #")[0] for block in blocks for line in block.splitlines())


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*?## ", text("Makefile"), re.M))


@pytest.mark.parametrize("page", PAGES)
def test_links_paths_modules_and_targets_that_a_page_names_exist(page):
    links = re.findall(r"\]\(([^)#:]+)\)", text(page))
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    # Not `conf/pair/draft_<model>.yaml` and not `tests/decoding/test_*.py`: those name a pattern.
    folders = "specbench|methods|runners|analysis|scripts|tests|conf|docs"
    paths = re.findall(rf"(?<![\w./-])((?:{folders})/[\w/.-]*+)(?![<*])", text(page))
    missing += [
        path
        for path in paths
        if not READERS_OWN.fullmatch(path) and not (ROOT / path.rstrip(".")).exists()
    ]
    modules = re.findall(r"python -m ((?:specbench|runners|analysis|scripts)\.[\w.]+)", text(page))
    places = {name: ROOT / name.replace(".", "/") for name in modules}
    missing += [
        name
        for name, place in places.items()
        if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists()
    ]
    assert not missing
    assert set(re.findall(r"`make ([a-z-]+)", text(page))) <= make_targets()
