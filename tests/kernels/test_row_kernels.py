"""Triton's kernels against the same functions in float64, and rows of chains against rows alone.

On a GPU they run as they are, elsewhere in Triton's interpreter. Triton comes with CUDA builds of
torch; ``.ci/run`` installs it.
"""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

import specbench.kernels
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DraftTree
from specbench.kernels import fused_pass, static_rows
from specbench.kernels.attention import AttentionPlan, attend
from specbench.kernels.static_rows import StaticRows
from specbench.models.graph_target import GraphTarget
from tests.conftest import CARRIERS, VOCAB, engine, tiny_model

row_kernels = pytest.importorskip("specbench.kernels.row_kernels", exc_type=ImportError)
# Some of them are slow in every test.
ARCHITECTURES = [getattr(name, "values", (name,))[0] for name in CARRIERS]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of the largest number; the interpreter cuts bfloat16 off where a GPU rounds.
BOUNDS = {torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 2e-3}
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch):
    monkeypatch.setattr(static_rows, "INTERPRETED", DEVICE == "cpu")


def in_float64(function, *tensors, **others):
    """The function's result in torch's operations on wide copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_rows, "INTERPRETED", False)
        patch.setattr(static_rows, "TRITON", False)
        wide = [t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in tensors]
        return function(*wide, **others)


def compare(actual, expected, dtype):
    assert actual.dtype == dtype and actual.shape == expected.shape
    difference = (actual.double() - expected).abs().max()
    assert difference <= BOUNDS[dtype] * max(1.0, float(expected.abs().max()))


def randn(*shape, dtype):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("size", [48, pytest.param(2100, marks=SLOW)])
def test_steps_between_products(dtype, size):
    torch.manual_seed(size)
    x, added = randn(2, 2, 3, size, dtype=dtype)
    weight = randn(size, dtype=dtype)
    same = x[0, 0].expand(2, 3, -1)  # EAGLE-3's children of the root read its state
    for first, other in ((x, added), (x, None), (same, added)):
        pair = fused_pass.add_norm(first, other, weight, 1e-5)
        expected = in_float64(fused_pass.add_norm, first, other, weight, 1e-5)
        for result, right in zip(pair, expected, strict=True):
            compare(result, right, dtype)
    wide = randn(2, 2 * 1100, dtype=dtype)  # beyond a block
    compare(fused_pass.gate(wide), in_float64(fused_pass.gate, wide), dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotated"),
    [(4, 2, 24, 16), *(pytest.param(*s, marks=SLOW) for s in [(9, 3, 64, 64), (8, 1, 80, 80)])],
)
@pytest.mark.parametrize("normed", [False, True])
def test_rotations_and_what_they_write(dtype, heads, kv_heads, size, rotated, normed):
    torch.manual_seed(size)
    joined = randn(2, 3, (heads + 2 * kv_heads) * size, dtype=dtype)
    cos, sin = randn(2, 2, 3, rotated, dtype=dtype)
    norms = randn(2, size, dtype=dtype) if normed else None
    first = torch.tensor([5, 90], device=DEVICE)

    def run(joined, cos, sin, norms):
        keys, values = joined.new_zeros(2, 2, kv_heads, 100, size)
        queries = fused_pass.rotate(joined, cos, sin, norms, 1e-6, keys, values, first)
        return queries, keys, values

    for result, right in zip(
        run(joined, cos, sin, norms), in_float64(run, joined, cos, sin, norms), strict=True
    ):
        compare(result, right, dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, *(pytest.param(n, marks=SLOW) for n in (16, 65, 128))])
@pytest.mark.parametrize("biased", [False, True])
def test_products(dtype, rows, biased):
    torch.manual_seed(rows)
    inner = 1100 if rows == 1 else 300  # beyond a tile
    x, weight = randn(rows, inner, dtype=dtype), randn(70, inner, dtype=dtype)
    bias = randn(70, dtype=dtype) if biased else None
    expected = in_float64(linear, x, weight, bias)
    for tile in (row_kernels.TILE, row_kernels.FEW):
        compare(row_kernels.product(x, weight, bias, tile), expected, dtype)
    if rows == 1:
        compare(row_kernels.row_product(x, weight, bias), expected, dtype)


class Attention:
    """Rows of two trees behind texts of different lengths, the second one with a held node."""

    def __init__(self, rows, length, group=1, size=16, kv_heads=2, dtype=torch.float32, cache=640):
        random = np.random.default_rng(rows + length)
        self.lengths, self.rows = [length, length // 2], rows
        batch, slots = 2, rows + 1
        visible = np.zeros((batch, rows, slots), dtype=np.bool_)
        depths = np.zeros((batch, slots), dtype=np.int64)
        for b in range(batch):  # each row sees its own slot, and ancestors
            for r in range(rows):
                above = int(random.integers(-1, r + b))
                if above >= 0:
                    visible[b, r] |= visible[b, above - b] if above >= b else False
                    visible[b, r, above] = True
                    depths[b, r + b] = depths[b, above] + 1
                visible[b, r, r + b] = True
        to = partial(torch.from_numpy)
        self.static = StaticRows(
            torch.tensor(self.lengths, device=DEVICE),
            torch.tensor([length, length // 2 + 1], device=DEVICE),
            to(visible).to(DEVICE),
            torch.stack([to(depths[b, b : b + rows]) for b in range(batch)]).to(DEVICE),
            to(depths).to(DEVICE),
        )
        self.query = randn(batch, kv_heads * group, rows, size, dtype=dtype)
        self.keys, self.values = randn(2, batch, kv_heads, cache, size, dtype=dtype)

    def run(self, query, keys, values, sinks=None, *, window=None, softcap=None):
        plan = AttentionPlan(static=self.static)
        self.static.masks.clear()
        options = {"sliding_window": window, "softcap": softcap, "s_aux": sinks, "plan": plan}
        return attend(None, query, keys, values, None, 0.3, **options)[0]

    def both(self, *sinks, **others):
        tensors = self.query, self.keys, self.values, *sinks
        return self.run(*tensors, **others), in_float64(self.run, *tensors, **others)

    def row_by_row(self, window):
        """What each row gets, one key after the other: the second witness."""
        query, keys, values = (
            t.double().cpu().numpy() for t in (self.query, self.keys, self.values)
        )
        out = np.zeros((2, self.rows, query.shape[1], query.shape[3]))
        group = query.shape[1] // keys.shape[1]
        static = self.static
        for b, r, h in np.ndindex(out.shape[:3]):
            seen = [(j, j - self.lengths[b]) for j in range(self.lengths[b])]
            for slot in np.flatnonzero(static.visible[b, r].cpu().numpy()):
                seen.append((self.lengths[b] + slot, int(static.key_depths[b, slot])))
            depth = int(static.row_depths[b, r])
            seen = [j for j, key_depth in seen if window is None or depth - key_depth < window]
            scores = 0.3 * keys[b, h // group, seen] @ query[b, h, r]
            weights = np.exp(scores - scores.max())
            out[b, r, h] = weights @ values[b, h // group, seen] / weights.sum()
        return torch.from_numpy(out)


GRID = [(1, 1, 1, 16), (3, 70, 2, 24)]
MORE = [(r, n, g, s) for r in (1, 7, 16, 33, 128) for n in (2, 127, 128, 129, 600)
        for g, s in ((1, 80), (4, 64), (8, 128))]  # fmt: skip


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("rows", "length", "group", "size"), [*GRID, *(pytest.param(*p, marks=SLOW) for p in MORE)]
)
def test_attention_over_text_and_tree(dtype, rows, length, group, size):
    torch.manual_seed(rows)
    case = Attention(rows, length, group, size, dtype=dtype, cache=640)
    for window in (None, 20):
        actual, expected = case.both(window=window)
        compare(actual, expected, dtype)
        if rows < 8:
            torch.testing.assert_close(expected.cpu(), case.row_by_row(window), atol=1e-12, rtol=0)
    sinks = randn(case.query.shape[1], dtype=dtype)
    compare(*case.both(sinks, softcap=2.0), dtype)


# -- rows of a chain are rows alone ----------------------------------------------------------------


def exact_target(architecture="llama", max_len=700, dtype=torch.bfloat16):
    model = tiny_model(architecture, dtype=dtype, seed=3).to(DEVICE)
    for parameter in model.parameters():
        parameter.data *= 2  # scores that differ, as a trained model's
    return GraphTarget(model, fused=True, exact=True, capture=False, max_len=max_len, max_nodes=16)


def rows_that_differ(target, length, chain) -> int:
    """Compare a chain's rows behind a text with passes of one row; count those that differ."""
    text = np.arange(length) * 7 % VOCAB
    target.prefill(text)
    logits = target.forward(5, DraftTree.chain(chain)).logits.clone()
    for row, token in enumerate([5, *chain]):
        alone = target.forward(int(token), DraftTree.empty())
        differs = not torch.equal(alone.logits[0], logits[row])
        if differs:
            return len(chain) + 1 - row
        target.commit(DraftTree.empty(), np.array([], dtype=np.int64))
    return 0


