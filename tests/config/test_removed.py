"""Removed names: each row of the table gives exit code 2 and what to type instead."""

import importlib
import re
import subprocess
import sys

import pytest

import run
from runners.launch import dispatch
from specbench import paths
from specbench.config import removed
from specbench.config.compose import compose
from specbench.config.hydra_errors import translate_hydra_error
from specbench.config.removed import REMOVED, Removed
from specbench.config.validate import check_values
from specbench.errors import ConfigurationError

MAKEFILE = (paths.PROJECT / "Makefile").read_text(encoding="utf-8")


def rows(kind):
    return [pytest.param(row, id=row.name) for row in REMOVED if row.kind == kind]


def answer_to(arguments, monkeypatch, capsys):
    """Return the exit code of ``run.py`` and its stderr."""
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # a run sets it to 1; later tests start others
    return dispatch.run_application(run.answered), capsys.readouterr().err


@pytest.mark.parametrize("row", rows("key"))
def test_a_key_or_value_that_went_says_what_to_type(row, monkeypatch, capsys):
    key, _, value = row.name.partition("=")
    typed = f"{key}={value or '1'}"
    for word in (typed, f"+{typed}"):
        assert answer_to([word], monkeypatch, capsys) == (2, f"error: {row}\n")
    # From a yaml or Python, where nobody types a word: no such key, no such option, or refused.
    with pytest.raises(Exception) as caught:  # Hydra's own errors, too
        check_values(compose([typed]))
    assert str(translate_hydra_error(caught.value)) == str(row)


@pytest.mark.parametrize("row", rows("module"))
def test_a_module_that_went_says_what_to_type(row):
    for more in ([], ["RUN", "--to", "x"]):
        typed = [sys.executable, "-m", row.name, *more]
        done = subprocess.run(typed, cwd=paths.PROJECT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (2, f"error: {row}\n")


@pytest.mark.parametrize("row", rows("command"))
def test_a_verb_or_an_option_that_went_says_what_to_type(row, monkeypatch, capsys):
    command, *arguments = row.name.split()
    if command == "run.py":
        assert answer_to(arguments, monkeypatch, capsys) == (2, f"error: {row}\n")
        return
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    try:
        module = importlib.import_module(command)
        if not hasattr(module, "main"):  # a package, run by its own module
            module = importlib.import_module(f"{command}.__main__")
        code = module.main()
    except SystemExit as end:
        code = end.code
    assert (code, capsys.readouterr().err) == (2, f"error: {row}\n")


@pytest.mark.parametrize("row", [*rows("target"), Removed("target", "no-such-target", "")])
def test_a_target_that_went_says_what_to_type_without_an_environment(row):
    assert not re.search(rf"^{row.name}:", MAKEFILE, re.M)
    result = subprocess.run(
        ["make", "--no-print-directory", row.name],
        cwd=paths.PROJECT,
        capture_output=True,
        text=True,
    )
    message = str(row) if row in REMOVED else "no target 'no-such-target': `make` lists them."
    assert result.returncode == 2
    assert result.stderr.splitlines()[0] == message
    assert "setup" not in result.stdout


def test_each_kind_of_row_is_found_where_it_is_typed(monkeypatch):
    """Whatever the table holds."""
    table = (
        Removed("key", "model.colour", "leave it out"),
        Removed("key", "model.dtype=float8", "type model.dtype=float16"),
        Removed("command", "run.py tune", "type python -m scripts.tune"),
        Removed("command", "analysis.export --to aiperf", "type --to spec_bench"),
    )
    monkeypatch.setattr(removed, "REMOVED", table)
    assert removed.removed_key("model.colour", 1) and removed.removed_key("model.dtype", "float8")
    assert not removed.removed_key("model.dtype", "float16")
    assert not removed.removed_key("model.colours")
    for command, arguments in (
        ("run.py", ["tune", "--x"]),
        ("analysis.export", ["RUN", "--to=aiperf"]),
        ("analysis.export", ["--to", "aiperf", "RUN"]),
    ):
        with pytest.raises(ConfigurationError, match=r" is gone: type "):
            removed.refuse_removed(command, arguments)
    removed.refuse_removed("run.py", ["method=pld", "tune"])
    removed.refuse_removed("analysis.export", ["RUN", "--to", "spec_bench"])
    removed.refuse_removed("analysis.tables", ["--to", "aiperf"])
    for word in ("~model.colour", "++model.colour=red", "model.dtype=float8"):
        with pytest.raises(ConfigurationError, match=r" is gone: "):
            removed.refuse_overrides([word])
    removed.refuse_overrides(["model.dtype=float32", "compare=[pld]"])
