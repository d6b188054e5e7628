"""From records to rows, with numbers small enough to check by hand."""

import json
import math
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.results.conditions import SPEEDUPS
from specbench.results.console import render
from specbench.results.jsonl_schema import Batched
from specbench.results.manifest import RunManifest
from specbench.results.records import Lossless, Served
from specbench.results.run_summary import run_summary
from specbench.results.statistics.batched import batched_labels
from specbench.results.statistics.pairs import rank_labels
from specbench.results.statistics.served import served_labels, system_sentence
from specbench.results.statistics.summary import summarize, task_order, timed_turns
from tests.small_run import case_record, warning_texts


def record(label, case_id, n_new, steps, decode_s, **changes):
    """A turn of ``n_new`` tokens in ``steps`` passes; prefill takes 1 s."""
    prefill_s = changes.pop("prefill_s", 1.0)
    accepted = [1] * steps
    if steps:
        accepted[0] += n_new - 1 - steps
    return case_record(
        case_id, label, n_new, committed_per_step=accepted, prefill_s=prefill_s, decode_s=decode_s,
        wall_s=prefill_s + decode_s, **{"lossless": Lossless(verdict="equal"), **changes},
    )  # fmt: skip


def pair(case_id, n_new=11, plain_s=10.0, fast_s=5.0, fast_steps=5, **changes):
    """A case under the baseline and under a method."""
    return [
        record("ar", case_id, n_new, n_new - 1, plain_s, **changes),
        record("pld", case_id, n_new, fast_steps, fast_s, **changes),
    ]


def row(rows, label, task="overall"):
    (match,) = [r for r in rows if (r["label"], r["task"]) == (label, task)]
    return match


LABELS = ("ar", "pld")


def pld(cases, task="overall", **options):
    """The method's row of a run."""
    return row(summarize(cases, LABELS, **options), "pld", task)


def failed(label, case_id, **changes):
    return record(label, case_id, 0, 0, 0.0, status="failed", lossless=Lossless(), **changes)


def disturbed(label, case_id, *numbers, **changes):
    return record(label, case_id, *numbers, status="disturbed", **changes)


def test_predicted_speedups_have_their_predictions_error_in_every_interval():
    cases = [
        case
        for i, name in enumerate("abcdefgh")
        for case in pair(name, fast_s=5.0 + i / 10, timing="predicted", prefill_s=0.0)
    ]
    wide = [case.replace(prediction_error=0.1) for case in cases]

    def half(of_row, key):
        low, high = of_row[f"{key}_ci"]
        return math.log(high / low) / 2

    narrow_rows, rows = (summarize(some, LABELS) for some in (cases, wide))
    before, after = row(narrow_rows, "pld"), row(rows, "pld")
    for key in ("speedup", "geomean_speedup", "end_to_end_speedup"):
        assert half(before, key) < 0.1 * 1.96 < half(after, key) < 0.1 * 2.4
        assert after[key] == before[key]
    assert after["mat_ci"] == before["mat_ci"]
    assert row(rows, "ar") == row(narrow_rows, "ar"), "what speedups are over"
    (of_pair,) = rank_labels(wide, LABELS).pairs
    assert of_pair["ratio_ci"] == pytest.approx(after["speedup_ci"])


class TestByHand:
    """Case a: 10 tokens in 10 s and in 5 s. Case b: 30 tokens in 15 s and in 10 s."""

    CASES: ClassVar = [
        *pair("a", n_new=11, plain_s=10, fast_s=5, fast_steps=5),
        *pair("b", n_new=31, plain_s=15, fast_s=10, fast_steps=20),
    ]

    def test_numbers(self):
        ar, fast = (row(summarize(self.CASES, LABELS), label) for label in LABELS)
        assert (ar["mat"], fast["mat"]) == (1.0, 40 / 25), "pooled over cases"
        assert fast["mat_per_request"] == pytest.approx((2 + 1.5) / 2)
        assert fast["mat_token_weighted"] == pytest.approx((10 * 2 + 30 * 1.5) / 40)
        assert ar["mat_per_request"] == ar["mat_token_weighted"] == 1.0
        assert (ar["tokens_per_s"], fast["tokens_per_s"]) == (40 / 25, 40 / 15)
        assert fast["end_to_end_tokens_per_s"] == 42 / 17
        assert ar["geomean_speedup"] == 1.0, "by definition"

    @pytest.mark.parametrize(
        ("estimator", "plain", "fast"),
        [
            ("paired", 40 / 25, 40 / 15),  # ratio of totals
            ("end_to_end", 42 / 27, 42 / 17),  # with the prompt's pass and its token
            # The mean over questions of new tokens over wall time, prefill included.
            ("specbench", (11 / 11 + 31 / 16) / 2, (11 / 6 + 31 / 11) / 2),
        ],
    )
    def test_speeds_by_estimator(self, estimator, plain, fast):
        rows = summarize(self.CASES, LABELS, estimator=estimator)
        pld_row, ar = row(rows, "pld"), row(rows, "ar")
        assert pld_row["estimator"] == estimator
        assert (ar["tokens_per_s"], pld_row["tokens_per_s"]) == pytest.approx((plain, fast))
        assert pld_row["speedup"] == pytest.approx(fast / plain)
        assert pld_row["geomean_speedup"] == pytest.approx((2.0 * 1.5) ** 0.5), "of any"
        assert (ar["speedup"], ar["speedup_ci"]) == (1.0, None), "by definition"


