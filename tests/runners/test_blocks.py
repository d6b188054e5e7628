"""Interleaving, dialogues, references, state scopes and failures, on a target that is a formula."""

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from methods.oracle import Oracle
from runners.job import derive_seed, label_order
from runners.measure.blocks import without_reasoning
from runners.measure.live import EngineSource
from specbench.decoding.drafter import Drafter
from tests.runners.toy import NEW_TOKENS, Recorder, ToySession, make_job, make_runner, run_all


@dataclass(frozen=True)
class ToyCase:
    case_id: str
    turns: tuple[str, ...]
    task: str = "qa"
    category: str = "qa"


ONE = [ToyCase(f"c{i}", (f"why is {'x' * i} here",)) for i in range(4)]
TWO = [ToyCase(f"d{i}", (f"tell me {'y' * i} a story", "and now a short one")) for i in range(3)]


def by_key(records, *names):
    return {(r.label, r.case_id, r.turn): tuple(getattr(r, n) for n in names) for r in records}


def test_labels_run_turn_by_turn_in_the_order_of_their_block(tmp_path):
    journal, labels = [], ("ar", "a", "b")
    job = make_job(tmp_path, labels, TWO)
    done, _, _ = run_all(job, [Recorder(name, journal) for name in labels])
    orders = [block.order(labels, job.config.seed) for block in job.blocks()]
    assert journal == [label for order in orders for label in order * 2]
    assert [r.position for r in done] == [0, 1, 2] * 6
    assert {r.n_retokenized is None for r in done if r.label == "ar"} == {False}
    assert {r.n_retokenized for r in done if r.label != "ar"} == {None}, "nobody asks"
    assert [r.stream_index for r in done] == [0] * 6 + [1] * 6 + [2] * 6


