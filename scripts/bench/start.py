"""What commands take besides measuring: a one-case run, twice, and its table.

    python -m scripts.bench start [--times 3] [--out FILE]

Each is a process of its own, its children's part included: seconds on the wall, of the processors,
and the most memory that one process had. The first run may check the model and measure kernels; the
later ones find both in the cache.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from scripts.bench import print_table
from specbench.paths import PROJECT

RUN = ("run.py", "method=pld", "dataset.limit=1", "generation.max_new_tokens=8")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=3, help="of each command; medians are shown")


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    taken: dict[str, list[dict[str, float]]] = {"first_run": [], "run": [], "tables": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.times + 1):
            place = os.path.join(folder, str(number))
            found = timed([*RUN, f"output_dir={place}"])
            taken["run" if number else "first_run"].append(found)
            taken["tables"].append(timed(["-m", "analysis.tables", place]))
            lines = [
                {"name": name, "times": len(each), **medians(each)}
                for name, each in taken.items()
                if each
            ]
            yield {"run_command": " ".join(RUN), "commands": lines}


def medians(each: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in each) for key in each[0]}


def timed(arguments: list[str]) -> dict[str, float]:
    """What ``python ARGUMENTS`` takes.

    Raises:
        CalledProcessError: it fails.
    """
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=PROJECT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments, stderr=said)
    return {
        "wall_s": wall,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mb": 1024 * used.ru_maxrss / 1e6,
    }


def show(results: dict[str, Any]) -> None:
    cells = [
        "{name}|{times}|{wall_s:.1f}|{cpu_s:.1f}|{peak_mb:.0f}".format_map(line).split("|")
        for line in results["commands"]
    ]
    print_table("a command", ("command", "times", "wall s", "CPU s", "peak MB"), cells)
