"""The code blocks of the pages: commands compose, those for newcomers run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from runners import advice
from specbench.config import compose
from specbench.config.entries import compose_entry
from specbench.config.validate import check_method, check_values
from tests.docs.pages import PAGES, ROOT, commands, text

# Not run: what sets up, many minutes, seven billion weights, and a program that may be missing.
NOT_RUN = re.compile(r"source|make|.*model=vicuna7b|.*(serve|scripts/reproduce.py .*data_dir)")
SHORT = ["generation.max_new_tokens=8", "measure.warmup=0", "measure.exclusive=false"]


def first_job(args):
    """Reduce a sweep's overrides to those of its first job."""
    if "-m" in args:
        args = [w if "[" in w else w.split(",")[0] for w in args if w != "-m"]
    return args


@pytest.mark.parametrize("page", PAGES)
def test_every_run_of_a_page_composes(page):
    """Every group, choice, key and knob exists, and its values are allowed."""
    for args in commands(page):
        if args[:2] != ["python", "run.py"] or any(w.endswith("MODEL.gguf") for w in args):
            continue
        args = first_job(args[2:])
        if args[0] == "advise":
            args = [w for w in args[1:] if not w.startswith("run=")]
            args = [w for w in advice.read(args).overrides if w != "dataset.path=MY.txt"]
        cfg = compose.compose(args)
        check_values(cfg)
        if cfg.runner.name != "serve":
            for entry in cfg.compare:
                check_method(compose_entry(cfg, entry).method)


@pytest.fixture
def workplace(tmp_path, checkpoint):
    """Make a folder like the project, with data and weights that readers bring."""
    for path in ROOT.iterdir():
        if path.name == ".cache" or not path.name.startswith((".", "results", "wandb")):
            (tmp_path / path.name).symlink_to(path)
    lines = (ROOT / "assets/demo.jsonl").read_text().splitlines()
    (tmp_path / "DIR").mkdir()
    (tmp_path / "DIR/spec_bench.jsonl").write_text("\n".join(lines))
    (tmp_path / "MY.txt").write_text("".join(f"{json.loads(x)['turns'][0]!r}\n" for x in lines))
    shutil.copytree(checkpoint, tmp_path / "WEIGHTS")
    return tmp_path


def shorten(args):
    """Add overrides to a command that make it quick."""
    if args[:2] != ["python", "run.py"] or "--list" in args:
        return args
    if "advise" in args:
        return [*args, "minutes=1", *SHORT[:2], "methods=[pld]"]
    limit = [] if any("dataset.limit" in word for word in args) else ["dataset.limit=2"]
    if "-m" in args:  # two values of a knob
        args = [re.sub(r"^([\w.]+=[\w.]+,[\w.]+),.*", r"\1", word) for word in args]
    return [*args, *SHORT, *limit]


@pytest.mark.slow  # the real small model, some ten times
@pytest.mark.timeout(3600)
def test_the_commands_of_readme_and_add_a_method_run(workplace):
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    quiet = {"PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    failed, ran = [], 0
    for args in [*commands("README.md"), *commands("docs/add_a_method.md")]:
        command = shlex.join(shorten(args))
        if NOT_RUN.match(command):
            continue
        done = subprocess.run(
            ["bash", "-c", command], cwd=workplace, env={**os.environ, **quiet},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        ran += 1
        if done.returncode:
            failed.append(f"{command}\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    assert not failed, "\n\n".join(failed)
    assert ran > 4


@pytest.mark.slow  # it loads the bundled model
@pytest.mark.timeout(900)
def test_the_example_in_python_runs_as_printed(tmp_path):
    (example,) = re.findall(r"^```python\n(.*?)^```$", text("docs/config.md"), re.S | re.M)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for label in ("ar", "pld", "cacheback", "mine"):
        assert re.search(rf"^{label} ", done.stdout, re.M), done.stdout
