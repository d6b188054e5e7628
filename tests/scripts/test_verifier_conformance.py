"""The enumeration says what verifiers do: ours, transformers' and wrong ones."""

import numpy as np
import pytest
import torch

from scripts import verifier_conformance as conformance
from scripts.every_outcome import Chance, NotEnumerable
from scripts.verifier_conformance import PAIRS, RULES, examine, load, verdict
from specbench.errors import ConfigurationError

BY_NAME = {pair.name: pair for pair in PAIRS}
CHAINS = [pair for pair in PAIRS if pair.chain]
KNOWN = (*conformance.OURS, *conformance.FOREIGN)
LOSSLESS = [name for name in KNOWN if name != "typical"]


@pytest.mark.parametrize("name", LOSSLESS)
def test_verifiers_keep_the_law_and_accept_what_their_rule_says(name):
    for pair in PAIRS if name in conformance.OURS else CHAINS:
        found = examine(pair, load(name))
        assert found.difference < 1e-12, pair.name
        assert verdict(pair, found, RULES.get(name, "any")) == "right", pair.name


def test_typical_acceptance_is_found_to_be_lossy():
    assert examine(BY_NAME["2 deep"], load("typical")).difference > 0.01


def test_block_never_accepts_less_than_token_wise():
    more = 0
    for pair in CHAINS:
        block, token = examine(pair, load("block")).accepted, pair.accepted("token")
        assert block >= token - 1e-12
        more += block > token + 1e-3
    assert more >= 5
    # arXiv 2403.10444, section 2: 11/9 against 10/9.
    example = BY_NAME["the paper's example"]
    assert examine(example, load("block")).accepted == pytest.approx(11 / 9)
    assert examine(example, load("rejection")).accepted == pytest.approx(10 / 9)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_bonus_proposal_is_one_more_token_of_the_chain(name):
    for pair in (BY_NAME["1 deep"], BY_NAME["3 deep"]):
        found = examine(pair, conformance.ours(name, bonus=True))
        assert found.difference < 1e-12


# -- wrong verifiers -------------------------------------------------------------------------------


def plain_block(draft, chance, fault=""):
    """Block verification in plain Python, with one fault or none."""
    n, tokens = len(draft.tokens), draft.tokens
    p, q = draft.p, draft.q
    weights = [1.0]
    for i in range(n):
        weight = weights[-1] * p[i, tokens[i]] / q[i, tokens[i]]
        weights.append(weight if fault == "weight not capped" else min(1.0, weight))

    def residual(i):
        weight, row = weights[i], q[i]
        if fault == "residual without the weight":
            weight = 1.0
        if fault == "draft's row of another place":
            row = q[max(0, i - 1)]
        if fault == "draft's row cut to its top tokens":
            row = np.where(row >= np.sort(row)[-2], row, 0.0)
            row = row / row.sum()
        return np.maximum(weight * p[i] - row, 0.0)

    def odds(i):
        if i == n:
            return weights[n]
        left = np.maximum(weights[i] * p[i] - q[i], 0.0).sum()
        if fault == "odds without the weight":
            left = np.maximum(p[i] - q[i], 0.0).sum()
        if fault == "odds of the row before":
            left = np.maximum(weights[i] * p[i - 1] - q[i - 1], 0.0).sum()
        below = left + 1.0 - weights[i]
        return left / below if below > 0 else 1.0

    shared = chance.uniform()
    accepted = 0
    for i in range(1, n + 1):
        passed = (shared if fault == "uniforms shared" else chance.uniform()) <= odds(i)
        if passed:
            accepted = i
        elif fault == "stops at the first failure":
            break
    if fault == "accepts one fewer":
        accepted = max(0, accepted - 1)
    if accepted == n:
        return range(n), chance.choice(p[n])
    weighed = residual(accepted)
    if fault == "token after it from the target":
        weighed = p[accepted]
    if weighed.sum() <= 0:
        weighed = p[accepted]
    if fault == "residual not normalised":
        number = chance.uniform()
        edges = weighed.cumsum()
        return range(accepted), next((i for i, e in enumerate(edges[:-1]) if number <= e), n - 1)
    return range(accepted), chance.choice(weighed)


def token_wise(draft, chance):
    for i, token in enumerate(draft.tokens):
        if not chance.uniform() <= draft.p[i, token] / draft.q[i, token]:
            return range(i), chance.choice(np.maximum(draft.p[i] - draft.q[i], 0.0))
    return range(len(draft.tokens)), chance.choice(draft.p[-1])


