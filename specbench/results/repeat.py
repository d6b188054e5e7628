"""What it takes to repeat a run: its command, its code, its versions; and how to cite it.

A run leaves it in its folder as ``repeat.md``, and the report shows the same. Free of torch.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from specbench.paths import PROJECT
from specbench.results.manifest import RunManifest

REPEAT = "repeat.md"
CHANGES = "changes.diff"  # what the code has that its commit lacks, new files in full
SOURCES = "sources"  # a folder: methods whose file no commit and no difference holds

_CITATION = PROJECT / "CITATION.cff"


def command(manifest: RunManifest) -> str:
    """The line to paste: ``python run.py 'compare=[pld,sam]'``."""
    return shlex.join(["python", "run.py", *manifest.overrides])


def citation(file: Path = _CITATION) -> str:
    """An entry for BibTeX; "" where the project's file is not there, as in an installed copy."""
    if not file.exists():
        return ""
    said = yaml.safe_load(file.read_text(encoding="utf-8"))
    authors = " and ".join(f"{{{author['name']}}}" for author in said["authors"])
    return (
        "@software{specbench,\n"
        f"  title = {{{said['title']}}},\n"
        f"  author = {authors},\n"
        f"  version = {{{said['version']}}},\n"
        f"  year = {{{str(said['date-released'])[:4]}}},\n"
        "}"
    )


def repeat_text(manifest: RunManifest, *, typed: bool = True) -> str:
    """Markdown: command, code, versions, citation.

    Args:
        manifest: of the run.
        typed: whether a command line made it; Python code did otherwise, which is not known here.
    """
    line = f"```bash\n{command(manifest)}\n```"
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
