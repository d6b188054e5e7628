"""Which turns count as disturbed, what is measured again, and where the first measurement goes."""

from dataclasses import replace

import pytest

from runners.measure import interference_rule
from runners.run_folder.resumable_files import BlockResult, ResultFiles
from specbench.config.schema import MeasureConfig, NoiseConfig
from specbench.results import records
from specbench.results.records import CaseRecord
from specbench.storage import jsonl
from specbench.system.interference import Interference, SystemMonitor
from tests.runners.test_blocks import ONE
from tests.runners.toy import Recorder, make_job, make_runner
from tests.small_run import case_record, run_here, warning_texts

LIMITS = NoiseConfig(steal=0.05, others=0.1, shortest_s=0.5)


def turn(*case_id, wall_s=2.0, **changes):
    half = wall_s / 2
    return case_record(*case_id, prefill_s=half, decode_s=half, wall_s=wall_s, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cpu_steal": 0.2}, "the hypervisor took 20% of the case's CPU time"),
        ({"cpu_others": 0.5}, "other processes took 50% of the case's CPU time"),
        ({"gpu": [{"throttle": ["hardware_thermal"]}]}, "the GPU throttled (hardware_thermal)"),
        ({"gpu": [{"other_processes": 2}]}, "2 other processes on the GPU"),
        ({"cpu_steal": 0.2, "cpu_others": 0.5}, "20% of the case's CPU time; other"),
    ],
)
def test_each_counter_disturbs_beyond_its_limit(changes, message):
    (why,) = interference_rule.by_counters([turn(**changes)], LIMITS).values()
    assert message in why


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cpu_steal": 0.04, "cpu_others": 0.09},
        {"cpu_steal": None, "cpu_others": None, "gpu": None},
        {"gpu": [{"throttle": ["power_cap"], "other_processes": 0}]},
        {"gpu": [{"throttle": None, "other_processes": None}]},
        {"cpu_steal": 0.9, "wall_s": 0.4},
        {"cpu_steal": 0.9, "status": "failed"},
        {"cpu_waiting": 9.0, "cpu_load": 7.0},  # threads of the run itself may wait for each other
    ],
)
def test_what_does_not_disturb(changes):
    assert interference_rule.by_counters([turn(**changes)], LIMITS) == {}
    off = replace(LIMITS, steal=None, others=None)  # null switches a rule off
    assert interference_rule.by_counters([turn(cpu_steal=0.9, cpu_others=0.9)], off) == {}


def test_the_cpu_is_judged_over_the_case_with_all_its_labels_and_turns_and_a_gpu_by_turn():
    def judged(*steals, **changes):
        turns = [
            turn(label=label, turn=i, wall_s=wall, cpu_steal=steal, **changes)
            for i, (label, wall, steal) in enumerate(
                zip(("ar", "pld", "ar"), (4.0, 1.0, 4.0), steals, strict=True)
            )
        ]
        return set(interference_rule.by_counters(turns, LIMITS).values())

    # The same .2 s are 20 % of pld's turn and 5 % of ar's.
    assert judged(0.0, 0.2, 0.0) == judged(0.05, 0.0, 0.0) == set()
    assert judged(0.0, 0.5, 0.0) == judged(0.125, 0.0, 0.0) != set()
    hot = turn(label="pld").replace(gpu=[{"throttle": ["hardware_thermal"]}])
    reasons = interference_rule.by_counters([turn(), hot, turn("b", cpu_steal=0.9)], LIMITS)
    assert {key[1::2] for key in reasons} == {("a", "pld"), ("b", "ar")}


@pytest.mark.parametrize("fast", [True, False])
def test_a_burst_over_one_of_many_labels_disturbs_the_case_whichever_label_it_hits(fast):
    def judged(lost_s):
        """30 labels of 2 s on average, of which the fastest or the slowest loses CPU time."""
        walls = [1.0, 3.0, *[2.0] * 28]
        lost = [lost_s * fast, lost_s * (not fast)]
        turns = [
            turn(label=f"m{i}", wall_s=wall, cpu_others=(lost[i] if i < 2 else 0.0) / wall)
            for i, wall in enumerate(walls)
        ]
        return interference_rule.by_counters(turns, LIMITS)

    limit = 0.6 if fast else 0.9  # 3 * 10 % of 2 s, and of the slowest label's own 3 s
    assert judged(limit - 0.02) == {}
    reasons = judged(limit + 0.02).values()
    share = "62% of m0's" if fast else "31% of m1's"  # of its own time, whatever it is judged by
    assert len(reasons) == 30 and set(reasons) == {f"other processes took {share} CPU time"}


