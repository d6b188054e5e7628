"""Write how to repeat a run, and the code that no commit holds."""

from __future__ import annotations

import contextlib
import inspect
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from specbench.paths import PROJECT
from specbench.results.conditions import citation
from specbench.results.manifest import RunManifest
from specbench.results.records import CHANGES, REPEAT, SOURCES
from specbench.storage import jsonl
from specbench.system import environment

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def command_line(folder: Path, manifest: RunManifest) -> str:
    """Write the command that repeats a run into its folder, with its number of threads."""
    overrides = list(manifest.overrides)
    added = any(word.startswith("add=") for word in overrides)
    if manifest.swept and not added:  # the typed output_dir is the folder of all jobs
        overrides = [word for word in overrides if not word.startswith("output_dir=")]
        overrides.append(f"output_dir={folder}")
    threads = [f"{name}={os.environ[name]}" for name in _THREADS if name in os.environ]
    return shlex.join([*threads, "python", "run.py", *overrides])


def _repeat_text(line: str, manifest: RunManifest) -> str:
    git = manifest.git or {}
    code = f"Commit {git.get('commit')}" if git.get("commit") else "No commit is known"
    if git.get("dirty"):
        code += f", with the changes in `{CHANGES}` (`git apply {CHANGES}`)"
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    facts = f"{code}. Versions: {versions}. Hardware and hashes: `manifest.json`."
    paragraphs = ["# To repeat this run", line, facts]
    if cited := citation():
        cite = "Cite the methods' papers too."
        paragraphs.append(f"# To cite it\n\n```bibtex\n{cited}\n```\n\n{cite}")
    return "\n\n".join(paragraphs) + "\n"


def write_reproduce_note(
    folder: Path, manifest: RunManifest, methods: Mapping[str, type], *, from_command: bool = True
) -> None:
    """Write ``repeat.md`` and the uncommitted code.

    Args:
        methods: their classes by name. A file, or a package with all its modules, is copied if
            the project's repository does not hold it.
        from_command: whether a command line made the run.

    Raises:
        specbench.storage.jsonl.DiskError: the disk is full or broken.
    """
    line = "`compare()` was called from Python; `manifest.json` has its values."
    if from_command:
        line = f"```bash\n{command_line(folder, manifest)}\n```"
    jsonl.write_text(folder / REPEAT, _repeat_text(line, manifest))
    if manifest.git and manifest.git.get("dirty"):
        jsonl.write_text(folder / CHANGES, environment.code_changes())
    for name, kind in methods.items():
        with contextlib.suppress(TypeError, OSError):  # typed into a notebook
            file = Path(inspect.getsourcefile(kind) or "").resolve()
            if manifest.git and file.is_relative_to(PROJECT):
                continue
            copies = {file: folder / SOURCES / f"{name}.py"}
            if file.name == "__init__.py":  # with the package's modules
                package_folder = folder / SOURCES / name
                copies = {
                    part: package_folder / part.relative_to(file.parent)
                    for part in file.parent.rglob("*.py")
                }
            for part, copy in copies.items():
                copy.parent.mkdir(parents=True, exist_ok=True)
                jsonl.write_text(copy, part.read_text(encoding="utf-8"))
