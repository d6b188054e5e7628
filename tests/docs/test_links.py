"""Links, paths, modules and make targets that the pages name exist."""

import re

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, text

# What readers write themselves: their machine's settings, and the examples of how to add a method.
READERS_OWN = re.compile(
    r"conf/local/default\.yaml"
    r"|docs/measurements/(gpu|h100|NAME|<gpu>)/.*"
    r"|(methods|conf/method)/(my_method|successor_walk|likeliest_chain)\.\w+"
)
FOLDERS = "specbench|methods|runners|analysis|scripts|tests|conf|docs"


@pytest.mark.parametrize("page", PAGES)
def test_links_paths_modules_and_targets_of_a_page_exist(page):
    missing = []
    for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text(page)):
        target = ((ROOT / page).parent / link).resolve() if link else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(str(target))):
            missing.append(f"{link}#{anchor}")
    # Not `conf/pair/draft_<model>.yaml` and not `tests/decoding/test_*.py`: those are patterns.
    paths = re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w/.-]*+)(?![<*])", text(page))
    paths = [path.rstrip(".") for path in paths if not READERS_OWN.fullmatch(path)]
    missing += [path for path in paths if not (ROOT / path).exists()]
    for name in re.findall(r"python -m ((?:specbench|runners|analysis|scripts)[\w.]+)", text(page)):
        module = ROOT / name.replace(".", "/")
        if not module.with_suffix(".py").exists() and not (module / "__main__.py").exists():
            missing.append(name)
    assert not missing
    targets = re.findall(r"^([a-z-]+):.*?## ", text("Makefile"), re.M)
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text(page), re.M)) <= set(targets)
