"""Tests of ``metrics.py``: one list, of which everything that shows numbers is made."""

from specbench.results.metrics import METRIC, METRICS
from specbench.results.summary_schema import SummaryRow


def test_rows_have_every_metric_and_its_interval_and_no_other() -> None:
    keys = set(SummaryRow.__annotations__)
    assert set(METRIC) <= keys and len(METRIC) == len(METRICS)
    intervals = {metric.interval_name for metric in METRICS if metric.has_interval}
    assert {key for key in keys if key.endswith("_ci")} == intervals
