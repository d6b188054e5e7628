"""``python scripts/X.py`` runs the checkout it lies in, whatever else is installed."""

import shutil
import subprocess
import sys

import pytest

from specbench.paths import PROJECT


@pytest.mark.parametrize("name", ["check_env", "export_traces", "fetch_data"])
def test_a_script_imports_its_neighbors(name, tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(PROJECT / "scripts" / f"{name}.py", tmp_path / "scripts")
    for package in ("specbench", "analysis"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('this checkout')")
    command = [sys.executable, str(tmp_path / "scripts" / f"{name}.py")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.stderr.strip() == "this checkout"
