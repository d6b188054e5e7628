"""The command lines of the documents: all of them parse and compose; README's are run."""

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runners.advice import command as advice_command
from runners.serve import Serve
from specbench.config import compose
from specbench.config.compare import compose_entry
from specbench.config.knobs import check_method
from specbench.config.validate import check_values
from tests.docs.test_links import PAGES, ROOT, code_blocks, make_targets

# Lines of README and CONTRIBUTING that no test runs, by what they begin with or contain, and why.
NOT_RUN = {
    "source ": "the environment that runs this test is already there",
    "make ": "the set-up, the tests themselves, or many minutes; their targets are tested",
    "model=vicuna7b": "weights from the hub, or seven billion random ones",
}
OTHERS_PROGRAMS = ("vllm", "llama-server", "source", "python3.11", "VLLM/bin")
# What makes a line quick enough to run: words put behind those that it has.
SHORT = ["generation.max_new_tokens=8", "measure.warmup=0", "measure.exclusive=false"]


def lines_of(document):
    whole = re.sub(r" *\\\n *", " ", code_blocks(document))
    return [line.rstrip() for line in whole.splitlines() if line.strip()]


def commands(line):
    """``(environment, words)`` of each command of a line."""
    found = []
    for part in line.split(" ; "):
        words = shlex.split(part)
        named = [word for word in words if re.match(r"[A-Z_]+=", word)]
        lead = len(named) if words[: len(named)] == named else 0
        found.append((dict(word.split("=", 1) for word in words[:lead]), words[lead:]))
    return found


def jobs_of(words):
    """Overrides of jobs that a command starts: those of the first and last values of a sweep."""
    if "-m" not in words:
        return [words]
    choices = []
    for word in words:
        if word != "-m":
            key, values = word.split("=", 1)
            several = [values] if "[" in values else values.split(",")
            choices.append([f"{key}={value}" for value in several])
    return [[values[end] for values in choices] for end in (0, -1)]


def composes(words):
    """Every group, choice, key and knob of the line exists, and its values are allowed."""
    if words[0] == "advise":
        own = [
            word for word in words[1:] if not word.startswith("run=")
        ]  # a folder of the reader's
        words = [word for word in advice_command.read(own).words if word != "dataset.path=MY.txt"]
    for overrides in jobs_of(words):
        cfg = compose.compose(overrides)
        check_values(cfg)
        if any(word.endswith("MODEL.gguf") for word in words):
            continue  # the reader's file
        if cfg.runner.name == "serve":
            Serve().entries(cfg)  # the server drafts: entries name its ways of drafting
            continue
        for entry in cfg.compare:
            check_method(compose_entry(cfg, entry).method)


class Parsed(Exception):
    """A program has understood its arguments."""


def parses(module, arguments, monkeypatch):
    """The program's own parser takes the arguments; nothing after that is run."""

    def stopping(parse):
        def parsed(self, *rest, **options):
            parse(self, *rest, **options)
            raise Parsed

        return parsed

    for name in ("parse_args", "parse_intermixed_args"):
        parse = stopping(getattr(argparse.ArgumentParser, name))
        monkeypatch.setattr(argparse.ArgumentParser, name, parse)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed):
        found = importlib.import_module(module)
        if not hasattr(found, "main"):  # a package, run by its own module
            found = importlib.import_module(f"{module}.__main__")
        found.main()


def check(line, monkeypatch):
    for _, words in commands(line):
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= set(make_targets())
        elif words[:2] == ["python", "run.py"]:
            composes(words[2:])
        elif words[0].startswith(OTHERS_PROGRAMS) or words[:3] == [
            "python",
            "-m",
            "sglang.launch_server",
        ]:
            continue
        elif words[0] == "jupytext":
            assert (ROOT / words[-1]).is_file()
        elif words[:2] == ["python", "-m"]:
            parses(words[2], words[3:], monkeypatch)
        else:
            assert words[0] == "python", "no kind of command that this test knows"
            assert (ROOT / words[1]).is_file()
            if words[1].startswith("scripts/"):
                module = words[1].removesuffix(".py").replace("/", ".")
                parses(module, words[2:], monkeypatch)


@pytest.mark.parametrize("page", [page for page in PAGES if lines_of(page)])
def test_every_command_of_a_page_is_one_that_exists(page):
    for line in lines_of(page):
        try:
            with pytest.MonkeyPatch.context() as monkeypatch:
                check(line, monkeypatch)
        except BaseException as error:  # a parser exits
            raise AssertionError(line) from error


@pytest.mark.slow  # it loads the bundled model
@pytest.mark.timeout(900)
def test_the_example_in_python_runs_as_printed():
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for label in ("ar", "pld", "cacheback", "mine"):
        assert re.search(rf"^{label} ", done.stdout, re.M), done.stdout


def shortened(words):
    """The line's words, and those that make it quick, which win over its own."""
    if words[:2] != ["python", "run.py"] or "--list" in words:
        return words
    if "advise" in words:
        return [*words, "minutes=1", *SHORT[:2], "methods=[pld]"]
    limit = [] if any("dataset.limit" in word for word in words) else ["dataset.limit=2"]
    if "-m" in words:  # a sweep of a reader's length would take minutes: two values of a knob
        words = [re.sub(r"^([\w.]+=[\w.]+,[\w.]+),.*", r"\1", word) for word in words]
    return [*words, *SHORT, *limit]


@pytest.fixture
def workplace(tmp_path, checkpoint):
    """A folder that looks like the project, with what readers bring: data, weights of theirs."""
    names = [path.name for path in ROOT.iterdir() if not path.name.startswith(".")]
    for name in {*names, ".cache"} - {"results", "wandb"}:
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "DIR").mkdir()
    for place in ("DIR/spec_bench.jsonl", "FILE.jsonl"):
        shutil.copy(ROOT / "assets/demo.jsonl", tmp_path / place)
    lines = (ROOT / "assets/demo.jsonl").read_text().splitlines()
    (tmp_path / "MY.txt").write_text("".join(f"{json.loads(x)['turns'][0]!r}\n" for x in lines))
    # Of the questions that settings are chosen by, too.
    with (tmp_path / "DIR/spec_bench.jsonl").open("a") as file:
        for number, line in enumerate(lines[:4]):
            file.write(json.dumps({**json.loads(line), "question_id": 88 + 20 * number}) + "\n")
    shutil.copytree(checkpoint, tmp_path / "WEIGHTS")
    return tmp_path


@pytest.mark.slow  # the real small model, some twenty times
@pytest.mark.timeout(3600)
def test_the_lines_of_the_readme_and_contributing_run(workplace):
    """In their order, with few and short cases; results of one are what the next one reads."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
    }
    failed, ran = [], 0
    lines = [line for page in ("README.md", "CONTRIBUTING.md") for line in lines_of(page)]
    for line in dict.fromkeys(lines):
        if any(words in f"{line}  " for words in NOT_RUN):
            continue
        for text in line.split(" ; "):
            command = text
            if text.startswith("python"):
                ((_, words),) = commands(text)
                command = shlex.join(shortened(words))
            done = subprocess.run(
                ["bash", "-c", command], cwd=workplace, env=environment,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            ran += 1
            if done.returncode:
                failed.append(f"{command}\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    assert not failed, "\n\n".join(failed)
    assert ran > 8
