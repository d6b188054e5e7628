import numpy as np
import pytest

from methods.card import Card
from specbench.decoding.drafter import Drafter
from tests.methods.table_turns import VOCAB, pair, ready, turn


def card(draft, target=None, **knobs):
    return ready(Card(**({"k": 4, "r": 3} | knobs)), draft, target)


def test_a_perfect_draft_is_followed_at_its_own_speed():
    """One token per draft pass: after the first step, r a step, as long as there is no miss."""
    target, draft = pair()
    result = turn(target, card(draft, target, k=1, r=3), n=1 + 1 + 3 * 9)
    assert result.output_ids == turn(target, Drafter(name="ar"), n=29).output_ids
    # Three layers grow during the first pass, and its own token uses up the first: two are left.
    assert result.drafted_per_step[:2] == [0, 2]
    assert result.committed_per_step == [1] + [3] * 9
    report = result.drafter
    assert report["hits"] == len(result.committed_per_step) - 1 and report["misses"] == 0
    assert report["draft_tokens"] == report["draft_forwards"] == sum(draft.fed)


def test_a_step_makes_r_passes_and_a_miss_costs_one_of_one_row():
    target, draft = pair(noise=1.5)
    drafter = card(draft, target, k=3, r=4)
    passes = []
    original = drafter.observe

    def observe(state, outcome):
        if state.remaining > 20:  # at the end fewer layers are of use
            passes.append(len(draft.fed))
        original(state, outcome)

    drafter.observe = observe
    result = turn(target, drafter, n=80)
    assert result.drafter["misses"] > 3 and result.drafter["hits"] > 3
    assert set(np.diff([0, *passes]).tolist()) == {4}
    # One row, the root's, after a miss. A layer has K nodes (the vocabulary is larger).
    assert draft.fed.count(1) == result.drafter["misses"]
    assert set(draft.fed) == {1, 3}


def test_what_is_not_corrected_is_found_less_often():
    results = []
    for correct in (True, False):
        target, draft = pair(noise=1.2)
        result = turn(target, card(draft, target, k=4, r=4, correct=correct), n=250)
        counts = result.drafter
        results.append(counts["hits"] / (counts["hits"] + counts["misses"]))
        assert result.output_ids == turn(target, Drafter(name="ar"), n=250).output_ids
    assert results[1] < results[0] - 0.05


def test_layers_end_where_no_token_is_wanted_any_more():
    target, draft = pair()
    result = turn(target, card(draft, target, k=2, r=20, max_depth=30), n=6)
    assert max(result.drafted_per_step) <= 4
    assert sum(draft.fed) <= 2 * 6


def test_the_report_holds_what_the_papers_table_needs():
    target, draft = pair(noise=1.0)
    result = turn(target, card(draft, target, k=4, r=3), n=60)
    report, steps = result.drafter, result.n_target_passes
    assert report["k"] == 4 and report["r"] == 3 and report["devices"] == 1
    rows = result.n_drafted + steps
    assert report["target_params_x_new"] == pytest.approx(10e-9 * rows / steps)
    per_pass = report["draft_tokens"] / report["draft_forwards"]
    assert report["draft_params_x_new"] == pytest.approx(1000e-9 * per_pass)


def plain_card(target_rule, draft_log_prob, text, k, r, n):
    """Run the synchronous algorithm over whole paths; return each step's draft and tokens."""
    layers, end, steps = None, len(text) + n, []
    while len(text) < end:
        remaining, path = end - len(text), ()
        for layer in (layers or [()])[1:]:  # the likeliest child, while there is one
            below = [p for p in layer if p[:-1] == path]
            if not below:
                break
            path = below[0]  # a layer has its likeliest first
        path = path[: remaining - 1]
        passes, scores = r, {}
        if layers is None:  # a pass reads the text first; the prompt was read before
            layers, passes = [[()]], r - bool(steps)
        for layer in layers:
            for p in layer:
                scores[p] = scores.get(p[:-1], 0.0) + (draft_log_prob(text, p) if p else 0.0)
        while passes and len(layers) - 1 < remaining:
            children = {
                (*p, t): scores[p] + draft_log_prob(text, (*p, t))
                for p in layers[-1] for t in range(VOCAB)
            }  # fmt: skip
            layers.append(sorted(children, key=children.get, reverse=True)[:k])
            scores |= children
            passes -= 1
        committed = []
        for token in (*path, None):
            committed.append(target_rule(text + committed))
            if committed[-1] != token:
                break
        steps.append((list(path), committed))
        text = text + committed
        at, whole = len(committed), tuple(committed)
        if at < len(layers) and whole in layers[at]:
            pruned = [[p[at:] for p in layer if p[:at] == whole] for layer in layers[at:]]
            layers = [layer for layer in pruned if layer]
        else:
            layers = None
    return steps


@pytest.mark.parametrize(("k", "r"), [(5, 1), (3, 2), (2, 3), (1, 5)])
@pytest.mark.parametrize("noise", [0.5, 1.5])
def test_steps_are_those_of_the_plain_algorithm(k, r, noise):
    """More than 1,000 steps in all."""
    compared = 0
    for seed in range(4):
        target, draft = pair(seed, noise)
        log_probs = draft.table.double().log_softmax(-1)

        def log_prob(text, path, log_probs=log_probs):
            before = [*text, *path]
            return float(log_probs[before[-3], before[-2], before[-1]])

        def rule(text, table=target.table):
            return int(table[text[-2], text[-1]].argmax())

        drafter = card(draft, target, k=k, r=r)
        drafts, propose = [], drafter.propose
        drafter.propose = lambda s, d=drafts, f=propose: d.append(f(s)) or d[-1]
        result = turn(target, drafter, n=60)
        text = [3, 1, 4, result.output_ids[0]]
        expected = plain_card(rule, log_prob, text, k, r, 59)
        assert [d.tokens.tolist() for d in drafts] == [path for path, _ in expected]
        assert result.committed_per_step == [len(committed) for _, committed in expected]
        compared += len(expected)
    assert compared >= 50
