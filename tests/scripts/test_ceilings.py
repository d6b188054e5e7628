"""Ceilings of recorded steps: what they must be where the price of rows is simple."""

from types import SimpleNamespace

import numpy as np
import pytest

from scripts.ceilings import ceilings
from specbench.replay.cost_surface import CostSurface, Grid
from specbench.results.jsonl_schema import StepTrace, write_steps
from specbench.results.records import STEPS
from tests.small_run import case_record


def surface(price):
    rows, contexts = (1, 4, 16, 64), (1, 100, 400)
    points = np.meshgrid(np.array(rows, float), np.array(contexts, float), indexing="ij")
    tree = Grid({"rows": rows, "context": contexts}, price(*points)[..., None])
    return CostSurface(
        {"name": "m"}, {"hardware": {}}, Grid({"context": (1, 2)}, np.ones((2, 1))), tree
    )


def test_a_ceiling_is_mat_where_rows_are_free_and_tokens_by_rows_where_they_are_not(tmp_path, rng):
    records, traces = [], []
    for case in range(6):
        committed = rng.integers(1, 6, rng.integers(2, 9)).tolist()
        drafted = rng.integers(0, 40, len(committed)).tolist()
        records.append(
            case_record(
                f"c{case}", "pld", sum(committed) + 1, committed_per_step=committed, n_aux=0
            )
        )
        key = {"label": "pld", "case_id": f"c{case}", "turn": 0, "repeat": 0}
        traces.append(StepTrace(**key, drafted=drafted, depth=drafted, committed=committed))
    write_steps(tmp_path / STEPS, traces)
    surfaces = [
        surface(lambda rows, context: 0 * rows + 2.0),
        surface(lambda rows, context: 3.0 * rows),
        surface(lambda rows, context: 5.0 * context + 0 * rows),
    ]
    run = SimpleNamespace(path=tmp_path, records=records)
    mat, rows, free, priced, behind = ceilings(run, "pld", surfaces)
    tokens = sum(sum(trace.committed) for trace in traces)
    steps = sum(len(trace.committed) for trace in traces)
    read = steps + sum(sum(trace.drafted) for trace in traces)
    assert mat.value == free.value == pytest.approx(tokens / steps, rel=1e-12)
    assert rows.value == pytest.approx(read / steps, rel=1e-12)
    assert priced.value == pytest.approx(tokens / read, rel=1e-12)
    # Each pass at the length of its own text: 20 tokens of prompt and what was committed before.
    plain = sum(20 + i for t in traces for i in range(sum(t.committed)))
    method_tokens = sum(20 + sum(t.committed[:i]) for t in traces for i in range(len(t.committed)))
    assert behind.value == pytest.approx(plain / method_tokens, rel=1e-12)
    assert free.interval[0] < free.value < free.interval[1]
