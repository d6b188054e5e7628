"""Products from panels: exact to rounding, the same to the last bit for any number of rows."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest
import torch

from specbench.kernels import autotune, panel_kernels

pytestmark = pytest.mark.skipif(
    "panels" not in autotune.available_kernels(), reason="torch has another OpenMP library"
)
WIDTH = panel_kernels.WIDTH


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
            wanted = (x.double() @ weight.double().t()).float()
            torch.testing.assert_close(out, wanted, atol=3e-5, rtol=1e-5)
            alone = panel_kernels.panel_gemm(x[-1:], panels, out_features)
            assert torch.equal(out[-1:], alone)
    finally:
        torch.set_num_threads(before)


def test_two_threads_may_multiply_at_once():
    """A draft model's passes run beside the target's."""
    weight, x = torch.randn(256, 256), torch.randn(2, 256)
    panels = panel_kernels.pack(weight)
    wanted = panel_kernels.panel_gemm(x, panels, 256)
    with ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(lambda _: panel_kernels.panel_gemm(x, panels, 256), range(100)))
    assert all(torch.equal(out, wanted) for out in outs)


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
    found = panel_kernels.panel_gemm(torch.eye(8), panel_kernels.pack(weight), 16)
    torch.testing.assert_close(found, weight.t().contiguous())


def test_without_the_library_the_kernel_is_not_offered(monkeypatch):
    panel_kernels.compiled.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())  # has no GOMP_parallel
    assert "panels" not in autotune.available_kernels()
    panel_kernels.compiled.cache_clear()


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
        found = panel_kernels.panel_gemm(x, panels, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.allclose(found, x @ weight.t(), atol=1e-5)


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
    halves = weight.bfloat16()
    held = [(halves, halves.float())]
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1):
        file = gguf.quants.quantize(weight.numpy(), kind)
        values = torch.from_numpy(gguf.quants.dequantize(file, kind).copy())
        held.append((torch.from_numpy(file.copy()).unflatten(1, (6, -1)), values))
    for short, values in held:
        packed = panel_kernels.pack(short)
        assert packed.nbytes < 0.6 * panel_kernels.pack(values).nbytes
        found = panel_kernels.panel_gemm(x, packed, out_features)
        wanted = panel_kernels.panel_gemm(x, panel_kernels.pack(values), out_features)
        assert torch.equal(found, wanted)
