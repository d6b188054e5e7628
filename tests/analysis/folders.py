"""The golden runs, and how a test spoils a copy of one."""

import json
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RECORDS = GOLDEN / "records"
EXPERIMENTS = GOLDEN / "experiments"


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_manifest(folder, **changes):
    edit_json(folder / "manifest.json", **changes)


def edit_records(folder, change):
    """Every record of a run through ``change``, which may give None for one to be dropped."""
    path = folder / "cases.jsonl"
    kept = filter(None, (change(json.loads(line)) for line in path.read_text().splitlines()))
    path.write_text("".join(json.dumps(record) + "\n" for record in kept))
