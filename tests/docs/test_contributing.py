"""The example methods of CONTRIBUTING.md work as they stand there."""

import importlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import methods
from methods.union import Union
from specbench import paths
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftContext
from specbench.decoding.verify import GreedyVerifier
from tests.contract import driver, test_methods
from tests.decoding.table_models import TableDraft, TableTarget, table

PATTERN = re.compile(r"^```(?:python|yaml)\n(# (\S+\.(?:py|yaml))[^\n]*\n.*?)^```$", re.S | re.M)


EXAMPLES = ("successor_walk", "likeliest_chain")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with the project's ``conf/`` and the files of the examples."""
    folder = tmp_path_factory.mktemp("newcomer")
    shutil.copytree(paths.PROJECT / "conf", folder / "conf")
    blocks = PATTERN.findall((paths.PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    written = {name for _, name in blocks}
    assert written == {f for e in EXAMPLES for f in (f"methods/{e}.py", f"conf/method/{e}.yaml")}
    for text, name in blocks:
        pasted = paths.PROJECT / name
        assert not pasted.exists() or pasted.read_text() == text, "an example hides a method"
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def make(root, monkeypatch):
    """Makes an example, composed and instantiated as every method is."""
    monkeypatch.setattr(paths, "CONF_DIR", root / "conf")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(root / "methods")])
    importlib.invalidate_caches()
    return driver.instantiate


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


@pytest.mark.slow  # processes of their own that compile and load everything anew
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "tests", [["tests/contract"], WITH_DRAFT_MODEL], ids=["contract", "draft_model"]
)
def test_the_tests_find_the_examples_and_pass(root, tests):
    """Two files each, and nothing else was edited."""
    names = [*EXAMPLES, "experiment"]
    options = [str(root), *tests, "-k", " or ".join(names)]
    done = subprocess.run(
        [sys.executable, "-c", SUITE, *options], cwd=paths.PROJECT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 10


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("make")
def test_the_example_s_yaml_and_class_agree(name):
    """As the contract asks of every method; the slow test above has all of it."""
    test_methods.test_yaml_and_class_agree(name)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in_a_union"])
def test_the_example_with_a_draft_model_is_exact(make, alone):
    """The draft is the target with some noise; it asserts that its cache holds the text."""
    drafter = make("likeliest_chain")
    walk = make("successor_walk")
    method = drafter if alone else Union(drafters=[walk, drafter], max_nodes=8)
    logits = table(0, 8, 3.0)
    draft = TableDraft(logits + 0.7 * table(1, 8))
    method.setup(DraftContext(8, frozenset(), draft_model=draft))
    loop = Engine(TableTarget(logits), GreedyVerifier(), eos_ids=frozenset())
    prompt = np.array([3, 1, 4], dtype=np.int64)
    expected = loop.decode(prompt, Drafter(name="plain"), max_new_tokens=60)
    method.reset()
    found = loop.decode(prompt, method, max_new_tokens=60)
    assert found.output_ids == expected.output_ids
    assert found.n_target_passes < 0.8 * expected.n_target_passes
    counts = {key.rpartition(".")[2]: value for key, value in found.drafter.items()}
    assert 0 < counts["draft_forwards"] <= counts["draft_tokens"]
