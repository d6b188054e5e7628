"""The example methods of README and docs/add_a_method.md work as printed."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, text

EXAMPLES = ("my_method", "successor_walk", "likeliest_chain")
SUITE = """
import sys, pytest, methods
from pathlib import Path
from specbench import paths
root = Path(sys.argv[1])
paths.CONF_DIR = root / "conf"
methods.__path__.append(str(root / "methods"))
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", *sys.argv[2:]]))
"""
WITH_DRAFT_MODEL = [
    "tests/methods/test_draft_methods.py",
    "tests/methods/test_union_drafts.py",
    "tests/decoding/test_sampling_methods.py",
]


@pytest.mark.slow  # separate processes that compile and load everything again
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tests", [["tests/contract"], WITH_DRAFT_MODEL], ids=["all", "drafts"])
def test_the_tests_find_the_examples_and_pass(tmp_path, tests):
    """Two files each, and nothing else was edited."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "methods").mkdir()
    blocks = r"^```(?:python|yaml)\n(# (\S+\.(?:py|yaml))[^\n]*\n.*?)^```$"
    listings = re.findall(blocks, text("README.md") + text("docs/add_a_method.md"), re.S | re.M)
    files = {f for e in EXAMPLES for f in (f"methods/{e}.py", f"conf/method/{e}.yaml")}
    assert {name for _, name in listings} == files
    for listing, name in listings:
        (tmp_path / name).write_text(listing, encoding="utf-8")
    chosen = [*tests, "-k", " or ".join([*EXAMPLES, "experiment"])]
    done = subprocess.run(
        [sys.executable, "-c", SUITE, str(tmp_path), *chosen],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 10