@pytest.mark.parametrize(
    ("architecture", "length", "rows"),
    [
        ("llama", 126, 4),
        *(pytest.param(a, n, 16, marks=SLOW) for a in ARCHITECTURES for n in (1, 120, 250, 600)),
    ],
)
def test_rows_of_a_chain_are_bit_for_bit_rows_alone(architecture, length, rows):
    chain = np.random.default_rng(length).integers(3, VOCAB, rows - 1)
    assert rows_that_differ(exact_target(architecture), length, chain) == 0


def test_rows_are_compared_at_load(monkeypatch, tmp_path):
    target = exact_target(max_len=100, dtype=torch.float32)
    monkeypatch.setattr(type(target), "max_nodes", 2)
    monkeypatch.setattr(target.cache, "max_len", 60)
    target.compare_rows()
    equal = "{} of 4 rows of chains equal rows alone, bit for bit (float32)"
    assert target.describe()["exact"] == equal.format(4)
    plant("one row's products are rounded", monkeypatch, tmp_path)
    target.compare_rows()
    assert target.describe()["exact"] in {equal.format(n) for n in range(4)}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a pass takes the interpreter a fifth of a second
@pytest.mark.parametrize("architecture", ["llama", "mistral_window"])
def test_speculative_outputs_in_bfloat16_equal_plain_ones(architecture):
    """Without an audit, of 100 prompts each; drafts are chains that are partly right."""
    target, random = exact_target(architecture, max_len=128), np.random.default_rng(0)
    plain = engine(target)
    n_accepted = 0
    for _ in range(100):
        prompt = random.integers(3, VOCAB, int(random.integers(1, 40)))
        right = plain.decode(prompt, Drafter(name="plain"), max_new_tokens=8).output_ids
        drafter = Drafter(name="guesses")

        def propose(state, right=right):
            done = state.length - state.n_prompt
            chain = np.array(right[done : done + 6])
            chain[int(random.integers(0, 7)) :] = 4
            return DraftTree.chain(chain[: state.remaining - 1])

        drafter.propose = propose
        result = plain.decode(prompt, drafter, max_new_tokens=8)
        assert result.output_ids == right
        n_accepted += len(right) - result.n_target_passes
    assert n_accepted > 200


