"""Which turns count as disturbed, what is measured again, and where the first measurement goes."""

from dataclasses import replace
from functools import partial

import pytest

from runners.run_folder.resumable_files import ResultFiles
from runners.session import interference_rule
from specbench.config.schema import MeasureConfig, NoiseConfig
from specbench.results import records
from specbench.results.lines import StepTrace
from specbench.results.records import CaseRecord
from specbench.storage import jsonl
from specbench.system.interference import Interference, SystemMonitor
from tests.runners.test_blocks import ONE
from tests.runners.toy import Recorder, make_job, make_runner
from tests.small_run import case_record, run_here

LIMITS = NoiseConfig(steal=0.05, others=0.1, slowdown=1.5, shortest_s=0.5)


turn = partial(case_record, prefill_s=1.0, decode_s=1.0, wall_s=2.0)


def trace(record, step_s, drafted=0):
    n = record.n_target_passes
    return StepTrace(
        **record.turn_id,
        drafted=[drafted] * n,
        depth=[0] * n,
        committed=[1] * n,
        step_s=[step_s] * n,
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cpu_steal": 0.2}, "the hypervisor took 20% of the case's CPU time"),
        ({"cpu_others": 0.5}, "other processes took 50% of the case's CPU time"),
        ({"gpu": [{"throttle": ["hardware_thermal"]}]}, "the GPU throttled (hardware_thermal)"),
        ({"gpu": [{"other_processes": 2}]}, "2 other processes on the GPU"),
        ({"cpu_steal": 0.2, "cpu_others": 0.5}, "20% of the case's CPU time; other"),
    ],
)
def test_each_counter_disturbs_beyond_its_limit(changes, said):
    (why,) = interference_rule.by_counters([turn(**changes)], LIMITS).values()
    assert said in why


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
    hot = replace(turn(label="pld"), gpu=[{"throttle": ["hardware_thermal"]}])
    found = interference_rule.by_counters([turn(), hot, turn("b", cpu_steal=0.9)], LIMITS)
    assert {key[1::2] for key in found} == {("a", "pld"), ("b", "ar")}


