"""Free memory of the host, under a container's limit of each version and without one."""

import pytest

from specbench.system import host_memory

GIB = 1 << 30
STAT = f"anon 1\n{{files}} {2 * GIB}\nshmem 0\n"


@pytest.fixture(autouse=True)
def groups(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "_ROOT", tmp_path)

    class Machine:
        total, available = 64 * GIB, 40 * GIB

    monkeypatch.setattr(host_memory.psutil, "virtual_memory", Machine)
    return tmp_path


def written(folder, limit, taken, stat, files, most):
    (folder / limit).parent.mkdir(exist_ok=True)
    (folder / limit).write_text(f"{most}\n")
    (folder / taken).write_text(f"{5 * GIB}\n")
    (folder / stat).write_text(STAT.format(files=files))


def test_without_a_limit_the_machine_counts(groups):
    assert (host_memory.total_bytes(), host_memory.free_bytes()) == (64 * GIB, 40 * GIB)
    written(groups, "memory.max", "memory.current", "memory.stat", "inactive_file", "max")
    assert (host_memory.total_bytes(), host_memory.free_bytes()) == (64 * GIB, 40 * GIB)


@pytest.mark.parametrize(
    "files",
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
            "total_inactive_file",
        ),
    ],
)  # fmt: skip
def test_a_container_has_less(groups, files):
    written(groups, *files, 8 * GIB)
    # Of 5 GiB taken 2 are pages of files, which the kernel drops when memory is asked for.
    assert (host_memory.total_bytes(), host_memory.free_bytes()) == (8 * GIB, 5 * GIB)
    written(groups, *files, 2 * GIB)
    assert host_memory.free_bytes() == 0
    written(groups, *files, 100 * GIB)
    assert (host_memory.total_bytes(), host_memory.free_bytes()) == (64 * GIB, 40 * GIB)
