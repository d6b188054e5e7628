"""The environment of a run: hardware, versions and code.

The result of :func:`describe` goes into the manifest and is compared when a run is resumed, so it
holds nothing that changes by itself; load, stolen time and GPU clocks are in
:mod:`specbench.system.interference`. torch is used only where it is loaded already.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from specbench.paths import PROJECT
from specbench.system import cuda_settings
from specbench.system.hardware import GitState, Gpu, Hardware, Machine

# Packages that may change a number or an output.
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "numba",
    "scipy",
    "accelerate",
    "safetensors",
    "gguf",
    "hydra-core",
    "pydivsufsort",
)

# Variables that set how many threads a pass has and where they run, in any library.
_THREAD_SETTINGS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
)

# Hardware that must be equal for numbers to be comparable, besides the GPUs.
_COMPARED = ("cpu", "cpus_usable", "pinned_to", "threads_set", "governor")

# Changes to other files (prose, results) do not count as changes of the code.
_CODE = ("*.py", "*.yaml", "*.toml")
# Kernels, engine, methods and their settings; what an experiment sets is in a run's manifest.
_MEASURED = tuple(f"specbench/{p}" for p in ("kernels", "models", "decoding", "draft_structures"))
_MEASURED += ("methods", "conf")
_NOT_MEASURED = ("conf/experiment", "conf/local")
_COMMAND_TIMEOUT_S = 20
_CPUS = Path("/sys/devices/system/cpu")
_CPUINFO = Path("/proc/cpuinfo")


def describe() -> Machine:
    """Describe this machine, its packages and this code."""
    return {
        "hardware": hardware(),
        "versions": versions(),
        "git": git_state(),
        "code": _imported_code(),
        "cuda_settings": cuda_settings.in_force(),
    }


def fingerprint(description: Machine) -> dict[str, Any]:
    """Select the part of a description that must be equal for numbers to be comparable."""
    machine, packages, git = description["hardware"], description["versions"], description["git"]
    return {
        **{name: machine.get(name) for name in _COMPARED},
        "gpus": [gpu["name"] for gpu in machine.get("gpus", [])],
        **{name: packages.get(name) for name in ("python", "torch", "transformers", "numpy")},
        "commit": git.get("commit") if git else None,
        "cuda_settings": description.get("cuda_settings", {}),
    }


def hardware() -> Hardware:
    """Describe CPU, memory and GPUs of this machine."""
    allowed = allowed_cpus()
    return {
        "cpu": cpu_model(),
        "cpus": psutil.cpu_count(logical=True),
        "cores": psutil.cpu_count(logical=False),
        "cpus_usable": len(allowed),
        "pinned_to": "all" if len(allowed) == os.cpu_count() else ",".join(map(str, allowed)),
        "governor": governor(),
        "threads_set": {name: os.environ[name] for name in _THREAD_SETTINGS if name in os.environ},
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "cache_bytes": cache_bytes(),
        "gpus": gpus(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def cache_bytes(cpus: Path = _CPUS) -> int | None:
    """Add up the last caches before the memory, of all CPUs that this process may run on."""
    sizes: dict[tuple[str, str], int] = {}
    for cpu in allowed_cpus():
        for cache in (cpus / f"cpu{cpu}" / "cache").glob("index*"):
            level, kib = _read(cache / "level"), _read(cache / "size").removesuffix("K")
            if level and kib.isdecimal():
                sizes[level, _read(cache / "shared_cpu_list") or str(cpu)] = int(kib) << 10
    last = max((level for level, _ in sizes), default=None)
    return sum(size for (level, _), size in sizes.items() if level == last) or None


def allowed_cpus() -> list[int]:
    """List the CPUs this process may run on (a container or ``taskset`` may allow fewer)."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    # OpenMP keeps the thread that loads it on the first of its places.
    places = map(int, re.findall(r"\{(\d+)\}", os.environ.get("OMP_PLACES", "")))
    return sorted(os.sched_getaffinity(0).union(places))


def cpus_usable() -> int:
    """Count the CPUs that this process may run on."""
    return len(allowed_cpus())


