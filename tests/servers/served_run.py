"""A run of ``runner=serve`` against a fake server, in this process."""

import json

from runners.launch.dispatch import Invocation, execute
from specbench.config.compose import compose
from specbench.results.records import read_records

QUIET = "measure.disturbed={steal: null, others: null}"


def run(path, *words):
    """The exit code, the records and the summary of a run in this process."""
    first = ["runner=serve", "server=openai", "dataset.limit=2", "server.retry_wait_s=0"]
    words = [*first, "measure.warmup=0", *words]
    words += ["measure.exclusive=false", QUIET, f"output_dir={path}"]
    cfg = compose(words)
    code, _ = execute(cfg, Invocation(tuple(words)), launch=lambda work, job: work(job))
    records, _ = read_records(path)
    return code, records, json.loads((path / "summary.json").read_text())