# -- planted faults --------------------------------------------------------------------------------


def wrong_attention() -> bool:
    case = Attention(5, 600, 2, kv_heads=1, cache=4200)  # splits of two tiles
    try:
        compare(*case.both(window=20), torch.float32)
        compare(*case.both(), torch.float32)
    except AssertionError:
        return True
    return False


def wrong_rows() -> bool:
    target = exact_target(max_len=300, dtype=torch.float32)  # splits of one tile
    return rows_that_differ(target, 150, np.arange(3, 5)) > 0


SUM = 'total = tl.dot(a, b, total, input_precision="ieee")'
ROUNDED = "total = tl.where(rows > 1, total, total.to(tl.bfloat16).to(tl.float32))"
FAULTS = {
    "a mask off by one": ("(column < 0))[None, :]", "(column < -1))[None, :]", wrong_attention),
    "a length read early": ("tl.load(lengths + batch)", "tl.load(lengths + batch) - 1",
                            wrong_attention),
    "another sequence's length": ("tl.load(lengths + batch)", "tl.load(lengths)", wrong_attention),
    "a window off by one": ("position[None, :] < WINDOW", "position[None, :] <= WINDOW",
                            wrong_attention),
    "a missing rescale": ("result * shrink[:, None] +", "result +", wrong_attention),
    "a split's weight is lost": ("part * weight[:, None]", "part", wrong_attention),
    "a split's border depends on rows": (
        "split_size = split_rows(cache_rows)",
        "split_size = split_rows(cache_rows) + KEY_TILE * (rows > 1)", wrong_rows),
    "one row's products are rounded": (SUM, f"{SUM}\n{' ' * 8}{ROUNDED}", wrong_rows),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch, tmp_path):
    plant(fault, monkeypatch, tmp_path)
    assert FAULTS[fault][2]()


def plant(fault, monkeypatch, tmp_path):
    before, after, _ = FAULTS[fault]
    source = Path(row_kernels.__file__).read_text()
    assert source.count(before) >= 1
    file = tmp_path / "row_kernels.py"
    file.write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location("specbench.kernels.row_kernels", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "specbench.kernels.row_kernels", module)
    monkeypatch.setattr(specbench.kernels, "row_kernels", module)


def test_nothing_is_found_without_a_fault():
    assert not wrong_attention()
    assert not wrong_rows()