def test_tasks_come_in_order_and_overall_pools_cases():
    cases = [
        *pair("1", task="rag"),
        *pair("2", task="mt_bench", category="writing"),
        *pair("3", task="mt_bench", category="coding", fast_s=2.0),
        *pair("4", task="code"),
    ]
    rows = summarize(cases, LABELS)
    assert [r["task"] for r in rows[::2]] == ["mt_bench", "rag", "code", "overall"]
    assert [r["label"] for r in rows[:2]] == ["ar", "pld"]
    assert row(rows, "pld", "mt_bench")["speedup"] == pytest.approx(20 / 7)
    assert row(rows, "pld")["n_cases"] == 4
    assert sorted(["overall", "rag", "a", "translation"], key=task_order) == [
        "translation", "rag", "a", "overall",
    ]  # fmt: skip


class TestDroppedCases:
    @pytest.mark.parametrize(
        "of_b",
        [
            [*pair("b", fast_s=1.0)[:1], failed("pld", "b")],
            [*pair("b"), *pair("b", turn=1)[:1], failed("pld", "b", turn=1)],
            pair("b")[:1],
        ],
        ids=["failed case", "failed turn", "missing case"],
    )
    def test_a_case_that_lacks_a_turn_of_one_label_drops_out_for_all(self, of_b):
        rows = summarize([*pair("a"), *of_b], LABELS)
        for label in LABELS:
            for task in ("overall", "qa"):
                summary_row = row(rows, label, task)
                assert (summary_row["n_cases"], summary_row["n_dropped"]) == (1, 1)
        assert row(rows, "pld")["speedup"] == 2.0
        assert row(rows, "ar")["tokens_per_s"] == 1.0
        assert row(summarize([*pair("a"), *of_b], ["ar"]), "ar")["n_dropped"] == 0
        # A task without a case left, and a run without any, still have their rows.
        rows = summarize([*pair("a"), *(turn.replace(task="rag") for turn in of_b)], LABELS)
        lost = row(rows, "pld", "rag")
        assert (lost["n_cases"], lost["mat"], lost["speedup"]) == (0, None, None)
        assert [r["n_cases"] for r in summarize([], LABELS)] == [0, 0]

    def test_disturbed_turns_count_in_mat_but_in_no_time(self):
        slow = [pair("b")[0], disturbed("pld", "b", 11, 2, 500.0)]
        cases = [*slow, *(record for case in "acd" for record in pair(case))]
        # Another repeat of the case still counts.
        again = [*cases, *pair("b", plain_s=20.0, repeat=1)]
        assert pld(again)["speedup"] == pytest.approx(50 / 20)
        summary_row = pld(cases)
        assert summary_row["mat"] == 40 / 17
        assert (summary_row["n_cases"], summary_row["n_disturbed"], summary_row["n_dropped"]) == (
            4,
            1,
            0,
        )
        assert summary_row["speedup"] == summary_row["geomean_speedup"] == pytest.approx(2.0)
        assert row(summarize(cases, LABELS), "ar")["tokens_per_s"] == 1.0
        assert pld(cases, estimator="specbench")["tokens_per_s"] == 11 / 6


