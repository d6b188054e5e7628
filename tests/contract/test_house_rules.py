"""Rules of the house that neither ruff nor the import contracts can check."""

import ast
import re
from pathlib import Path

from specbench.paths import PROJECT

PACKAGES = ("specbench", "methods", "runners", "analysis", "scripts")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (PROJECT / folder).rglob("*.py"))


def test_compiled_code_calls_none_of_another_file():
    """Numba's cache on disk does not notice a change there, and runs the old code (numba 0.68)."""
    compiled = {}
    for path in sources("specbench", "methods"):
        body = ast.parse(path.read_text("utf-8")).body
        functions = [node for node in body if isinstance(node, ast.FunctionDef)]
        names = {f.name for f in functions if any("njit" in ast.dump(d) for d in f.decorator_list)}
        if names:
            compiled[".".join(path.relative_to(PROJECT).with_suffix("").parts)] = (path, names)
    assert len(compiled) > 10
    for path, _ in compiled.values():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in compiled:
                taken = {alias.name for alias in node.names} & compiled[node.module][1]
                assert not taken, f"{path.name}: compiled code needs a copy of its own of {taken}"


def test_no_code_runs_from_a_file():
    for path in sources(*PACKAGES):
        source = path.read_text(encoding="utf-8")
        pickles = r"\bpickle\.(loads?|Unpickler)\b|^\s*import (dill|joblib)"
        assert not re.search(pickles, source, re.M), path
        assert not re.search(r"trust_remote_code\s*=\s*True|weights_only\s*=\s*False", source), path
        assert not re.search(r"torch\.load\((?!.*weights_only=True)", source), path


def test_configured_classes_and_names_in_docstrings_exist():
    """No tool follows ``:mod:`a.b``` and ``_target_`` strings when a file moves."""
    ours = rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+"
    named = rf":\w+:`~?({ours})`|_target_['\"]?: ['\"]?({ours})"
    for path in [*sources(*PACKAGES), *(PROJECT / "conf").rglob("*.yaml")]:
        for role, target in re.findall(named, path.read_text(encoding="utf-8")):
            parts = (role or target).split(".")
            base = PROJECT
            # A folder may be what Python left of a package that is a file now.
            while parts and not (base / f"{parts[0]}.py").exists() and (base / parts[0]).is_dir():
                base /= parts.pop(0)
            if parts:
                module = base / f"{parts[0]}.py"
                if module.exists():
                    parts.pop(0)
                else:
                    module = base / "__init__.py"
                defined = not parts or re.search(rf"\b{parts[0]}\b", module.read_text("utf-8"))
                assert defined, f"{path}: {role or target}"
