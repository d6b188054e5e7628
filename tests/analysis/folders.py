"""The golden runs, how a test spoils a copy of one, and a claim about one."""

import json
import shutil
from pathlib import Path

from analysis.runs.claims import Claim, CountingRule
from specbench.storage.hashes import file_sha256

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RECORDS = GOLDEN / "records"
EXPERIMENTS = GOLDEN / "experiments"


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_manifest(folder, **changes):
    """Change values of the manifest; a finished folder gets its new hash."""
    edit_json(folder / "manifest.json", **changes)
    if (folder / "DONE").exists():
        vouch(folder)


def vouch(folder):
    """Mark a folder as finished, with its manifest's hash."""
    (folder / "DONE").write_text(file_sha256(folder / "manifest.json"))


def copy_run(folder, to, run_key):
    """Copy a folder as another run: manifest and records name its key."""
    shutil.copytree(folder, to)
    edit_manifest(to, run_key=run_key)
    edit_records(to, lambda record: record | {"run_key": run_key})


def edit_records(folder, change):
    """Apply ``change`` to every record of a run; None drops the record."""
    path = folder / "cases.jsonl"
    lines = filter(None, (change(json.loads(line)) for line in path.read_text().splitlines()))
    path.write_text("".join(json.dumps(record) + "\n" for record in lines))


def claim(**changes) -> Claim:
    base = Claim(
        paper="p", title="t", exhibit="a", source="s", hardware="h", gpu="RTX 4090", gpu_count=1,
        dataset="specbench", method="cacheback", model="vicuna7b",
        values={"speedup": {"overall": 1.86, "qa": 1.5}, "mat": {"overall": 2.42}},
        counting=CountingRule(speed="end_to_end", baseline="eager", mat_counts_prompt=()),
    )  # fmt: skip
    return base.model_copy(update=changes)
