"""In half precision a near tie is what the model's own passes of other row counts differ by."""

import numpy as np
import pytest
import torch

from specbench.decoding.drafter import Drafter
from specbench.decoding.lossless import TOLERANCE, audit_output
from specbench.models.checks.audit_tolerance import AuditTolerance, calibrate, fixed_tolerance
from specbench.models.graph_target import GraphTarget
from specbench.models.target import Target
from tests.conftest import VOCAB, engine, tiny_model

HALVES = [torch.bfloat16, torch.float16]


def test_exact_dtypes_have_fixed_bounds_and_half_precision_has_none():
    for name in ("float32", "float64"):
        assert fixed_tolerance(getattr(torch, name)) == AuditTolerance(TOLERANCE[name])
    assert [fixed_tolerance(dtype) for dtype in HALVES] == [None, None]


def calibrated(dtype, rng):
    model = tiny_model("llama", dtype=dtype)
    targets = [
        GraphTarget(model, capture=False, max_len=120, max_nodes=40),
        Target(model, max_len=120, max_nodes=40),
    ]
    return targets, calibrate(targets, [rng.integers(3, VOCAB, 40) for _ in range(2)])


@pytest.mark.parametrize("dtype", HALVES)
def test_the_bound_is_a_few_roundings_and_is_written_down(dtype, rng):
    (plain, _), tolerance = calibrated(dtype, rng)
    largest = float(plain.prefill(rng.integers(3, VOCAB, 40)).logits.abs().max())
    spacing = torch.finfo(dtype).eps * largest
    assert spacing < tolerance.value < 100 * spacing
    assert tolerance.value >= 4 * tolerance.spread
    assert tolerance.rows == [8, 41]
    assert tolerance.positions == 2 * 2 * (31 + 8)  # prompts, engines, and rows of either pass
    assert 0 <= tolerance.blind < 0.5
    assert AuditTolerance(**tolerance.to_json()) == tolerance
    # A wrong token is a bug still.
    prompt = rng.integers(3, VOCAB, 30)
    answer = engine(plain).decode(prompt, Drafter(name="ar"), max_new_tokens=20).output_ids
    with torch.inference_mode():
        wrong = [int(plain.prefill(prompt).logits[-1].argmin()), *answer[1:]]
    assert audit_output(plain, prompt.tolist(), wrong, answer, tolerance.value).verdict == "bug"


def test_with_passes_that_are_the_same_to_the_last_bit_roundings_remain(rng):
    model = tiny_model("llama", dtype=torch.bfloat16)
    alone = calibrate([Target(model, max_len=80, max_nodes=0)], [rng.integers(3, VOCAB, 9)])
    assert alone.spread == 0 < alone.value


def test_a_spread_that_is_no_number_makes_no_tolerance(rng):
    """Else whatever a broken model says would be a near tie."""
    model = tiny_model("llama", dtype=torch.float16)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(float("inf"))
    tolerance = calibrate([Target(model, max_len=80, max_nodes=8)], [np.arange(3, 20)])
    assert tolerance.value == 0