def test_verdicts_are_counted_over_turns_and_never_hidden():
    cases = [*pair("a"), *pair("b"), *pair("c")]
    near_tie = Lossless(verdict="near_tie", first_diff=3, gap=1e-4)
    cases[1] = record("pld", "a", 11, 5, 5.0, lossless=near_tie)
    cases[2] = failed("ar", "b")
    bug = Lossless(verdict="bug", first_diff=0, gap=2.0)
    cases[3] = record("pld", "b", 11, 5, 5.0, lossless=bug)
    pld_row = pld(cases)
    assert pld_row["n_dropped"] == 1
    assert pld_row["lossless"] == {"equal": 1, "near_tie": 1, "bug": 1, "not_audited": 0}
    assert row(summarize(cases, LABELS), "ar")["lossless"]["equal"] == 2


@pytest.mark.parametrize("baseline", [None, "ar"])
def test_without_a_baseline_there_is_no_speedup(baseline):
    cases = [r for r in [*pair("a"), *pair("b")] if r.label == "pld"]
    pld_row = row(summarize(cases, ["pld"], baseline=baseline), "pld")
    assert pld_row["speedup"] is pld_row["speedup_ci"] is pld_row["geomean_speedup"] is None
    assert pld_row["tokens_per_s"] == 2.0


def test_an_answer_of_one_token_counts_in_no_ratio():
    one_token = [record("ar", "b", 1, 0, 0.5), record("pld", "b", 1, 0, 0.5)]
    pld_row = pld([*pair("a"), *one_token])
    assert pld_row["mat"] == 10 / 5
    assert pld_row["geomean_speedup"] == 2.0
    assert pld_row["n_cases"] == 2


def test_the_order_of_records_does_not_matter():
    cases = [r for i in range(6) for r in pair(str(i), fast_s=3.0 + i, category=f"c{i % 2}")]
    assert summarize(cases, LABELS) == summarize(cases[::-1], LABELS)


class TestComparePairs:
    LABELS: ClassVar = ["ar", "pld", "sam"]

    def cases(self, factor, n=30):
        """Three labels; ``pld`` twice as fast as ``ar``, ``sam`` by ``factor`` slower than pld."""
        cases = []
        for i in range(n):
            cases += pair(str(i), fast_s=5 + 0.1 * (i % 5))
            cases.append(record("sam", str(i), 11, 5, factor * (5 + 0.1 * (i * 7 % 5))))
        return cases

    def ranked(self, factor, n=30, **options):
        return rank_labels(self.cases(factor, n), self.LABELS, **options)

    def test_each_method_against_ar_and_then_against_the_fastest(self):
        rows = self.ranked(1.1).pairs
        assert [(r["first"], r["second"], r["family"]) for r in rows] == [
            ("pld", "ar", "ar"), ("sam", "ar", "ar"), ("sam", "pld", "best"),
        ]  # fmt: skip
        assert [r["verdict"] for r in rows] == ["faster", "faster", "slower"]
        assert all(r["n_cases"] == 30 for r in rows)
        assert self.ranked(1.1).leaders == ["pld"]
        alike = self.ranked(1.0)
        assert (alike.pairs[2]["verdict"], set(alike.leaders)) == ("tie", {"pld", "sam"})

    def test_pairs_point_as_speedups_do_and_say_the_same(self):
        """Against ar the ratio is the speedup; of a single method the interval is, too."""
        rows = summarize(self.cases(1.1), self.LABELS)
        by_question = summarize(self.cases(1.1), self.LABELS, estimator="specbench")
        for compared in self.ranked(1.1, estimator="specbench").pairs[:2]:
            assert compared["ratio"] == row(by_question, compared["first"])["speedup"]
        for label, compared in zip(("pld", "sam"), self.ranked(1.1).pairs, strict=False):
            assert compared["ratio"] == row(rows, label)["speedup"] > 1
            low, high = row(rows, label)["speedup_ci"]
            assert compared["ratio_ci"][0] < low < high < compared["ratio_ci"][1], (
                "both hold together"
            )
        cases = [r for r in self.cases(1.1) if r.label != "sam"]
        (alone,) = rank_labels(cases, LABELS).pairs
        expected = pld(cases)["speedup_ci"]
        assert alone["ratio_ci"] == pytest.approx(expected)

    def test_too_few_cases_say_how_many_it_takes(self):
        for compared in self.ranked(1.5, n=2).pairs:
            assert compared["ratio"] is not None
            assert compared["ratio_ci"] is None
            assert (compared["verdict"], compared["needed"]) == ("too few", 3)
        assert [compared["verdict"] for compared in self.ranked(1.5, n=3).pairs][2] == "slower"
        assert set(self.ranked(1.5, n=2).leaders) == {"pld", "sam"}, "nothing parts them"
        stands = self.ranked(1.5, n=2).standings
        assert {standing["verdict"] for standing in stands.values()} == {"too few"}

    def test_undecided_ones_say_how_many_it_would_take(self):
        cases = []
        for i in range(10):
            cases += pair(str(i), fast_s=5 + (i * 3 % 7))
            cases.append(record("sam", str(i), 11, 5, 5.5 + (i * 5 % 7)))
        compared = rank_labels(cases, self.LABELS).pairs[2]
        assert compared["verdict"] == "undecided"
        assert compared["needed"] > 10
        assert compared["ratio"] > 1 / compared["detectable"]

    def test_only_methods_that_were_timed_are_compared(self):
        cases = [r.replace(decode_s=0.0, timing="none") for r in self.cases(1.0)]
        assert rank_labels(cases, self.LABELS).pairs == []
        rows = self.ranked(1.1, baseline=None).pairs
        best = [(r["first"], r["second"]) for r in rows if r["family"] == "best"]
        assert best == [("sam", "pld")]
        cases = self.cases(1.1)
        cases += [record("slow", str(i), 11, 10, 20.0, method="ar") for i in range(30)]
        rows = rank_labels(cases, ["ar", "slow", "pld", "sam"]).pairs
        assert {r["first"] for r in rows} == {"pld", "sam"}


