"""Copy a finished run into the repository: its numbers, without the words of its questions.

    python scripts/keep_run.py RUN docs/measurements/MACHINE/NAME

The copy has ``manifest.json``, ``DONE``, ``summary.json.gz`` and ``cases.jsonl.gz`` (and, where
measurements were made again, ``disturbed.jsonl.gz``), with hashes in place of the ids of prompts
and outputs: the questions are others' text. A cost run's ``surface.json`` is copied as it is. Paths
of this machine become DATA, RUN and RECORDING. ``python -m analysis.tables FOLDER`` and the other
commands of ``analysis`` read the copy like any run; a replay cannot, as it needs the ids.
"""

import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.cli import parser_of, reporting_errors
from analysis.runs.load import last_parts
from specbench.errors import ResultsError
from specbench.paths import PROJECT
from specbench.results.manifest import RunManifest
from specbench.results.records import (
    CASES,
    DISTURBED,
    DONE,
    MANIFEST,
    SUMMARY,
    SURFACE,
    read_records,
)
from specbench.storage.hashes import ids_sha256
from specbench.storage.jsonl import PACKED


def keep(run: Path, target: Path) -> list[Path]:
    """Write the copy of a finished run; returns its files."""
    if not (run / DONE).is_file():
        raise ResultsError(f"{run} holds no finished run (no {DONE}). Repeat the run's command.")
    manifest = RunManifest.read(run)
    manifest.check_files(run)
    if (target / DONE).exists() and RunManifest.read(target).folder_id != manifest.folder_id:
        raise ResultsError(f"{target} holds another run. Delete it, or name another folder.")
    target.mkdir(parents=True, exist_ok=True)
    lines = {}
    for name in (CASES, DISTURBED):
        packed = ""
        for record in read_records(run / name)[0]:
            bare = record.replace(
                served=record.served and record.served.replace(text=""),
                prompt_ids=[],
                output_ids=[],
                prompt_sha=ids_sha256(record.prompt_ids),
                output_sha=ids_sha256(record.output_ids),
            )
            packed += json.dumps(bare.to_json(), separators=(",", ":")) + "\n"
        if packed:
            lines[name + PACKED] = gzip.compress(packed.encode(), mtime=0)
    if (run / SUMMARY).is_file():
        lines[SUMMARY + PACKED] = gzip.compress((run / SUMMARY).read_bytes(), mtime=0)
    names = [*lines, *(name for name in (SURFACE,) if (run / name).is_file())]
    for name in names:
        (target / name).write_bytes(lines.get(name) or (run / name).read_bytes())
    _without_paths(manifest).finish(target, names)
    return [target / name for name in (*names, MANIFEST, DONE)]


def _without_paths(manifest: RunManifest) -> RunManifest:
    """Replace typed folders in the manifest by placeholders, and other paths by their last part."""
    config = manifest.config
    traces = (config.get("runner") or {}).get("traces")
    placeholders = {config.get("output_dir"): "RUN", config.get("data_dir"): "DATA"}
    placeholders[traces] = "RECORDING"
    text = json.dumps(manifest.to_json())
    for path, placeholder in placeholders.items():
        if "/" in str(path):  # not `runner.traces=record`
            text = text.replace(json.dumps(str(path))[1:-1], placeholder)
    return RunManifest.from_json(json.loads(last_parts(text.replace(f"{PROJECT}/", ""))))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("copy", type=Path, help="the copy, a folder below docs/measurements")
    options = parser.parse_args()
    files = keep(options.run, options.copy)
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files)} files, {size / 1024:.0f} KiB: {options.copy}")
    return 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
