"""Which turns count as disturbed, what is measured again, and where the first measurement goes."""

from dataclasses import replace
from functools import partial

import pytest

from runners.run_folder.folder import ResultFiles
from runners.session import interference_rule
from specbench.config.schema import MeasureConfig, NoiseConfig
from specbench.results import records
from specbench.results.records import CaseRecord
from specbench.results.statistics.summary import summarize
from specbench.storage import jsonl
from specbench.system.interference import Interference, SystemMonitor
from tests.runners.test_blocks import ONE
from tests.runners.toy import Recorder, make_job, make_runner
from tests.small_run import case_record, run_here

LIMITS = NoiseConfig(steal=0.05, waiting=0.15, slowdown=1.5, shortest_s=0.5)


turn = partial(case_record, prefill_s=1.0, decode_s=1.0, wall_s=2.0)


def trace(record, step_s, drafted=0):
    n = record.n_target_passes
    return {
        "label": record.label, "case_id": record.case_id, "turn": record.turn,
        "repeat": record.repeat, "drafted": [drafted] * n, "committed": [1] * n,
        "step_s": [step_s] * n,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cpu_steal": 0.2}, "the hypervisor took 20% of the CPU time"),
        ({"cpu_waiting": 0.5}, "waited 0.50 s per second for a CPU"),
        ({"gpu": [{"throttle": ["hardware_thermal"]}]}, "the GPU throttled (hardware_thermal)"),
        ({"gpu": [{"other_processes": 2}]}, "2 other processes on the GPU"),
        ({"cpu_steal": 0.2, "cpu_waiting": 0.5}, "20% of the CPU time; waited"),
    ],
)
def test_each_counter_disturbs_beyond_its_limit(changes, said):
    assert said in interference_rule.by_counters(turn(**changes), LIMITS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cpu_steal": 0.04, "cpu_waiting": 0.14},
        {"cpu_steal": None, "cpu_waiting": None, "gpu": None},
        {"gpu": [{"throttle": ["power_cap"], "other_processes": 0}]},
        {"gpu": [{"throttle": None, "other_processes": None}]},
        {"cpu_steal": 0.9, "wall_s": 0.4},
        {"cpu_steal": 0.9, "status": "failed"},
        {"cpu_others": 0.9, "cpu_load": 7.0},
    ],
)
def test_what_does_not_disturb(changes):
    assert interference_rule.by_counters(turn(**changes), LIMITS) == ""


def test_null_switches_a_rule_off():
    off = replace(LIMITS, steal=None, waiting=None)
    assert interference_rule.by_counters(turn(cpu_steal=0.9, cpu_waiting=3.0), off) == ""


class TestSlowdown:
    """A burst that no counter shows: one turn's steps take eight times the others'."""

    def run(self, n=6, slow=8.0, **changes):
        found = [turn(str(i)) for i in range(n)]
        found[2] = turn("2", **changes)
        return found, [trace(r, 0.1 * (slow if r.case_id == "2" else 1)) for r in found]

    def test_the_slow_turn_is_found(self):
        found, traces = self.run()
        factors = interference_rule.slowdowns(found, traces)
        assert factors[0, "2", 0, "ar"] == pytest.approx(8)
        changed = interference_rule.judge(found, traces, LIMITS)
        assert list(changed) == [(0, "2", 0, "ar")]
        record = changed[(0, "2", 0, "ar")]
        assert record.status == "disturbed"
        assert record.disturbed_by == "steps took 8.00 times what like steps take"

    def test_a_single_stall_counts_by_the_time_it_took(self):
        found, traces = self.run(slow=1.0)
        traces[2]["step_s"][3] = 70.0
        assert list(interference_rule.judge(found, traces, LIMITS)) == [(0, "2", 0, "ar")]

    def test_judging_twice_changes_nothing_and_a_quiet_turn_is_taken_back(self):
        found, traces = self.run()
        changed = interference_rule.judge(found, traces, LIMITS)
        marked = [changed.get(r.key, r) for r in found]
        assert interference_rule.judge(marked, traces, LIMITS) == {}
        (back,) = interference_rule.judge(marked, self.run(slow=1.0)[1], LIMITS).values()
        assert (back.status, back.disturbed_by) == ("ok", "")

    def test_wide_drafts_and_long_contexts_are_compared_with_their_like(self):
        found, traces = self.run()
        traces[2]["drafted"] = [64] * 8
        assert interference_rule.judge(found, traces, LIMITS) == {}
        found, traces = self.run(n_prompt=2000)
        assert interference_rule.judge(found, traces, LIMITS) == {}

    def test_labels_are_not_compared_with_each_other(self):
        found, traces = self.run(label="pld")
        assert interference_rule.judge(found, traces, LIMITS) == {}

    def test_four_turns_say_nothing_and_short_turns_are_not_judged(self):
        found, traces = self.run(n=4)
        assert interference_rule.slowdowns(found, traces) == {}
        found, traces = self.run(wall_s=0.3)
        assert interference_rule.judge(found, traces, LIMITS) == {}

    def test_without_step_times_nothing_is_judged(self):
        found, traces = self.run()
        for line in traces:
            line["step_s"] = None
        assert interference_rule.slowdowns(found, traces) == {}


