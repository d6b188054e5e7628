"""Steps that others timed as a cost surface: grids, steps left out, tables that are refused."""

import json

import numpy as np
import pandas as pd
import pytest

from scripts import import_steps
from specbench.replay.cost_surface import CostSurface

ORIGIN = ["--model", "toy", "--dtype", "float16", "--gpu", "H100", "--source", "their paper"]


def seconds(rows, context):
    return 0.01 + 1e-3 * rows + 1e-5 * context


def steps(rows=(1, 4, 8), contexts=(64, 256, 1024), repeats=3):
    return pd.DataFrame(
        [
            {"rows": r, "context": c, "seconds": seconds(r, c) * (1 + i / 1000)}
            for r in rows
            for c in contexts
            for i in range(-(repeats // 2), repeats // 2 + 1)
        ]
    )


def imported(tmp_path, table, *more, name="steps.csv"):
    path, out = tmp_path / name, tmp_path / "surface.json"
    if name.endswith("csv"):
        table.to_csv(path, index=False)
    elif name.endswith("parquet"):
        table.to_parquet(path)
    else:
        table.to_json(path, orient="records", lines=name.endswith("jsonl"))
    return import_steps.main([str(path), "--out", str(out), *ORIGIN, *more]), out


@pytest.mark.parametrize("name", ["steps.csv", "steps.json", "steps.jsonl", "steps.parquet"])
def test_a_table_becomes_a_surface_of_theirs(tmp_path, name):
    code, out = imported(tmp_path, steps(), name=name)
    surface = CostSurface.read(out)
    assert code == 0
    assert surface.tree.axes == {"rows": (1, 4, 8), "context": (64, 256, 1024)}
    found = surface.pass_s(np.ones(2), np.array([4.0, 2.0]), np.array([256.0, 64.0]))
    assert found == pytest.approx([seconds(4, 256), seconds(2, 64)])
    assert surface.prefill_s(8) == pytest.approx(seconds(8, 64)), "rows behind few cached tokens"
    assert surface.machine["hardware"] == {"cpu": None, "gpus": [{"name": "H100"}]}
    said = surface.model["imported"]
    assert (said["source"], said["file"], said["steps"]) == ("their paper", name, 27)


def test_their_names_units_filters_and_batches(tmp_path, capsys):
    table = steps().rename(columns={"rows": "q_len", "context": "kv"})
    table["step_ms"] = 1e3 * table.pop("seconds")
    both = pd.concat([table.assign(num_seqs=1), table.assign(num_seqs=8, step_ms=99.0)])
    several = pd.concat([both.assign(gpu="H100"), both.assign(gpu="A100", step_ms=55.0)])
    code, out = imported(
        tmp_path, several, "--unit", "ms", "--where", "gpu=H100",
        "--columns", "tokens=q_len", "batch=num_seqs", "context=kv", "seconds=step_ms",
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err
    surface = CostSurface.read(out)
    assert surface.tree.predict(np.array([8.0]), np.array([64.0])) == pytest.approx(seconds(8, 64))
    assert surface.model["imported"]["steps"] == 27


def test_the_fit_is_monotone_and_scattered_contexts_are_gathered(tmp_path):
    rng = np.random.default_rng(0)
    n = 4000
    table = pd.DataFrame({"rows": rng.choice([1, 3, 5, 9], n), "context": rng.integers(91, 900, n)})
    noise = rng.lognormal(0, 0.3, n)
    table["seconds"] = seconds(table["rows"], table["context"]) * noise
    lone = pd.DataFrame({"rows": [700], "context": [128], "seconds": [0.5]})
    code, out = imported(tmp_path, pd.concat([table, lone]))
    assert code == 0
    surface = CostSurface.read(out)
    assert surface.tree.axes == {"rows": (1, 3, 5, 9), "context": (128, 256, 512, 1024)}
    assert surface.model["imported"]["steps_left_out"] == 1, "nobody timed 700 rows elsewhere"
    assert all((np.diff(surface.tree.fitted, axis=axis) > -1e-9).all() for axis in (0, 1))
    at = surface.tree.predict(np.array([1.0, 9.0]), np.array([512.0, 512.0]))
    assert at == pytest.approx([seconds(1, 512), seconds(9, 512)], rel=0.1)


@pytest.mark.parametrize(("change", "more", "why"), [
    (lambda t: t.drop(columns="context"), (), "no column 'context'; it has rows, seconds"),
    (lambda t: t.rename(columns={"rows": "n"}), (), "--columns rows=THEIRS"),
    (lambda t: t.assign(seconds=-t["seconds"]), (), "seconds is no positive time"),
    (lambda t: t.assign(seconds="fast"), (), "seconds is 'fast', it must be a number"),
    (lambda t: t.assign(rows=1.5), (), "rows is 1.5, it must be a whole number from 1"),
    (lambda t: t[t["rows"] == 1], (), "too few points"),
    (lambda t: t[t["rows"].map({1: 64, 4: 256}) == t["context"]], (), "too few points"),
    (lambda t: t[:0], (), "holds no step"),
    (lambda t: t.rename(columns={"rows": "tokens"}).assign(batch=4), (), "no step with batch 1"),
    (lambda t: t.assign(batch=2), (), "no step with batch 1"),
    (lambda t: t, ("--where", "rows=3"), "no line with rows=3"),
    (lambda t: t, ("--columns", "second=ms"), "Did you mean 'seconds'"),
    (lambda t: t, ("--columns", "seconds"), "is no pair"),
])  # fmt: skip
def test_tables_that_make_no_surface_say_why(tmp_path, capsys, change, more, why):
    code, out = imported(tmp_path, change(steps(contexts=(64, 256))), *more)
    assert (code, out.exists()) == (2, False)
    assert why in capsys.readouterr().err


def test_a_file_that_is_no_table_is_refused(tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "out"), *ORIGIN]
    assert import_steps.main([str(tmp_path / "none.csv"), *arguments]) == 2
    (tmp_path / "a.json").write_text(json.dumps({"rows": 1}))
    assert import_steps.main([str(tmp_path / "a.json"), *arguments]) == 2
    assert "cannot be read as a table" in capsys.readouterr().err
