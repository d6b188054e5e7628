"""``python scripts/X.py`` runs the checkout it lies in, whatever else is installed."""

import ast
import shutil
import subprocess
import sys

import pytest

from specbench.paths import PROJECT

PACKAGES = {"specbench", "methods", "runners", "analysis", "scripts"}


@pytest.mark.parametrize("name", ["fetch_data"])
def test_a_script_imports_its_neighbors(name, tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(PROJECT / "scripts" / f"{name}.py", tmp_path / "scripts")
    for package in ("specbench", "analysis"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('this checkout')")
    command = [sys.executable, str(tmp_path / "scripts" / f"{name}.py")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.stderr.strip() == "this checkout"


@pytest.mark.parametrize("path", sorted((PROJECT / "scripts").glob("*.py")), ids=lambda p: p.stem)
def test_every_script_names_its_checkout_before_it_imports_from_it(path):
    text = path.read_text(encoding="utf-8")
    if "__main__" not in text:
        pytest.skip("nobody runs it by its name")
    first = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("sys.path.insert(0, "):
            first["named"] = node.lineno
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if {name.partition(".")[0] for name in names} & PACKAGES:
            first.setdefault("imported", node.lineno)
    assert "imported" not in first or first["named"] < first["imported"]
