"""Memory of the host: the machine's, or less where its container (cgroup) has a limit."""

from __future__ import annotations

from pathlib import Path

import psutil

_NO_LIMIT = 1 << 62
_ROOT = Path("/sys/fs/cgroup")
# Of version 2 and of version 1: the limit, what is taken, and what of that is files' pages.
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def total_bytes() -> int:
    """Return how much memory this process may take at most."""
    return min(int(psutil.virtual_memory().total), _container()[0])


def free_bytes() -> int:
    """Return how much of it is free; unused pages of files count as free."""
    limit, taken = _container()
    return min(int(psutil.virtual_memory().available), max(0, limit - taken))


def _container() -> tuple[int, int]:
    for limit, taken, stat, files in _FILES:
        try:
            most = (_ROOT / limit).read_text().strip()
            if most == "max":
                continue
            lines = dict(line.split() for line in (_ROOT / stat).read_text().splitlines())
            used = int((_ROOT / taken).read_text()) - int(lines.get(files, 0))
            return int(most), used
        except (OSError, ValueError):
            continue
    return _NO_LIMIT, 0
