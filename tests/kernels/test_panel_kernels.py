"""Products from panels: exact to rounding, the same to the last bit for any number of rows."""

import ctypes
import json
import os
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest
import torch

from specbench.kernels import panel_kernels, prefetch

pytestmark = pytest.mark.skipif(
    not panel_kernels.available(), reason="torch has another OpenMP library"
)
WIDTH = panel_kernels.WIDTH


@pytest.fixture
def distances():
    """Gives back what products of this process ask for."""
    before = {form: panel_kernels.distances(form) for form in panel_kernels.FORMS}
    yield
    for form, by_rows in before.items():
        for rows, distance in by_rows.items():
            panel_kernels.set_distance(form, rows, distance)


def _in_all_forms(out_features, in_features):
    """The same weights in each form, as they are before they are packed."""
    weight = torch.randn(out_features, in_features)
    blocks = [
        torch.from_numpy(gguf.quants.quantize(weight.numpy(), kind).copy()).unflatten(
            1, (in_features // panel_kernels.QUANTS, -1)
        )
        for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1)
    ]
    return [weight, *blocks]


def _ask_at(distance):
    for form in panel_kernels.FORMS:
        for rows in range(1, panel_kernels.TILE + 1):
            panel_kernels.set_distance(form, rows, distance)


def test_how_far_ahead_memory_is_asked_for_changes_no_bit(distances):
    torch.manual_seed(0)
    for weight in _in_all_forms(3 * WIDTH + 5, 192):
        panels = panel_kernels.pack(weight)
        for rows in (*range(1, panel_kernels.TILE + 2), 65):
            x = torch.randn(rows, 192)
            outs = []
            for distance in (*panel_kernels.DISTANCES, 64, 1 << 20):
                _ask_at(distance)
                outs.append(panel_kernels.panel_gemm(x, panels, 3 * WIDTH + 5))
            assert all(torch.equal(out, outs[0]) for out in outs)


class _Clock:
    """Products that take as long as a table says for their rows and distance, in seconds."""

    def __init__(self, seconds):
        self.seconds, self.now, self.reads = seconds, 0.0, 0

    def perf_counter(self):
        return self.now

    def product(self, x, panels, _out_features):
        self.reads += 1
        distance = panel_kernels.distances(panel_kernels.form_of(panels))[len(x)]
        self.now += self.seconds(len(x), distance, self.reads)


@pytest.fixture
def choose(distances, monkeypatch):
    """`prefetch.choose_distances` over a small model on a machine that ``seconds`` tells of."""

    def chosen(seconds, held):
        clock = _Clock(seconds)
        monkeypatch.setattr(prefetch, "time", clock)
        monkeypatch.setattr(panel_kernels, "panel_gemm", clock.product)
        return prefetch.choose_distances(held)

    monkeypatch.setattr(prefetch, "_measured", set())
    monkeypatch.setattr(prefetch, "MEASURE_BYTES", 1 << 14)
    monkeypatch.setattr(prefetch, "_STRIDE_BYTES", 1)  # one product a timing
    _ask_at(4096)
    return chosen


def test_each_number_of_rows_has_the_distance_that_is_fastest_for_it(choose):
    best = {1: 0, 2: 1024, 4: 4096, 8: 1024}
    held = [panel_kernels.pack(torch.randn(4 * WIDTH, 64)) for _ in range(3)]
    actual = choose(lambda rows, distance, _: 1.0 if distance == best[rows] else 1.1, held)
    expected = {1: 0, 2: 1024, 3: 4096, 4: 4096, 5: 1024, 6: 1024, 7: 1024, 8: 1024}
    assert actual == {"float32": {r: d for r, d in expected.items() if r <= panel_kernels.TILE}}
    assert actual["float32"] == panel_kernels.distances(panel_kernels.FLOAT32)


@pytest.mark.parametrize(
    "seconds",
    [
        lambda rows, distance, read: 1.0 if distance == 4096 else 0.99,  # too little
        lambda rows, distance, read: (0.9 if distance == 0 else 1.0) + (read * 7919 % 13) / 5,
    ],
    ids=["within what counts", "on a machine that is busy now and then"],
)
def test_a_distance_stays_unless_another_is_clearly_faster(choose, seconds):
    actual = choose(seconds, [panel_kernels.pack(torch.randn(4 * WIDTH, 64))])
    assert set(actual["float32"].values()) == {4096}


def test_small_weights_and_the_models_behind_the_first_change_no_distance(choose):
    def quickest(distance):
        return lambda rows, tried, _: 1.0 if tried == distance else 2.0

    assert set(choose(quickest(0), [panel_kernels.pack(torch.ones(8, 8))])["float32"].values()) == {
        4096
    }
    held = [panel_kernels.pack(weight) for weight in _in_all_forms(8 * WIDTH, 64)[:2]]
    for distance in (0, 1024):  # that of the first model stays
        actual = choose(quickest(distance), held)
        assert [set(by.values()) for by in actual.values()] == [{0}, {0}]


