"""The example of docs/python.md runs as it is printed."""

import re
import subprocess
import sys

import pytest

from specbench import paths


@pytest.mark.slow  # it loads the bundled model
@pytest.mark.timeout(900)
def test_the_example_runs_as_printed():
    page = (paths.PROJECT / "docs" / "python.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=paths.PROJECT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for label in ("ar", "pld", "cacheback", "mine"):
        assert re.search(rf"^{label} ", done.stdout, re.M), done.stdout