@pytest.mark.parametrize("n", range(1, 9))
def test_labels_are_balanced_over_positions_neighbors_and_repeats(n):
    labels = tuple("abcdefgh"[:n])
    size = n if n % 2 == 0 or n == 1 else 2 * n
    designs = [[label_order(labels, 7, 3 * size + i, r) for i in range(size)] for r in range(size)]
    # Each row of blocks, and each block over its repeats.
    for rows in (*designs, *zip(*designs, strict=True)):
        assert all(sorted(row) == list(labels) for row in rows)
        places = Counter((label, i) for row in rows for i, label in enumerate(row))
        behind = Counter(pair for row in rows for pair in itertools.pairwise(row))
        assert set(places.values()) == {size // n}
        assert len(behind) == n * (n - 1)
        assert len(set(behind.values())) <= 1


def test_orders_are_shuffled_by_the_seed_and_the_same_everywhere():
    def orders(seed):
        return [label_order(("ar", "a", "b", "c"), seed, i) for i in range(40)]

    assert orders(0) == orders(0) != orders(1)
    assert len({tuple(orders(0)[i : i + 4]) for i in range(0, 40, 4)}) > 5, "designs differ"
    assert orders(0)[:2] == [("ar", "a", "c", "b"), ("c", "ar", "b", "a")]


def test_repeats_are_the_outer_loop_and_show_a_case_in_both_orders_with_seeds_of_their_own(
    tmp_path,
):
    drafters = [Recorder("ar"), Recorder("a")]
    done, _, session = run_all(make_job(tmp_path, ["ar", "a"], ONE[:2], repeats=2), drafters)
    order = [(r.repeat, r.case_id, r.label) for r in done]
    assert [turn[:2] for turn in order[::2]] == [(0, "c0"), (0, "c1"), (1, "c0"), (1, "c1")]
    first = [label for _, _, label in order[::2]]
    assert first in (["ar", "a", "a", "ar"], ["a", "ar", "ar", "a"])
    assert session.audits == [(r.label, r.case_id, 0) for r in done if r.label == "a"]
    seeds = {}
    for record in done:
        seeds.setdefault(record.key[:3], set()).add(record.seed)
    assert all(len(values) == 1 for values in seeds.values()), "the same for all labels"
    assert len(set.union(*seeds.values())) == len(seeds)
    assert derive_seed(0, "c0", 1, 2) == 21379679282576864  # the same on every machine, for ever


def test_a_shard_measures_every_nth_block(tmp_path):
    blocks = [make_job(tmp_path, ["ar"], ONE, repeats=2, shard=(i, 3)).blocks() for i in range(3)]
    assert [[(b.repeat, b.index) for b in shard] for shard in blocks] == [
        [(0, 0), (0, 3), (1, 0), (1, 3)],
        [(0, 1), (1, 1)],
        [(0, 2), (1, 2)],
    ]


def test_all_labels_see_the_baselines_answer_in_turn_two(tmp_path):
    done, _, session = run_all(
        make_job(tmp_path, ["ar", "a"], TWO), [Recorder("ar"), Recorder("a")]
    )
    turns = by_key(done, "prompt_ids", "output_ids")
    for case in TWO:
        prompt, _ = turns["a", case.case_id, 1]
        assert prompt == turns["ar", case.case_id, 1][0]
        first_prompt, first_output = turns["ar", case.case_id, 0]
        assert prompt[: len(first_prompt) + NEW_TOKENS] == first_prompt + first_output
    assert session.plain_calls == 0
    assert not (tmp_path / "dialogue.jsonl").exists()


def test_without_a_baseline_the_answer_is_computed_once_and_kept(tmp_path):
    (tmp_path / "sampled").mkdir()
    job = make_job(tmp_path, ["a", "b"], TWO, repeats=2)
    done, _, session = run_all(job, [Recorder("a"), Recorder("b")])
    assert session.plain_calls == len(TWO)
    assert len((tmp_path / "dialogue.jsonl").read_text().splitlines()) == len(TWO)
    assert {r.lossless.verdict for r in done} == {"not_audited"}
    _, _, session = run_all(job, [Recorder("a"), Recorder("b")])
    assert session.plain_calls == 0
    # Under sampling the baseline's own answer is not the plain one either.
    job = make_job(tmp_path / "sampled", ["ar", "a"], TWO, temperature=0.7)
    done, _, session = run_all(job, [Recorder("ar"), Recorder("a")])
    assert session.plain_calls == len(TWO)
    assert {r.lossless.verdict for r in done} == {"not_audited"}


def test_a_failing_case_is_recorded_and_the_run_goes_on(tmp_path):
    job = make_job(tmp_path, ["ar", "a"], ONE)
    done, errors, _ = run_all(job, [Recorder("ar"), Recorder("a", fail_at={1})])
    assert [(r.case_id, r.label) for r in done if r.status == "failed"] == [("c1", "a")]
    assert len(done) == 8
    (error,) = errors
    assert (error["type"], error["message"]) == ("made_up", "failed on purpose")
    assert "in begin" in error["traceback"]
    failed = next(r for r in done if r.status == "failed")
    assert (failed.n_new, failed.wall_s, failed.n_prompt) == (0, 0.0, 4)


@pytest.mark.parametrize("dialogue", ["ar", "own"])
def test_where_the_baseline_fails_turn_two_fails_for_who_quotes_it_with_the_reason(
    tmp_path, dialogue
):
    job = make_job(tmp_path, ["ar", "a"], TWO, dialogue=dialogue)
    done, errors, _ = run_all(job, [Recorder("ar", fail_at={0}), Recorder("a")])
    failed = {key for key, status in by_key(done, "status").items() if status == ("failed",)}
    of_others = {("a", "d0", 1)} if dialogue == "ar" else set()
    assert failed == {("ar", "d0", 0), ("ar", "d0", 1)} | of_others
    reasons = [e for e in errors if e["turn"] == 1]
    assert {e["type"] for e in reasons} == {"no_dialogue"}
    assert all("turn 0 of ar failed" in e["message"] for e in reasons)


def test_the_oracle_gets_the_baselines_output_before_and_after_it(tmp_path):
    job = make_job(tmp_path, ["ar", "oracle"], ONE)
    done, _, session = run_all(job, [Drafter(name="ar"), Oracle(depth=3)])
    oracle = [r for r in done if r.label == "oracle"]
    # In reversed blocks the baseline has not run yet: computed, untimed.
    assert session.plain_calls == 2
    full, rest = divmod(NEW_TOKENS - 1, 4)
    assert [list(r.committed_per_step) for r in oracle] == [[4] * full + [rest]] * 4
    assert {r.lossless.verdict for r in done} == {"equal"}


@pytest.mark.parametrize(("scope", "resets"), [("turn", 6), ("prompt", 3), ("run", 0)])
def test_what_is_learnt_is_kept_as_long_as_the_scope_says(tmp_path, scope, resets):
    drafter = Recorder("a", scope=scope)
    done, _, _ = run_all(make_job(tmp_path, ["ar", "a"], TWO, repeats=2), [Recorder("ar"), drafter])
    # Once more at the start of each repeat, whatever the scope.
    assert drafter.resets == 2 * resets + 2
    assert {r.state_scope for r in done if r.label == "a"} == {scope}


def test_the_time_of_a_reset_belongs_to_the_drafter(tmp_path):
    job = make_job(tmp_path, ["ar", "a"], ONE[:1])
    done, _, _ = run_all(job, [Recorder("ar"), Recorder("a", reset_s=0.02)])
    (record,) = (r for r in done if r.label == "a")
    assert record.drafter_setup_s >= 0.02
    assert record.wall_s == record.prefill_s + record.decode_s
    assert record.decode_s >= record.drafter_setup_s


@pytest.mark.parametrize("tokens_only", [True, False])
@pytest.mark.parametrize("stop_after", [1, 2, 4])
def test_run_state_is_rebuilt_on_resume(tmp_path, stop_after, tokens_only):
    job = make_job(tmp_path, ["ar", "a"], TWO, repeats=2)

    def drafters():
        return [Recorder("ar"), Recorder("a", scope="run", tokens_only=tokens_only)]

    undisturbed = drafters()
    run_all(job, undisturbed)
    done, _, _ = run_all(job, drafters(), stop_after=stop_after)
    resumed = drafters()
    run_all(job, resumed, done=done)
    assert undisturbed[1].seen == resumed[1].seen


def test_run_state_is_rebuilt_after_a_failure_in_the_middle_of_a_turn(tmp_path):
    job = make_job(tmp_path, ["ar", "a"], TWO)
    failing = Recorder("a", scope="run", fail_at={2})
    run_all(job, [Recorder("ar"), failing])
    assert [kind for kind, *_ in failing.seen if kind != "observe"] == ["begin", "end"] * 5


class Counting(Drafter):
    """Adds up the tokens that each turn shows as new, under any state scope."""

    def __init__(self, scope):
        super().__init__(name="counting", state_scope=scope)
        self.turns = []

    def reset(self):
        self.turns = []

    def begin(self, state):
        self.turns.append((state.n_seen, state.n_prompt))


@pytest.mark.parametrize("scope", ["turn", "prompt", "run"])
def test_a_drafter_is_told_which_text_of_a_dialogue_it_has_seen(scope, tmp_path):
    drafter = Counting(scope)
    job = make_job(tmp_path, ["ar", "a"], TWO)
    done, _, _ = run_all(job, [Recorder("ar"), drafter])
    of_a = [r for r in done if r.label == "a"]
    first = {r.case_id: r.n_prompt + r.n_new for r in of_a if r.turn == 0}
    n_seen = [first[r.case_id] if r.turn and scope != "turn" else 0 for r in of_a]
    expected = list(zip(n_seen, [r.n_prompt for r in of_a], strict=True))
    n_turns = {"turn": 1, "prompt": 2, "run": len(of_a)}[scope]
    assert drafter.turns == expected[-n_turns:]
    # A resumed run feeds the recorded turns to a drafter that keeps them, and tells it the same.
    again = Counting(scope)
    run_all(job, [Recorder("ar"), again], done=done[:8])
    assert again.turns == expected[-n_turns:]


class ClockSession(ToySession):
    """Its template writes a number that changes whenever a prompt is rendered."""

    rendered = 0

    def render(self, turns):
        self.rendered += 1
        return np.append(super().render(turns), self.rendered % 20)


@pytest.mark.parametrize("dialogue", ["ar", "own"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_turn_is_rendered_once_for_all_labels_that_quote_the_same(
    tmp_path, dialogue, temperature
):
    job = make_job(tmp_path, ["a", "ar", "b"], TWO, dialogue=dialogue, temperature=temperature)
    drafters = [Recorder(name) for name in job.labels]
    runner, _, _ = make_runner(job, drafters, session=ClockSession())
    for block in job.blocks():
        result = runner.run([block])
        assert not result.errors
        prompts = {}
        for record in result.records:
            prompts.setdefault(record.turn, set()).add(tuple(record.prompt_ids))
        assert [len(variants) for variants in prompts.values()] == [1, 1]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_prompt_that_is_not_the_baselines_is_an_error(tmp_path, temperature):
    class LongerPrompts(EngineSource):
        def _prompt(self, turn):
            extra = [3] if turn.run.label == "b" else []
            return np.append(super()._prompt(turn), extra).astype(np.int64)

    job = make_job(tmp_path, ["ar", "a", "b"], ONE[:2], temperature=temperature)
    runner, session, _ = make_runner(job, [Recorder(name) for name in job.labels])
    runner.source = LongerPrompts(job, session)
    errors = [error for block in job.blocks() for error in runner.run([block]).errors]
    assert [(e["case_id"], e["label"], e["type"]) for e in errors] == [
        ("c0", "b", "prompts_differ"), ("c1", "b", "prompts_differ")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        ("<think>\nhm\n</think>\n\nA river.", False, "A river."),
        ("hm, so\n</think>A river.", True, "A river."),
        ("<think>hm </think> no, <think>again</think>\nA river.", False, "A river."),
        ("<think>cut off", False, ""),
        ("cut off", True, ""),
        ("A river. The tag <think> opens.", False, "A river. The tag <think> opens."),
        ("A river.\n", False, "A river.\n"),
    ],
)
def test_what_a_model_thinks_is_no_part_of_its_answer(text, opened, answer):
    assert without_reasoning(text, opened=opened) == answer