def test_a_later_start_keeps_the_distances_that_the_first_one_chose(choose):
    held, threads = [panel_kernels.pack(torch.randn(4 * WIDTH, 64))], torch.get_num_threads()
    first = choose(lambda rows, distance, _: 1.0 if distance == 0 else 2.0, held)
    chosen = json.loads(json.dumps(first))  # as a manifest gives it back
    prefetch._measured.clear()  # as another process begins
    _ask_at(4096)
    prefetch.keep_distances(chosen | {"of another build": {"1": 0}}, threads)

    def other_way(rows, distance, _):
        return 1.0 if distance == 1024 else 2.0

    assert choose(other_way, held) == first
    prefetch._measured.clear()
    prefetch.keep_distances(chosen, threads + 1)
    assert set(choose(other_way, held)["float32"].values()) == {1024}


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("out_features", [1, WIDTH, 3 * WIDTH, 4 * WIDTH + 5])
@pytest.mark.parametrize("in_features", [1, 128, 300])
def test_rows_are_exact_and_independent_of_each_other(threads, out_features, in_features):
    torch.manual_seed(0)
    weight = torch.randn(out_features, in_features)
    panels = panel_kernels.pack(weight)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (*range(1, 10), 64, 65, 131):
            x = torch.randn(rows, in_features)
            out = panel_kernels.panel_gemm(x, panels, out_features)
            expected = (x.double() @ weight.double().t()).float()
            torch.testing.assert_close(out, expected, atol=3e-5, rtol=1e-5)
            alone = panel_kernels.panel_gemm(x[-1:], panels, out_features)
            assert torch.equal(out[-1:], alone)
    finally:
        torch.set_num_threads(before)


def test_two_threads_may_multiply_at_once():
    """A draft model's passes run beside the target's."""
    weight, x = torch.randn(256, 256), torch.randn(2, 256)
    panels = panel_kernels.pack(weight)
    expected = panel_kernels.panel_gemm(x, panels, 256)
    with ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(lambda _: panel_kernels.panel_gemm(x, panels, 256), range(100)))
    assert all(torch.equal(out, expected) for out in outs)


def test_packs_share_large_mappings():
    first, second = (panel_kernels.pack(torch.ones(WIDTH, 16)) for _ in range(2))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    large = panel_kernels.pack(torch.ones(WIDTH, panel_kernels._ARENA // 4 // WIDTH + 1))
    assert large.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert (first == 1).all() and (second == 1).all() and (large == 1).all()


def test_memory_begun_in_inference_mode_may_be_filled_outside_of_it(monkeypatch):
    monkeypatch.setattr(panel_kernels._arenas, "left", None, raising=False)
    with torch.inference_mode():
        panel_kernels.pack(torch.ones(16, 8))
    weight = torch.rand(16, 8)
    actual = panel_kernels.panel_gemm(torch.eye(8), panel_kernels.pack(weight), 16)
    torch.testing.assert_close(actual, weight.t().contiguous())


def test_without_the_library_the_kernel_is_not_offered(monkeypatch):
    cached = (panel_kernels.compiled, panel_kernels.available)
    for function in cached:
        function.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())  # has no GOMP_parallel
    assert not panel_kernels.available()
    for function in cached:
        function.cache_clear()


def test_inputs_that_the_compiled_code_would_misread_are_refused():
    panels = panel_kernels.pack(torch.randn(8, 16))
    for x in (torch.randn(2, 16, dtype=torch.float64), torch.randn(2, 15)):
        with pytest.raises(TypeError, match="16 float32 inputs"):
            panel_kernels.panel_gemm(x, panels, 8)


def test_outputs_are_float32_whatever_the_default_is():
    weight, x = torch.randn(8, 16), torch.randn(16, 2).t()  # not contiguous, either
    panels = panel_kernels.pack(weight)
    torch.set_default_dtype(torch.float64)
    try:
        actual = panel_kernels.panel_gemm(x, panels, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert actual.dtype == torch.float32
    assert torch.allclose(actual, x @ weight.t(), atol=1e-5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_its_own_memory():
    panel_kernels.pack(torch.zeros(8, 16))  # there is a mapping with room left
    child = os.fork()
    if not child:
        panel_kernels._memory(64).fill_(2.0)
        os._exit(0)
    ours = panel_kernels._memory(64).fill_(3.0)
    os.waitpid(child, 0)
    assert (ours == 3.0).all()


@pytest.mark.parametrize("rows", [1, 5, 8, 13, 65])
@pytest.mark.parametrize("out_features", [WIDTH, 2 * WIDTH + 5])
def test_shorter_forms_give_the_same_sums_to_the_last_bit(rows, out_features):
    torch.manual_seed(0)
    weight, x = torch.randn(out_features, 192), torch.randn(rows, 192)
    held = []
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1):
        file = gguf.quants.quantize(weight.numpy(), kind)
        values = torch.from_numpy(gguf.quants.dequantize(file, kind).copy())
        held.append((torch.from_numpy(file.copy()).unflatten(1, (6, -1)), values))
    for short, values in held:
        packed = panel_kernels.pack(short)
        assert packed.nbytes < 0.6 * panel_kernels.pack(values).nbytes
        actual = panel_kernels.panel_gemm(x, packed, out_features)
        expected = panel_kernels.panel_gemm(x, panel_kernels.pack(values), out_features)
        assert torch.equal(actual, expected)