@pytest.mark.parametrize(
    ("disturbed", "options", "expected"),
    [
        # Of 12 cases one may be left out, and a quarter may be measured again.
        ((7, 2), {}, [2, 7]),
        ((7, 2, 3, 9), {}, [2, 3, 7]),
        ((7, 2, 3), {"superseded": 1}, [2, 3]),
        ((7,), {"superseded": 3}, []),
        # Those that could be measured again are too few to reach the limit.
        ((7, 2, 3, 9, 11), {}, []),
        (range(12), {}, []),
        ((7, 2, 3), {"superseded": 2}, []),
        (range(12), {"rerun_share": 1}, [*range(12)]),
        ((7, 2), {"attempts": {2: 2, 7: 2}}, []),
        # As often as allowed, and again only when the others had their turn.
        ((1,), {"attempts": {1: 2}}, []),
        ((1,), {"attempts": {1: 1}, "reruns": 1}, []),
        ((1, 5), {"attempts": {1: 1}}, [5, 1]),
        ((1,), {"reruns": 0}, []),
    ],
)
def test_what_is_measured_again(tmp_path, disturbed, options, expected):
    superseded, attempts = options.pop("superseded", 0), options.pop("attempts", {})
    cases = [type(ONE[0])(f"c{i}", ("why",)) for i in range(12)]
    job = make_job(tmp_path, ["ar"], cases, measure=MeasureConfig(**options))
    status = {i: "disturbed" for i in disturbed}
    records_ = [
        turn(f"c{i}", status=status.get(i, "ok"), attempt=attempts.get(i, 0)) for i in range(12)
    ]
    again = interference_rule.to_measure_again(job, records_, superseded)
    assert [block.case.case_id for block in again] == [f"c{i}" for i in expected]


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_only", [True, False])
def test_a_block_measured_again_starts_from_the_state_before_it(tmp_path, tokens_only):
    drafters = [Recorder("ar"), Recorder("a", scope="run", tokens_only=tokens_only)]
    job = make_job(tmp_path, ["ar", "a"], ONE)
    runner, _, done = make_runner(job, drafters)
    seen = []
    for block in job.blocks():
        seen.append(len(drafters[1].seen))
        done.extend(runner.run([block]).records)
    before = list(drafters[1].seen)
    again = runner.run([job.blocks()[1]], attempt=1)
    assert drafters[1].seen == before[: seen[2]]
    assert {r.attempt for r in again.records} == {1}
    assert [r.output_ids for r in again.records] == [
        r.output_ids for r in done if r.case_id == "c1"
    ]


@pytest.fixture
def run_noisy(small, tmp_path, monkeypatch):
    """Make a run whose turns see, one after the other, the given shares of stolen time."""

    def run(steals, *overrides):
        stolen = iter([0, *steals])  # the first: while the model is loaded
        monkeypatch.setattr(
            SystemMonitor, "end", lambda self: Interference(cpu_steal=next(stolen, 0.0))
        )
        limits = ["measure.disturbed.steal=0.05", "measure.disturbed.shortest_s=0"]
        extra = [
            f"output_dir={tmp_path}/run",
            "dataset.tasks=[qa,rag]",
            "dataset.order=file",
            *limits,
        ]
        assert run_here([*small, *extra], *overrides) == 0
        return tmp_path / "run"

    return run


def lines(folder, name):
    return jsonl.read_jsonl(folder / name)[0]


def test_a_disturbed_block_is_replaced_and_its_first_measurement_kept(run_noisy, capsys):
    folder = run_noisy([0, 0, 0, 0.4])  # 3 cases: the fourth turn is the second block's
    done, _ = records.read_records(folder)
    assert [(r.case_id, r.label, r.attempt, r.status) for r in done] == [
        ("82", "ar", 0, "ok"),
        ("82", "pld", 0, "ok"),
        ("83", "pld", 1, "ok"),
        ("83", "ar", 1, "ok"),
        ("85", "ar", 0, "ok"),
        ("85", "pld", 0, "ok"),
    ]
    first = [CaseRecord.from_json(line) for line in lines(folder, records.DISTURBED)]
    assert [(r.case_id, r.label, r.attempt, r.status) for r in first] == [
        ("83", "pld", 0, "disturbed"),
        ("83", "ar", 0, "disturbed"),
    ]
    assert {r.disturbed_by for r in first} == {first[1].disturbed_by}
    assert "the hypervisor took" in first[1].disturbed_by
    row = jsonl.read_json(folder / records.SUMMARY)["rows"][-1]
    assert (row["n_cases"], row["n_disturbed"]) == (3, 0)
    conditions = jsonl.read_json(folder / records.SUMMARY)["conditions"]["disturbed turns"]
    assert "when first measured: 1 of 3 of each label; 1 case was measured again" in conditions
    disturbed = jsonl.read_json(folder / records.SUMMARY)["disturbed"]
    assert (disturbed["flagged"], disturbed["turns_again"]) == ({"ar": 1, "pld": 1}, 2)
    both = [r for r in done if r.case_id != "83"] + first
    plain, fast = (sum(r.decode_s for r in both if r.label == x) for x in ("ar", "pld"))
    assert disturbed["without_rule"]["pld"]["speedup"] == pytest.approx(plain / fast)


