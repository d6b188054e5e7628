"""The audit tells a near tie from a bug."""

import numpy as np
import pytest
import torch

from specbench.arrays import first_difference
from specbench.decoding import lossless
from specbench.decoding.drafter import Drafter
from specbench.decoding.lossless import audit_output
from specbench.models.target import Target
from tests.conftest import VOCAB, engine, tiny_model

PROMPT = [3, 1, 4, 1, 5]
EXACT = lossless.TOLERANCE["float64"]


def plain(target: Target, n: int = 12) -> list[int]:
    result = engine(target).decode(np.array(PROMPT), Drafter(name="ar"), max_new_tokens=n)
    return result.output_ids


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


def test_equal_outputs_need_no_pass(make_target, monkeypatch):
    monkeypatch.setattr(lossless, "max_gap", lambda *_: pytest.fail("no pass is needed"))
    assert audit_output(make_target(), PROMPT, [1, 2], [1, 2], EXACT).verdict == "equal"


def test_a_wrong_token_is_a_bug_with_its_gap(make_target):
    target = make_target()
    reference = plain(target)
    wrong = [*reference[:5], (reference[5] + 1) % VOCAB]
    audit = audit_output(target, PROMPT, wrong, reference, EXACT)
    assert audit.verdict == "bug" and audit.first_diff == 5
    with torch.inference_mode():
        logits = target.prefill(np.array(PROMPT + reference[:5])).logits[-1]
    assert audit.gap == pytest.approx(float(logits.max() - logits[wrong[5]]), abs=1e-9)


def tied_target() -> Target:
    """Ids 10 and 11 have the same logit everywhere, up to ``1e-10``."""
    model = tiny_model("llama")
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[:] *= 0.01
        head[10] = model.model.norm.weight * 3
        head[11] = head[10] * (1 + 1e-13)
    return Target(model, max_len=64, max_nodes=4)


def test_a_tie_is_a_near_tie_whatever_follows():
    target = tied_target()
    reference = plain(target, 6)
    first = next((i for i, t in enumerate(reference) if t in (10, 11)), None)
    if first is None:  # the tied pair is the minimum here: turn it round
        with torch.no_grad():
            target.model.get_output_embeddings().weight[10:12] *= -1
        reference = plain(target, 6)
        first = next(i for i, t in enumerate(reference) if t in (10, 11))
    other = 21 - reference[first]
    run = [*reference[:first], other]
    prompt = np.array([*PROMPT, *run])
    run += engine(target).decode(prompt, Drafter(name="ar"), max_new_tokens=3).output_ids
    audit = audit_output(target, PROMPT, run, reference, EXACT)
    assert audit.verdict == "near_tie" and audit.first_diff == first
    assert audit.gap is not None and audit.gap <= EXACT


def test_stopping_early_without_an_end_token_is_a_bug(make_target):
    target = make_target()
    reference = plain(target)
    audit = audit_output(target, PROMPT, reference[:-2], reference, EXACT, ended_rightly=False)
    assert audit.verdict == "bug" and audit.first_diff == len(reference) - 2