class TestSlowdown:
    """A burst that no counter shows: in a turn some labels' steps take eight times as long."""

    def run(self, slow, n=6, factor=8.0, **changes):
        """``n`` turns of three labels; the labels in ``slow`` are so in the third turn."""
        found, traces = [], []
        for i in range(n):
            for label in ("ar", "pld", "sam"):
                own = changes if i == 2 else {}
                found.append(turn(str(i), label, stream_index=i, **own))
                times = factor if i == 2 and label in slow else 1
                traces.append(trace(found[-1], 0.1 * times))
        return found, traces

    def judged(self, found, traces, baseline="ar"):
        changed = interference_rule.judge(found, traces, LIMITS, baseline)
        return [
            f"{r.label} {r.case_id}" for r in changed.values() if "longer than" in r.disturbed_by
        ]

    @pytest.mark.parametrize(
        ("slow", "disturbed"),
        [
            (["ar", "pld", "sam"], ["ar 2", "pld 2", "sam 2"]),
            (["ar"], []),
            (["pld", "sam"], []),
            (["ar", "pld"], []),  # one of two others is no majority
        ],
    )
    def test_only_the_baseline_and_most_other_labels_at_once_tell_of_a_burst(self, slow, disturbed):
        assert self.judged(*self.run(slow)) == disturbed

    def test_two_labels_are_enough_and_one_is_never_judged_by_its_own_times(self):
        found, traces = self.run(["ar", "pld", "sam"])
        pairs = list(zip(found, traces, strict=True))
        two = [(r, t) for r, t in pairs if r.label != "sam"]
        assert self.judged(*zip(*two, strict=True)) == ["ar 2", "pld 2"]
        plain = [(r, t) for r, t in pairs if r.label == "ar"]
        assert self.judged(*zip(*plain, strict=True)) == []
        assert self.judged(found, traces, baseline=None) == []

    def test_it_counts_and_says_why(self):
        found, traces = self.run(["ar", "pld", "sam"])
        changed = interference_rule.judge(found, traces, LIMITS, "ar")
        assert {record.status for record in changed.values()} == {"ok"}
        assert "(ar 8.00, pld 8.00, sam 8.00)" in changed[0, "2", 0, "ar"].disturbed_by

    @pytest.mark.parametrize("slow", [["ar", "pld", "sam"], ["ar", "pld", "sam", "sam 1"]])
    def test_the_cases_beside_are_disturbed_whether_their_turns_are_slow_or_not(self, slow):
        found, traces = self.run(slow)
        for record, one in zip(found, traces, strict=True):
            if f"{record.label} {record.case_id}" in slow:
                one.step_s[:] = [0.8] * 8
        changed = interference_rule.judge(found, traces, LIMITS, "ar")
        assert {case for _, case, _, _ in changed} == {"1", "2", "3"}
        assert len(changed) == 9

    def test_a_label_that_did_not_slow_is_not_called_disturbed(self):
        found, traces = self.run(["ar", "pld"])
        more = [turn(str(i), "rest", stream_index=i) for i in range(6)]
        found += more
        traces += [trace(r, 0.8 if r.case_id == "2" else 0.1) for r in more]
        assert self.judged(found, traces) == ["ar 2", "pld 2", "rest 2"]

    def test_a_single_stall_counts_by_the_time_it_took(self):
        found, traces = self.run(["ar"])
        for one in traces[7:9]:
            one.step_s[3] = 70.0
        assert self.judged(found, traces) == ["ar 2", "pld 2", "sam 2"]

    def test_judging_twice_changes_nothing_and_a_quiet_turn_is_taken_back(self):
        found, traces = self.run(["ar", "pld", "sam"])
        changed = interference_rule.judge(found, traces, LIMITS, "ar")
        marked = [changed.get(r.key, r) for r in found]
        assert self.judged(marked, traces) == []
        back = interference_rule.judge(marked, self.run([])[1], LIMITS, "ar")
        assert [(r.status, r.disturbed_by) for r in back.values()] == [("ok", "")] * 9

    @pytest.mark.parametrize(
        "changes",
        [{"attempt": 1}, {"n": 4}, {"wall_s": 0.3}, {"n_prompt": 2000}],
        ids=["slow again", "four turns", "short", "a longer context"],
    )
    def test_what_says_nothing(self, changes):
        assert self.judged(*self.run(["ar", "pld", "sam"], **changes)) == []

    @pytest.mark.parametrize("field", [{"step_s": None}, {"drafted": [64] * 8}], ids=str)
    def test_without_times_or_their_like_nothing_is_judged(self, field):
        found, traces = self.run(["ar", "pld", "sam"])
        hit = traces[6:9] if "drafted" in field else traces
        traces = [replace(one, **field) if one in hit else one for one in traces]
        assert self.judged(found, traces) == []


class TestWhatIsMeasuredAgain:
    def chosen(self, tmp_path, disturbed, superseded=0, attempt=0, n=12, **measure):
        cases = [type(ONE[0])(f"c{i}", ("why",)) for i in range(n)]
        job = make_job(tmp_path, ["ar"], cases, measure=MeasureConfig(**measure))
        found = [
            turn(c.case_id, stream_index=i, disturbed_by="said" if c.case_id in disturbed else "",
                 attempt=attempt if c.case_id in disturbed else 0)
            for i, c in enumerate(cases)
        ]  # fmt: skip
        return [b.case.case_id for b in interference_rule.to_measure_again(job, found, superseded)]

    @pytest.mark.parametrize(
        ("disturbed", "options", "expected"),
        [
            # In order and within a quarter of all blocks.
            ((7, 2), {}, [2, 7]),
            ((7, 2, 3, 9), {}, [2, 3, 7]),
            ((7, 2, 3, 9), {"superseded": 2}, [2]),
            ((7,), {"superseded": 3}, []),
            (range(12), {}, [0, 1, 2]),  # a machine that is always disturbed
            # As often as allowed.
            ((1,), {"attempt": 2}, []),
            ((1,), {"attempt": 1, "reruns": 1}, []),
            ((1,), {"attempt": 1, "reruns": 2}, [1]),
            ((1,), {"reruns": 0}, []),
        ],
    )
    def test_in_order_within_the_share_and_as_often_as_allowed(
        self, tmp_path, disturbed, options, expected
    ):
        chosen = self.chosen(tmp_path, {f"c{i}" for i in disturbed}, **options)
        assert chosen == [f"c{i}" for i in expected]


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
    """A run whose turns see, one after the other, the given shares of stolen time."""

    def run(steals, *overrides):
        stolen = iter([0, *steals])  # the first: while the model is loaded
        monkeypatch.setattr(
            SystemMonitor, "end", lambda self: Interference(cpu_steal=next(stolen, 0.0))
        )
        limits = ["measure.disturbed.steal=0.05", "measure.disturbed.shortest_s=0"]
        own = [
            f"output_dir={tmp_path}/run",
            "dataset.tasks=[qa,rag]",
            "dataset.order=file",
            *limits,
        ]
        assert run_here([*small, *own], *overrides) == 0
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
    printed = " ".join(capsys.readouterr().out.split())
    assert "disturbed when first measured: 1 of 3 of each label." in printed
    assert "1 case was measured again (2 turns of all labels)" in printed
    found = jsonl.read_json(folder / records.SUMMARY)["disturbed"]
    assert (found["flagged"], found["turns_again"]) == ({"ar": 1, "pld": 1}, 2)
    both = [r for r in done if r.case_id != "83"] + first
    plain, fast = (sum(r.decode_s for r in both if r.label == x) for x in ("ar", "pld"))
    assert found["without_rule"]["pld"]["speedup"] == pytest.approx(plain / fast)