FAULTS = {
    "weight not capped": "another law",
    "residual without the weight": "another law",
    "draft's row of another place": "another law",
    "draft's row cut to its top tokens": "another law",
    "odds without the weight": "another law",
    "odds of the row before": "another law",
    "uniforms shared": "another law",
    "stops at the first failure": "another law",
    "accepts one fewer": "another law",
    "token after it from the target": "another law",
    "residual not normalised": "another law",
}


def test_plain_block_is_right():
    for pair in CHAINS:
        assert verdict(pair, examine(pair, plain_block), "block") == "right"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    pair = BY_NAME["3 deep"]
    found = examine(pair, lambda draft, chance: plain_block(draft, chance, fault))
    assert FAULTS[fault] in verdict(pair, found, "block")


def test_token_wise_acceptance_under_blocks_name_is_found():
    pair = BY_NAME["3 deep"]
    found = examine(pair, token_wise)
    assert found.difference < 1e-12
    assert verdict(pair, found, "token") == "right"
    assert verdict(pair, found, "block") == "accepts as token-wise"


def test_a_path_that_is_none_of_the_drafts_is_refused():
    with pytest.raises(ValueError, match="path"):
        examine(BY_NAME["2 deep"], lambda draft, chance: ([1], 0))


# -- foreign ones ----------------------------------------------------------------------------------


def product_of_uniforms(draft, chance):
    """Judges the product of the ratios by the product of the random numbers."""
    n, places = len(draft.tokens), np.arange(len(draft.tokens))
    ratios = draft.p[places, draft.tokens] / draft.q[places, draft.tokens]
    with chance.torch():
        drawn = torch.rand(n).double().cumprod(0)
        passed = drawn <= torch.tensor(np.minimum(ratios, 1.0).cumprod())
    accepted = int(passed.nonzero().max()) + 1 if passed.any() else 0
    if accepted == n:
        return range(n), chance.choice(draft.p[n])
    return range(accepted), chance.choice(np.maximum(draft.p[accepted] - draft.q[accepted], 1e-12))


def test_what_cannot_be_enumerated_is_refused_and_can_be_sampled():
    pair = BY_NAME["3 deep"]
    with pytest.raises(NotEnumerable, match="--draws"):
        examine(pair, product_of_uniforms)
    assert verdict(pair, examine(pair, product_of_uniforms, 3000), "any", 3000) == "another law"
    assert verdict(pair, examine(pair, token_wise, 3000), "token", 3000) == "right"


def eldest(draft, chance):
    """Tests each node's first child alone, which is exact on trees, too."""
    path, at = [], -1
    while len(below := np.flatnonzero(draft.parents == at)):
        child = below[0]
        p, q, token = draft.p[at + 1], draft.q[child], draft.tokens[child]
        if not chance.uniform() <= p[token] / q[token]:
            return path, chance.choice(np.maximum(p - q, 0.0))
        path.append(at := child)
    return path, chance.choice(draft.p[at + 1])


@pytest.mark.parametrize("words", [[], ["--trees"]])
def test_a_foreign_verifier_may_be_asked_about_trees(words, monkeypatch, capsys):
    here = "tests.scripts.test_verifier_conformance"
    tree = BY_NAME["siblings with replacement"]
    monkeypatch.setattr(conformance, "PAIRS", (BY_NAME["2 deep"], tree))
    monkeypatch.setattr("sys.argv", ["verifier_conformance", f"{here}:eldest", *words])
    assert conformance.main() == 0
    assert (tree.name in capsys.readouterr().out) == bool(words)


def test_torchs_numbers_are_those_of_the_enumeration():
    def pick():
        with chance.torch():
            number = torch.rand(2)
            both = number <= torch.tensor([0.25, 0.5])
            again = bool(torch.tensor(0.25) >= number[0])
            kept = torch.multinomial(torch.tensor([1.0, 3.0]), 1)
        return (*both.tolist(), again, int(kept))

    chance = Chance()
    law = {}
    for probability, outcome in chance.runs(pick):
        law[outcome] = law.get(outcome, 0.0) + probability
    assert sum(law.values()) == pytest.approx(1.0)
    assert law[True, False, True, 1] == pytest.approx(0.25 * 0.5 * 0.75)
    assert all(first == again for first, _, again, _ in law)


def test_the_exit_code_tells_the_truth(monkeypatch, capsys):
    here = "tests.scripts.test_verifier_conformance"
    monkeypatch.setattr(conformance, "PAIRS", (BY_NAME["2 deep"],))
    for words, code in ((["block"], 0), ([f"{here}:token_wise", "--rule", "block"], 1)):
        monkeypatch.setattr("sys.argv", ["verifier_conformance", *words])
        assert conformance.main() == code
    assert "accepts as token-wise" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["verifier_conformance", "blokc"])
    with pytest.raises(ConfigurationError, match="no verifier blokc"):
        conformance.main()
