"""Records and the files they live in: what is written is read again, or refused with a reason."""

import json
import re
from functools import partial

import pyarrow.parquet as pq
import pytest

from specbench.errors import field_error
from specbench.results import records
from specbench.results.jsonl_schema import StepTrace, read_steps, write_steps
from specbench.results.records import CaseRecord, Lossless
from specbench.storage import jsonl
from tests.small_run import case_record

GONE = object()
make_record = partial(
    case_record, case_id="7", label="pld", n_new=4, stream_index=3, finish_reason="eos",
    n_drafted=5, committed_per_step=[2, 1], prompt_ids=[5, 6], output_ids=[1, 2, 3, 0],
    prefill_s=0.5, decode_s=1.0, drafter_setup_s=0.25, wall_s=1.5, seed=11,
)  # fmt: skip


def test_a_record_survives_the_way_through_json():
    record = make_record(
        lossless=Lossless(verdict="near_tie", first_diff=2, gap=1e-5), phase_s={"draft": 0.1}
    )
    assert CaseRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "fine"}, "status is 'fine', it must be one of 'ok', 'failed'"),
        ({"n_new": 5}, "n_new is 5"),
        ({"accepted_per_step": [3, 1]}, "sums to 4"),
        ({"accepted_per_step": [2, 0]}, r"accepted_per_step\[1\] is 0, it must be at least 1"),
        ({"n_target_passes": 3}, "n_target_passes is 3"),
        ({"lossless": {"verdict": "maybe"}}, "verdict is 'maybe', it must be one of 'equal'"),
        ({"decode_s": float("nan")}, "decode_s is nan"),
        ({"decode_s": -1.0}, "decode_s is -1.0"),
        ({"decode_s": "1"}, "decode_s is '1'"),
        ({"decode_s": 0.0}, "wall_s is 1.5"),
        ({"decode_s": 0.0, "wall_s": 0.5}, "2 steps take time"),
        ({"prefill_s": 0.0, "decode_s": 0.0, "wall_s": 0.0}, "a finished turn takes time"),
        ({"wall_s": 3.0}, "prefill_s [+] decode_s is 1.5"),
        ({"cpu_steal": float("inf")}, "cpu_steal is inf"),
        ({"timing": "none"}, "although timing is none"),
        ({"n_prompt": 10**400}, "n_prompt is 10*, it must be at most 2147483647"),
        ({"n_prompt": 3}, "prompt_ids has 2"),
        ({"output_ids": [1, 2, 3, 10**25]}, r"output_ids\[3\] is 10*, it must be at most"),
        ({"output_ids": [1, 2, 3, True]}, r"output_ids\[3\] is True, it must be a whole number"),
        ({"turn": -1}, "turn is -1"),
        ({"case_id": 7}, "case_id is 7, it must be text"),
        ({"state_scope": GONE}, "no field state_scope"),
        *(({key: GONE}, f"{key}|wall_s") for key in ("n_new", "output_ids", "decode_s", "wall_s")),
    ],
)
def test_contradictions_are_refused(changes, reason):
    line = {key: v for key, v in (make_record().to_json() | changes).items() if v is not GONE}
    with pytest.raises(ValueError) as refusal:
        CaseRecord.from_json(line)
    assert re.search(reason, field_error(refusal.value))


def test_read_drops_a_line_cut_off_anywhere(tmp_path):
    path = tmp_path / records.CASES
    jsonl.append_jsonl(path, (make_record(case_id=str(i)).to_json() for i in range(3)))
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in (last + 1, (last + len(whole)) // 2, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:end])
        read, truncated = records.read_records(tmp_path)
        assert (len(read), truncated) == ((3, False) if end == len(whole) else (2, True))


def test_steps_have_one_row_per_step(tmp_path):
    empty = StepTrace(label="ar", case_id="b", turn=0, repeat=0, drafted=[], depth=[], committed=[])
    ar_trace = empty.replace(case_id="a", turn=1, drafted=[0], depth=[0], committed=[1])
    steps = {"drafted": [3, 0], "depth": [3, 0], "committed": [2, 1]}
    pld_trace = ar_trace.replace(label="pld", **steps, sources=[[0], []], step_s=[0.1, 0.2])
    traces = [pld_trace, ar_trace, empty]
    write_steps(tmp_path / "steps.parquet", traces)
    assert read_steps(tmp_path / "steps.parquet") == [pld_trace, ar_trace]
    rows = pq.read_table(tmp_path / "steps.parquet").to_pylist()
    rows_read = [(r["label"], r["step"], r["committed"]) for r in rows]
    assert rows_read == [("pld", 0, 2), ("pld", 1, 1), ("ar", 0, 1)]
    assert rows[0]["sources"] == [0]
    assert rows[2]["sources"] is None
    assert rows[2]["step_s"] is None