def test_what_counts_in_times_is_one_rule_for_rows_and_turns():
    """A task that loses a case to noise has its interval, or too few cases for one."""
    cases = []
    for task, n in (("qa", 5), ("rag", 3), ("mt_bench", 32)):
        for i in range(n):
            turns = pair(f"{task}{i}", fast_s=4.0 + i % 3, fast_steps=4 + i % 3, task=task)
            if i == 0 and task != "mt_bench":
                turns[1] = turns[1].replace(status="disturbed")
            cases += turns
    cases += [pair("bad")[0], failed("pld", "bad")]
    rows = summarize(cases, LABELS)
    qa, rag, whole = (row(rows, "pld", task) for task in ("qa", "rag", "overall"))
    assert (qa["n_cases"], qa["n_timed"], qa["speedup_ci"] is None) == (5, 4, False)
    assert (rag["n_cases"], rag["n_timed"], rag["speedup_ci"]) == (3, 2, None)
    assert rag["mat_ci"] is not None
    pld_turns = [turn for turn in timed_turns(cases, LABELS) if turn.label == "pld"]
    assert len(pld_turns) == whole["n_timed"] == 38
    speed = sum(turn.n_new - 1 for turn in pld_turns) / sum(turn.decode_s for turn in pld_turns)
    assert whole["tokens_per_s"] == pytest.approx(speed)
    # Untimed cases neither narrow the interval of a speed nor leave that of MAT.
    timed = pld([r for r in cases if r.case_id not in ("qa0", "rag0", "bad")])
    for key in ("speedup_ci", "geomean_speedup_ci", "tokens_per_s_ci"):
        assert whole[key] == pytest.approx(timed[key])
    assert whole["mat_ci"] != timed["mat_ci"]


@given(st.lists(st.tuples(st.integers(2, 60), st.floats(0.01, 1.0)), min_size=3, max_size=6))
def test_no_interval_is_outside_the_possible(turns):
    cases = []
    for i, (n_new, share) in enumerate(turns):
        steps = max(1, round(share * (n_new - 1)))
        cases += pair(str(i), n_new=n_new, fast_steps=steps, fast_s=0.5 + steps)
    pld_row = pld(cases, n_resamples=200)
    assert 1 <= pld_row["mat_ci"][0] <= pld_row["mat"] <= pld_row["mat_ci"][1]
    assert 0 < pld_row["speedup_ci"][0] <= pld_row["speedup"] <= pld_row["speedup_ci"][1]


def test_energy_per_token_counts_turns_whose_energy_is_known():
    cases = [*pair("a"), *pair("b"), *pair("c")]
    cases[1] = record("pld", "a", 11, 5, 5.0, energy_j=33.0)
    cases[3] = record("pld", "b", 31, 20, 5.0, energy_j=51.0)
    rows = summarize(cases, LABELS)
    assert row(rows, "pld")["joules_per_token"] == (33 + 51) / (11 + 31)
    assert row(rows, "ar")["joules_per_token"] is None


