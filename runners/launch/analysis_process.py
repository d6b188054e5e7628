"""Starting a command of ``analysis``, in a process of its own: runners import no analysis."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from specbench.paths import PROJECT


def run_analysis(module: str, *arguments: str | Path) -> int:
    """Run ``python -m analysis.MODULE ARGUMENTS`` of this checkout; its exit code."""
    command = [sys.executable, "-m", f"analysis.{module}", *map(str, arguments)]
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    # A session of its own: a terminal's Ctrl-C reaches this process alone, which ends that one.
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, check=False, start_new_session=True).returncode
