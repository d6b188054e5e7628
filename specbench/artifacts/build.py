"""What the scripts that build artifacts share: a file appears when it is whole; then a report."""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specbench.artifacts.resolve import describe
from specbench.errors import SpecBenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

# Linux counts in KiB, macOS in bytes.
_MEMORY_UNIT = 1 if sys.platform == "darwin" else 1024


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A file to write beside ``out``: it takes its place in the end, or goes after a failure."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def command(build: Callable[[], Path], what: Callable[[Mapping[str, Any]], str]) -> int:
    """Build a file and say what is in it; an error is one line.

    Args:
        build: makes the file.
        what: the file's header in words.

    Returns:
        The exit code.
    """
    start = time.perf_counter()
    try:
        path = build()
    except SpecBenchError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    facts = describe(path)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MEMORY_UNIT / 2**30
    sys.stdout.write(
        f"{path}: {what(facts['header'])} ({facts['bytes'] / 2**20:.1f} MiB, "
        f"{time.perf_counter() - start:.1f} s, peak memory {peak:.2f} GiB)\n"
    )
    return 0