def test_shares_of_the_phases():
    cases = pair("a", phase_s={"draft": 1.0, "verify": 3.0})
    cases += pair("b", task="rag", phase_s={"draft": 2.0, "verify": 2.0})
    rows = summarize(cases, LABELS)
    assert row(rows, "pld")["phase_share"] == {"draft": 3 / 8, "verify": 5 / 8}
    assert row(rows, "pld", "rag")["phase_share"] == {"draft": 0.5, "verify": 0.5}
    assert pld(pair("a"))["phase_share"] is None


class TestRunSummary:
    """All of ``summary.json``."""

    MANIFEST: ClassVar = {
        "schema_version": 2,
        "run_key": "k",
        "labels": {"ar": {}, "pld": {}},
        "baseline": "ar",
        "seed": 0,
        "config": {"repeats": 1, "model": {"name": "m"}, "dataset": {"name": "d"}},
    }

    def of(self, cases, estimator="paired", **changes):
        manifest = self.MANIFEST | changes
        config = manifest["config"] | {"estimator": estimator}
        return run_summary(cases, [], RunManifest.from_json(manifest | {"config": config}))

    def test_pairs_from_two_methods_on(self):
        two = [case for i in range(8) for case in pair(str(i), fast_s=5 + 0.1 * i)]
        three = [*two, *(record("sam", str(i), 11, 5, 5 + 0.1 * i) for i in range(8))]
        summary = self.of(three, labels={"ar": {}, "pld": {}, "sam": {}})
        assert [(p["first"], p["second"], p["verdict"]) for p in summary["pairs"]] == [
            ("pld", "ar", "faster"), ("sam", "ar", "faster"), ("sam", "pld", "tie"),
        ]  # fmt: skip
        assert summary["leaders"] == ["pld", "sam"]
        assert json.loads(json.dumps(summary, allow_nan=False))["leaders"] == ["pld", "sam"]
        alone = self.of(two)
        assert (alone["pairs"], alone["leaders"]) == ([], ["pld"])

    @pytest.mark.parametrize("estimator", SPEEDUPS)
    def test_the_conditions_tell_what_was_run_and_of_what_the_numbers_are(self, estimator):
        cases = [case for name in "abcd" for case in pair(name, n_retokenized=11)]
        cases[-1] = cases[-1].replace(status="disturbed")
        summary = self.of(cases, estimator)["conditions"]
        assert (summary["data"], summary["cases"]) == ("d", "4 (3 timed) cases")
        assert (summary["state kept per"], summary["speedup"]) == ("prompt", SPEEDUPS[estimator])
        assert "none of fewer than 3" not in summary["intervals"]
        few = self.of(cases[:4], estimator)["conditions"]
        assert "none of fewer than 3 timed cases" in few["intervals"]

    @pytest.mark.parametrize(
        ("budgets", "shown", "mixed"),
        [
            ((None, None), None, False),
            (("tuned", "tuned"), "tuned", False),
            (("tuned", "typed"), "tuned (pld); set by hand (sam)", False),
            (("tuned", "published"), "tuned (pld); published (sam)", True),
            (("published", None), "published", False),
        ],
    )
    def test_where_draft_lengths_come_from_and_what_was_drafted(self, budgets, shown, mixed):
        sources = [("ar", None), *zip(("pld", "sam"), budgets, strict=True)]
        labels = {label: {"budget": kind} if kind else {} for label, kind in sources}
        cases = [case for name in "abc" for case in pair(name, fast_steps=4)]
        cases += [case.replace(label="sam", method="sam") for case in cases if case.label == "pld"]
        drafted = {"ar": 0, "pld": 10, "sam": 16}
        cases = [case.replace(n_drafted=drafted[case.label]) for case in cases]
        summary = self.of(cases, labels=labels)
        assert summary["conditions"].get("draft lengths") == shown
        assert summary["conditions"]["drafted tokens a step"] == "pld 2.5 and sam 4.0"
        assert ("MIXED" in [warned["code"] for warned in summary["warnings"]]) == mixed
        # Of what a rule cut, both: drafting it is paid all the same.
        offered = {"offered_per_step": [5, 5, 5, 5]}
        cut = [case.replace(drafter=offered) if case.label == "pld" else case for case in cases]
        shown = self.of(cut, labels=labels)["conditions"]["drafted tokens a step"]
        assert shown == "pld 2.5 (cut from 5.0) and sam 4.0"

    def test_a_method_that_drafts_nothing_is_named(self):
        cases = [case for name in "abc" for case in pair(name, fast_steps=4)]
        cases = [case.replace(n_drafted=0) for case in cases]
        assert warning_texts(self.of(cases)) == ["pld drafted nothing in 12 steps."]

    @pytest.mark.parametrize("engine", ["graph", None])
    def test_speedups_stand_on_plain_decoding_by_either_engine(self, engine):
        cases = []
        for case in "abc":
            cases += pair(case, plain_s=4, fast_s=2)
            cases.append(record("slow", case, 11, 10, 8.0, method="ar"))
        labels = {"ar": {}, "pld": {}, "slow": {"method": "ar", "knobs": {"eager": True}}}
        model = {"weight_bytes": 4_000_000_000, "read_bytes_per_s": 20e9}
        if engine is not None:
            model["passes"] = {"engine": engine}
        summary = self.of(cases, labels=labels, model=model)
        assert summary["pairs"] == []  # plain decoding twice and one method
        rows = {row["label"]: row for row in summary["rows"] if row["task"] == "overall"}
        assert [rows[label]["speedup_eager"] for label in labels] == [2.0, 4.0, 1.0]
        graph = [1.0, 2.0, 0.5] if engine else [None] * 3
        assert [rows[label]["speedup_graph"] for label in labels] == graph
        assert rows["pld"]["speedup_eager_ci"] == pytest.approx([4.0, 4.0])
        assert rows["ar"]["speedup_graph_ci"] is None
        # 2.5 tokens a second read 10 of 20 GB a second, and half of that in the slow row.
        assert [rows[label]["bandwidth_share"] for label in labels] == [0.5, 0.5, 0.25]

    def test_drafts_of_heads_beside_captured_passes_are_told_of(self):
        """On a GPU a target of CUDA graphs is held against heads that are none."""
        cases = [
            record("ar", "a", 11, 10, 10.0),
            record("eagle2", "a", 11, 5, 5.0, drafter={"launched_drafts": 1}),
            record("union", "a", 11, 5, 5.0, drafter={"medusa.launched_drafts": 0}),
        ]
        notes = warning_texts(self.of(cases, labels={"ar": {}, "eagle2": {}, "union": {}}))
        messages = [note for note in notes if "kernel by kernel" in note]
        assert [note.startswith("eagle2: 20.0% of its head's drafts") for note in messages] == [
            True
        ]