def pinned_threads(cpus: Path = _CPUS) -> dict[str, str]:
    """Make the variables for a process whose OpenMP threads have one CPU each (``measure.pin``).

    The first CPUs of all cores come before second ones, which share a core with them.
    """
    ranks: dict[int, int] = {}
    seen = Counter[str]()
    for cpu in allowed_cpus():
        core = _read(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu)
        ranks[cpu] = seen[core]
        seen[core] += 1
    places = sorted(ranks, key=lambda cpu: (ranks[cpu], cpu))
    return {"OMP_PROC_BIND": "close", "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in places)}


def governor(cpus: Path = _CPUS) -> str | None:
    """Name the governors of the CPUs' frequency; None where the system does not tell."""
    files = (cpus / f"cpu{cpu}" / "cpufreq" / "scaling_governor" for cpu in allowed_cpus())
    return ", ".join(dict.fromkeys(filter(None, map(_read, files)))) or None


def _read(path: Path) -> str:
    """Read a small file of the system; "" where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@functools.cache
def cpu_model() -> str:
    """Name the CPU as its vendor does, else its architecture."""
    if match := re.search(r"^model name\s*:[ \t]*(\S.*)$", _read(_CPUINFO), re.MULTILINE):
        return " ".join(match[1].split())
    on_a_mac = sys.platform == "darwin"
    name = _output_of("sysctl", "-n", "machdep.cpu.brand_string") if on_a_mac else None
    return name or platform.processor() or platform.machine() or "unknown"


@functools.cache
def _gpus() -> tuple[Gpu, ...]:
    # The driver's own tool answers in parent and child alike, whether or not torch is loaded.
    fields = "--query-gpu=name,memory.total,driver_version"
    query = _output_of("nvidia-smi", fields, "--format=csv,noheader,nounits") or ""
    rows = [[part.strip() for part in line.rsplit(",", 2)] for line in query.splitlines()]
    torch = sys.modules.get("torch")
    if not rows and torch is not None and torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        rows = [[d.name, str(d.total_memory // 2**20), "unknown"] for d in devices]
    return tuple(
        {"name": name, "memory_gib": round(int(mib) / 1024) if mib.isdigit() else 0, "driver": by}
        for name, mib, by in rows
    )


def gpus() -> list[Gpu]:
    """List the NVIDIA GPUs of this machine."""
    return [gpu.copy() for gpu in _gpus()]


def versions() -> dict[str, str]:
    """Read versions of Python and of packages that may change a number, if installed."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def git_state(root: Path = PROJECT) -> GitState | None:
    """Tell the commit of the code below ``root``, and changes since; None outside a repository."""
    if _output_of("git", "rev-parse", "--is-inside-work-tree", cwd=root) != "true":
        return None
    commit = _output_of("git", "rev-parse", "--verify", "--quiet", "HEAD", cwd=root) or None
    status = _output_of("git", "status", "--porcelain", "--", *_CODE, cwd=root) or ""
    state: GitState = {"commit": commit, "dirty": bool(status)}
    if status:
        difference = _output_of("git", "diff", "HEAD", "--", *_CODE, cwd=root) or ""
        state["changes"] = hashlib.sha256(f"{status}\n{difference}".encode()).hexdigest()[:16]
    return state


@functools.cache
def _imported_code() -> str:
    """Hash this code once: a process goes on with what it imported, whatever is written later."""
    return code_sha256()


def code_sha256(root: Path = PROJECT) -> str:
    """Hash the code below ``root`` that a run's numbers depend on, to sixteen digits."""
    digest = hashlib.sha256()
    for part in _MEASURED:
        for path in sorted((root / part).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix in (".py", ".yaml") and not name.startswith(_NOT_MEASURED):
                digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def code_changes(root: Path = PROJECT) -> str:
    """Diff the code below ``root`` against its commit, as ``git apply`` takes it.

    New files stand there in full. "" outside a repository.
    """
    changed = _output_of("git", "diff", "HEAD", "--", *_CODE, cwd=root)
    listed = _output_of("git", "ls-files", "--others", "--exclude-standard", "--", *_CODE, cwd=root)
    parts = [f"{changed}\n"] if changed else []
    for name in (listed or "").splitlines():
        with contextlib.suppress(OSError, UnicodeError):
            lines = (root / name).read_text(encoding="utf-8").splitlines(keepends=True)
            new = difflib.unified_diff([], lines, "/dev/null", f"b/{name}")
            parts.append("".join(line if line.endswith("\n") else f"{line}\n" for line in new))
    return "".join(parts)


def _output_of(*command: str, cwd: Path | None = None) -> str | None:
    """Run a program and return its output, stripped; None where it is absent or fails."""
    try:
        result = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            check=True,
            timeout=_COMMAND_TIMEOUT_S,
            # Reading the state must not take the repository's lock from someone who works in it.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.decode(errors="replace").strip()