class TestWhatIsMeasuredAgain:
    def chosen(self, tmp_path, disturbed, superseded=0, attempt=0, n=12, **measure):
        cases = [type(ONE[0])(f"c{i}", ("why",)) for i in range(n)]
        job = make_job(tmp_path, ["ar"], cases, measure=MeasureConfig(**measure))
        found = [
            turn(c.case_id, status="disturbed" if c.case_id in disturbed else "ok",
                 attempt=attempt if c.case_id in disturbed else 0)
            for c in cases
        ]  # fmt: skip
        return [b.case.case_id for b in interference_rule.to_measure_again(job, found, superseded)]

    def test_in_order_and_within_the_share_of_all_blocks(self, tmp_path):
        assert self.chosen(tmp_path, {"c7", "c2"}) == ["c2", "c7"]
        assert self.chosen(tmp_path, {"c7", "c2", "c3", "c9"}) == ["c2", "c3", "c7"]
        assert self.chosen(tmp_path, {"c7", "c2", "c3", "c9"}, superseded=2) == ["c2"]
        assert self.chosen(tmp_path, {"c7"}, superseded=3) == []

    def test_as_often_as_allowed(self, tmp_path):
        assert self.chosen(tmp_path, {"c1"}, attempt=1) == []
        assert self.chosen(tmp_path, {"c1"}, attempt=1, reruns=2) == ["c1"]
        assert self.chosen(tmp_path, {"c1"}, reruns=0) == []

    def test_a_machine_that_is_always_disturbed_is_not_measured_again(self, tmp_path):
        six, seven = ({f"c{i}" for i in range(n)} for n in (6, 7))
        assert len(self.chosen(tmp_path, six)) == 3
        assert self.chosen(tmp_path, seven) == []


def test_disturbed_blocks_count_in_no_time_unless_most_are_disturbed():
    def rows(n_disturbed):
        found = []
        for i in range(10):
            status = "disturbed" if i < n_disturbed else "ok"
            seconds = 100.0 if i < n_disturbed else 1.0
            found += [turn(str(i), "ar", decode_s=seconds, status=status), turn(str(i), "pld")]
        return summarize(found, ["ar", "pld"], n_resamples=10)[-2]

    five, six = rows(5), rows(6)
    assert (five["n_disturbed"], five["disturbed_counted"]) == (5, False)
    assert five["tokens_per_s"] == 8.0
    assert (six["n_disturbed"], six["disturbed_counted"]) == (6, True)
    assert six["tokens_per_s"] == pytest.approx(10 * 8 / 604)


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_only", [True, False])
def test_a_block_measured_again_starts_from_the_state_before_it(tmp_path, tokens_only):
    drafters = [Recorder("ar"), Recorder("a", scope="run", tokens_only=tokens_only)]
    job = make_job(tmp_path, ["ar", "a"], ONE)
    runner, _, done = make_runner(job, drafters)
    seen = []
    for block in job.blocks():
        seen.append(len(drafters[1].seen))
        done.extend(runner.run(block).records)
    before = list(drafters[1].seen)
    again = runner.run_again(job.blocks()[1], attempt=1)
    assert drafters[1].seen == before[: seen[2]]
    assert {r.attempt for r in again.records} == {1}
    assert [r.output_ids for r in again.records] == [
        r.output_ids for r in done if r.case_id == "c1"
    ]


@pytest.fixture
def run_noisy(small, tmp_path, monkeypatch):
    """A run whose turns see, one after the other, the given shares of stolen time."""

    def run(steals, *overrides):
        stolen = iter(steals)
        monkeypatch.setattr(
            SystemMonitor, "end", lambda self: Interference(cpu_steal=next(stolen, 0.0))
        )
        limits = ["measure.disturbed.steal=0.05", "measure.disturbed.shortest_s=0"]
        own = [f"output_dir={tmp_path}/run", "dataset.tasks=[qa,rag]", *limits]
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
        ("83", "pld", 0, "ok"),
        ("83", "ar", 0, "disturbed"),
    ]
    assert "hypervisor took 40%" in first[1].disturbed_by
    row = jsonl.read_json(folder / records.SUMMARY)["rows"][-1]
    assert (row["n_cases"], row["n_disturbed"]) == (3, 0)
    assert "1 disturbed case was measured again" in " ".join(capsys.readouterr().out.split())


def test_a_block_that_stays_disturbed_is_measured_again_so_often_and_left_out(run_noisy):
    folder = run_noisy([0, 0, 0, 0.4, 0, 0, 0.5, 0.5], "measure.rerun_share=1")
    done, _ = records.read_records(folder)
    assert {(r.case_id, r.attempt, r.status) for r in done if r.case_id == "83"} == {
        ("83", 1, "disturbed")
    }
    assert len(lines(folder, records.DISTURBED)) == 2
    summary = jsonl.read_json(folder / records.SUMMARY)
    assert summary["rows"][-1]["n_disturbed"] == 1
    (note,) = (n for n in summary["notes"] if "1 of 3 cases hold a disturbed turn" in n)
    assert "Disturbed is more than: 5% of the CPU time stolen; or a GPU shared" in note


def test_a_machine_disturbed_throughout_still_finishes_and_says_so(run_noisy):
    folder = run_noisy([0.4] * 6)
    assert not (folder / records.DISTURBED).exists()
    summary = jsonl.read_json(folder / records.SUMMARY)
    assert summary["rows"][-1]["tokens_per_s"] > 0
    assert summary["rows"][-1]["disturbed_counted"] is True
    assert any("DISTURBED THROUGHOUT: 3 of 3" in note for note in summary["notes"])


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
