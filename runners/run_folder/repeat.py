"""What a new run leaves about how to repeat it, and the code that no commit holds."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from pathlib import Path

from specbench.paths import PROJECT
from specbench.results.conditions import citation
from specbench.results.manifest import RunManifest
from specbench.results.records import CHANGES, REPEAT, SOURCES
from specbench.storage import jsonl
from specbench.system import environment


def repeat_text(manifest: RunManifest, *, typed: bool = True) -> str:
    """Markdown: command, code, versions, citation.

    Args:
        manifest: of the run.
        typed: whether a command line made it; Python code did otherwise, which is not known here.
    """
    line = f"```bash\n{manifest.command}\n```"
    git = manifest.git or {}
    code = f"Commit {git.get('commit')}" if git.get("commit") else "No commit is known"
    if git.get("dirty"):
        code += f", with the changes in `{CHANGES}` (`git apply {CHANGES}`)"
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    cited = citation()
    return (
        "\n\n".join(
            [
                "# To repeat this run",
                line
                if typed
                else "`compare()` was called from Python; `manifest.json` has its values.",
                f"{code}. Versions: {versions}. Hardware and hashes: `manifest.json`.",
                *(
                    [f"# To cite it\n\n```bibtex\n{cited}\n```\n\nCite the methods' papers too."]
                    if cited
                    else []
                ),
            ]
        )
        + "\n"
    )


def leave_repeat(
    folder: Path, manifest: RunManifest, methods: Mapping[str, type], *, typed: bool = True
) -> None:
    """Write ``repeat.md``, and what of the code was uncommitted.

    Args:
        folder: of the run; it is there.
        manifest: of the run.
        methods: their classes by name. A file, or a package with all its modules, is copied where
            the project's repository does not hold it: of a method from elsewhere, or where there
            is no repository.
        typed: whether a command line made the run.

    Raises:
        specbench.storage.jsonl.DiskError: the disk is full or broken.
    """
    jsonl.write_text(folder / REPEAT, repeat_text(manifest, typed=typed))
    if manifest.git and manifest.git.get("dirty"):
        jsonl.write_text(folder / CHANGES, environment.code_changes())
    for name, kind in methods.items():
        with contextlib.suppress(TypeError, OSError):  # typed into a notebook
            file = Path(inspect.getsourcefile(kind) or "").resolve()
            if manifest.git and file.is_relative_to(PROJECT):
                continue
            copies = {file: folder / SOURCES / f"{name}.py"}
            if file.name == "__init__.py":  # with modules beside it
                place = folder / SOURCES / name
                copies = {
                    part: place / part.relative_to(file.parent)
                    for part in file.parent.rglob("*.py")
                }
            for part, copy in copies.items():
                copy.parent.mkdir(parents=True, exist_ok=True)
                jsonl.write_text(copy, part.read_text(encoding="utf-8"))