class TestServed:
    """Two users: batches of two questions, which take a second or two."""

    def cases(self, n=8, pld_s=2.0, alter=lambda record: record):
        turns = []
        for i in range(n):
            for label, batch_s in (("ar", 2.0), ("pld", pld_s + 0.01 * (i // 2 % 3))):
                batch = i // 2
                answered = Served(text="t", concurrency=2, batch=batch, batch_s=batch_s, requests=1)
                # A user of pld gets tokens faster than one of ar, whatever the batches take.
                turn = record(label, str(i), 11, 5, 1.0 if label == "pld" else 1.1)
                turns.append(alter(turn.replace(served=answered)))
        return turns

    def system(self, cases):
        return {row["label"]: row["system_tokens_per_s"] for row in served_labels(cases, LABELS)}

    def test_a_case_that_failed_takes_its_whole_batch_out_for_all_labels(self):
        assert self.system(self.cases())["ar"] == pytest.approx(11)

        def harm(record):
            if (record.label, record.case_id) == ("pld", "0"):
                return record.replace(status="failed", served=None)
            if (record.label, record.case_id) == ("pld", "3"):
                return record.replace(status="disturbed")
            if (record.label, record.case_id) == ("ar", "7"):  # the request was repeated
                return record.replace(served=record.served.replace(batch_s=None))
            return record

        speeds = self.system(self.cases(10, alter=harm))
        assert speeds["ar"] == pytest.approx(11), "not 7 of 8 cases' tokens over all time"
        assert speeds["pld"] == pytest.approx(2 * 22 / (2.02 + 2.01))

    def test_requests_within_limits_are_of_the_batches_whose_time_counts(self):
        repeats = []
        for repeat in range(2):

            def again(r, repeat=repeat):
                broken = (repeat, r.label, r.case_id) == (1, "ar", "7")
                served = r.served.replace(batch_s=None if broken else 2.0)
                return r.replace(
                    repeat=repeat, served=served.replace(batch=served.batch + 9 * repeat)
                )

            repeats += self.cases(alter=again)
        for served_row in served_labels(repeats, LABELS, {"ttft": 1000.0}):
            assert served_row["good_requests_per_s"] == pytest.approx(1), "14 requests in 7 batches"

    def test_the_sentence_is_about_all_users_and_not_about_what_one_gains(self):
        slower = self.cases(pld_s=2.1)
        assert pld(slower)["speedup"] == pytest.approx(1.1)
        sentence = system_sentence(slower, LABELS, "ar", 0)
        assert sentence.startswith(
            "All 2 users together: pld is slower than plain decoding; it is 0.94 to"
        )
        faster = system_sentence(self.cases(pld_s=1.0), LABELS, "ar", 0)
        assert "pld is 1.96 to 2.02 times as fast as plain decoding." in faster
        few = system_sentence(self.cases(n=4), LABELS, "ar", 0)
        assert "Too few batches" in few
        assert system_sentence(slower, LABELS, None, 0) == ""


# -- several texts at once -------------------------------------------------------------------------


def grouped(n_groups=4):
    """Groups of two cases; a case's time is its group's until it ended."""
    turns_of_groups = []
    for group in range(n_groups):
        for position, (case, plain_s, fast_s) in enumerate((("a", 10.0, 4.0), ("b", 6.0, 8.0))):
            batch = Batched(
                size=2, at_once=2, group=group, place=position, full_s=3.0, model_s=0.5, pass_s=5.5
            )
            # Longer answers in later groups, so that groups differ.
            turns = pair(f"{case}{group}", 11 + group, plain_s, fast_s, task=case, category=case)
            turns_of_groups += [turn.replace(batch=batch) for turn in turns]
    return turns_of_groups


def test_cases_decoded_at_once_are_added_up_by_group():
    """A group's time is that of its longest text: 10 s under ar, and 8 s under the method."""
    turns = grouped()
    rows = summarize(turns, LABELS)
    assert {r["task"] for r in rows} == {"overall"}, "groups hold cases of several tasks"
    fast = row(rows, "pld")
    tokens = sum(2 * (10 + group) for group in range(4))
    assert fast["tokens_per_s"] == pytest.approx(tokens / 32)
    assert fast["speedup"] == pytest.approx(10 / 8)
    assert (fast["n_cases"], fast["n_timed"]) == (8, 8)
    assert fast["speedup_ci"] is not None
    three = [turn for turn in turns if turn.batch.group < 2]
    assert pld(three)["speedup_ci"] is None, "four cases, but two groups"
    # A failed or disturbed case leaves its group out.
    for status, n_cases in (("failed", 6), ("disturbed", 8)):
        lost = pld([turns[0], turns[1].replace(status=status), *turns[2:]])
        assert (lost["n_cases"], lost["n_timed"], lost["n_dropped"]) == (n_cases, 6, 8 - n_cases)
    (_, batched_row) = batched_labels(turns, LABELS, "ar")
    assert batched_row["system_tokens_per_s"] == pytest.approx(tokens / 32)
    assert batched_row["user_tokens_per_s"] == pytest.approx(tokens / (4 * 12))
    assert batched_row["full_tokens_per_s"] == pytest.approx(tokens / 12)
    assert batched_row["full_speedup"] == 1.0
    assert batched_row["tail_share"] == pytest.approx(1 - 3 / 8)
    assert batched_row["idle_share"] == pytest.approx(1 - 12 / 16)
    assert batched_row["outside_share"] == pytest.approx(1 - 6 / 8)
    assert batched_row["model_share"] == pytest.approx(0.5 / 8)
    assert (batched_row["groups"], batched_row["equal"], batched_row["compared"]) == (4, 8, 8)


@pytest.mark.parametrize(("n_groups", "few"), [(2, True), (3, False)])
def test_groups_are_too_few_and_not_their_cases(n_groups, few):
    """Four cases in two groups are two units of the bootstrap."""
    summary = TestRunSummary().of(grouped(n_groups))
    assert summary["verdict"].startswith("Too few groups") == few
    stands = {str(cell) for cell in render(summary).columns["against the best"]}
    assert (stands == {"too few groups"}) == few
    assert "too few cases" not in stands