@pytest.mark.parametrize(
    ("steals", "options", "attempts", "logged"),
    [
        # Measured again as often as allowed; one case of three is more than may be left out.
        ([0, 0, 0, 0.4, 0, 0, 0.5, 0.5], ["rerun_share=1"], [0, 1, 0], ""),
        ([0.4] * 8, ["rerun_share=1"], [1, 0, 0], ""),
        ([0.4] * 5, ["rerun_share=0.6"], [0, 0, 0], "where 0 may be left out"),
        ([0, 0, 0, 0.4], ["rerun_minutes=0"], [0, 0, 0], "measured again: measure.rerun_minutes=0"),
    ],
)
def test_measuring_again_stops_where_it_cannot_help_and_its_times_count(
    run_noisy, caplog, steals, options, attempts, logged
):
    folder = run_noisy(steals, "measure.reruns=1", *(f"measure.{option}" for option in options))
    done, _ = records.read_records(folder)
    assert [r.attempt for r in done if r.label == "ar"] == attempts
    assert len(lines(folder, records.DISTURBED)) == 2 * sum(attempts)
    assert logged in caplog.text
    summary = jsonl.read_json(folder / records.SUMMARY)
    row = summary["rows"][-1]
    assert row["tokens_per_s"] > 0 and row["n_disturbed"] >= 1 and row["disturbed_counted"] is True
    assert any("TOO BUSY in" in text for text in warning_texts(summary))


def test_a_busy_machine_is_named_before_anything_is_timed(small, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        SystemMonitor, "end", lambda self: Interference(cpu_others=0.8, cpu_load=13.0)
    )
    caplog.set_level("INFO", "runners")
    assert run_here(small, f"output_dir={tmp_path}", "measure.disturbed.others=0.1") == 0
    busy, warming = (
        caplog.text.index(t) for t in ("take 80 % of its CPU time (load", "warming up")
    )
    assert busy < warming


@pytest.mark.slow  # over a second
@pytest.mark.parametrize("killed_at", ["steps", "cases"])
def test_a_process_killed_while_replacing_leaves_one_measurement(run_noisy, monkeypatch, killed_at):
    """Killed after the copy to disturbed.jsonl, or after the new traces were written."""
    rewrite = jsonl.rewrite_jsonl
    name = {"steps": records.STEPS_LOG, "cases": records.CASES}[killed_at]

    def dying(path, content):
        if path.name == name:
            raise KeyboardInterrupt
        rewrite(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(jsonl, "rewrite_jsonl", dying)
        with pytest.raises(KeyboardInterrupt):
            run_noisy([0, 0, 0, 0.4])
    folder = run_noisy([])
    done, _ = records.read_records(folder)
    assert sorted((r.case_id, r.attempt) for r in done) == [
        ("82", 0), ("82", 0), ("83", 1), ("83", 1), ("85", 0), ("85", 0),
    ]  # fmt: skip
    superseded = lines(folder, records.DISTURBED)
    assert [(x["case_id"], x["label"], x["attempt"]) for x in superseded] == [
        ("83", "pld", 0), ("83", "ar", 0),
    ]  # fmt: skip


def test_what_is_appended_after_a_rewrite_lands_in_the_new_file(tmp_path):
    job = make_job(tmp_path, ["ar"], ONE)
    files = ResultFiles(job)
    files.append(BlockResult([turn("c0")]))
    files.replace(BlockResult([turn("c0", attempt=1)]))
    files.append(BlockResult([turn("c1")]))
    assert [(x["case_id"], x["attempt"]) for x in lines(tmp_path, records.CASES)] == [
        ("c0", 1),
        ("c1", 0),
    ]
