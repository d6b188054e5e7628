"""A run of ``runner=serve`` against a fake server, in this process."""

import json

from specbench.results.records import read_records
from tests.small_run import run_here

QUIET = "measure.disturbed={steal: null, others: null}"


def run(path, *overrides):
    """Return the exit code, the records and the summary of a run in this process."""
    first = ["runner=serve", "server=openai", "dataset.limit=2", "server.retry_wait_s=0"]
    overrides = [*first, "measure.warmup=0", *overrides]
    overrides += ["measure.exclusive=false", QUIET, f"output_dir={path}"]
    code = run_here([], *overrides)
    records, _ = read_records(path)
    return code, records, json.loads((path / "summary.json").read_text())