def test_a_block_that_stays_disturbed_is_measured_again_so_often(run_noisy):
    folder = run_noisy([0, 0, 0, 0.4, 0, 0, 0.5, 0.5], "measure.reruns=1", "measure.rerun_share=1")
    done, _ = records.read_records(folder)
    assert {(r.case_id, r.attempt, r.status) for r in done if r.case_id == "83"} == {
        ("83", 1, "disturbed")
    }
    assert len(lines(folder, records.DISTURBED)) == 2
    summary = jsonl.read_json(folder / records.SUMMARY)
    assert summary["rows"][-1]["n_disturbed"] == 1
    assert summary["rows"][-1]["disturbed_counted"] is True, "a quarter of three is none"
    (note,) = (n for n in summary["notes"] if "1 of 3 cases stayed disturbed" in n)
    assert "; their times count. THE MACHINE WAS TOO BUSY" in note
    assert any(
        n.startswith("disturbed by: more than 5% of a case's CPU time, all labels together, stolen")
        for n in summary["notes"]
    )


def test_a_machine_disturbed_throughout_still_finishes_and_says_so(run_noisy):
    folder = run_noisy([0.4] * 8)
    assert len(lines(folder, records.DISTURBED)) == 2, "one of three blocks: a quarter"
    summary = jsonl.read_json(folder / records.SUMMARY)
    assert summary["rows"][-1]["tokens_per_s"] > 0
    assert summary["rows"][-1]["disturbed_counted"] is True
    assert any("3 of 3 cases stayed disturbed" in note for note in summary["notes"])


def test_measuring_again_ends_with_its_time_and_says_what_stays(run_noisy, caplog):
    folder = run_noisy([0, 0, 0, 0.4], "measure.rerun_minutes=0")
    assert not lines(folder, records.DISTURBED)
    assert jsonl.read_json(folder / records.SUMMARY)["rows"][-1]["n_disturbed"] == 1
    assert "1 disturbed cases are not measured again: measure.rerun_minutes=0" in caplog.text


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
    kept = lines(folder, records.DISTURBED)
    assert [(x["case_id"], x["label"], x["attempt"]) for x in kept] == [
        ("83", "pld", 0), ("83", "ar", 0),
    ]  # fmt: skip


def test_what_is_appended_after_a_rewrite_lands_in_the_new_file(tmp_path):
    job = make_job(tmp_path, ["ar"], ONE)
    files = ResultFiles(job)
    files.append([turn("c0")], [], [])
    marked = turn("c0", status="disturbed", disturbed_by="made up")
    files.mark({marked.key: marked})
    files.append([turn("c1")], [], [])
    assert [(x["case_id"], x["status"]) for x in lines(tmp_path, records.CASES)] == [
        ("c0", "disturbed"),
        ("c1", "ok"),
    ]
