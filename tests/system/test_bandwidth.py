"""Bandwidth and weights: what a baseline is held against."""

import pytest
import torch

from specbench.kernels import panel_kernels
from specbench.kernels.compiled_pass import packed_memory, prepare
from specbench.results.conditions import roofline_warnings
from specbench.results.manifest import RunManifest
from specbench.results.statistics.roofline import BaselineContext, baseline_context
from specbench.system import bandwidth
from tests.conftest import tiny_model
from tests.system.test_clock import FakeDevice


def test_a_lookup_table_is_not_read_once_a_token():
    model = tiny_model("llama")
    size = sum(p.numel() for p in model.parameters()) * 8
    embedding = model.get_input_embeddings().weight
    assert bandwidth.streamed_bytes(model) == size - embedding.numel() * 8
    model.get_output_embeddings().weight = embedding  # tied: the head reads it after all
    assert bandwidth.streamed_bytes(model) == sum(p.numel() for p in model.parameters()) * 8


def test_a_read_on_a_gpu_is_timed_by_the_device_over_many_in_a_row():
    """Reads take the device 1 s, 3 s in the first round."""
    device, reads = FakeDevice(), []

    def read():
        reads.append(device.waits)
        device.work(1.0 if device.waits else 3.0)

    assert bandwidth._by_events(read, device) == 1.0
    assert device.waits >= 3 and len(reads) >= 10 * device.waits


def test_the_fastest_read_of_a_run_counts_whatever_came_between(monkeypatch):
    """A megabyte each: 2 s, then 0.5 s between two cases, then 4 s; later starts only add to it."""
    now, takes = [0.0], iter([2.0] * 8 + [0.5, 4.0] + [4.0] * 8)

    def wait():
        now[0] += next(takes)

    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bandwidth, "_host_read", lambda size, _: (wait, size))
    fastest = bandwidth.FastestRead(torch.device("cpu"), weight_bytes=5)
    fastest.measure()
    assert fastest.bytes_per_s == (1 << 20) / 2
    fastest.measure_between()
    fastest.measure()
    assert fastest.bytes_per_s == (1 << 20) / 0.5
    assert next(takes, None) is None
    earlier = bandwidth.FastestRead(torch.device("cpu"), 5, bytes_per_s=3e9)
    assert earlier.bytes_per_s == 3e9


@pytest.mark.parametrize("size", [1 << 20, bandwidth.MEASURE_BYTES])
def test_a_read_touches_as_many_bytes_as_it_counts(size):
    """Each output sums 4096 ones of 4 bytes."""
    read, counted = bandwidth._host_read(size)
    sums = read()
    assert counted == size
    assert (sums == 4096).all()
    assert 4 * 4096 * sums.numel() == size


def test_packed_weights_are_read_where_they_lie(monkeypatch):
    """No buffer of their size; where too little is packed, one is made."""
    if not panel_kernels.available():
        pytest.skip("this build of torch has no panels")
    monkeypatch.setattr(bandwidth, "MEASURE_BYTES", 1)
    monkeypatch.setattr(bandwidth, "_COLUMNS", 16)
    model = tiny_model("llama", dtype=torch.float32)
    _, unpacked = bandwidth._host_read(1 << 16, model)
    assert unpacked == 1 << 16
    prepare(model, 1 << 20)
    size = sum(memory.nbytes for memory in packed_memory(model))
    read, counted = bandwidth._host_read(size, model)
    assert 0.8 * size <= counted <= size
    assert all(out.shape == (1, 1) for out in read())
    assert bandwidth._host_read(2 * size, model)[1] == 2 * size


def test_a_gpu_is_read_by_the_fastest_of_its_kernels_and_not_between_cases(monkeypatch):
    seconds = iter([1.0, 0.25])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 24, 0))
    monkeypatch.setattr(bandwidth, "TorchEvents", lambda _: None)
    monkeypatch.setattr(bandwidth, "_by_events", lambda *_: next(seconds))
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device=None: ones(*shape))
    fastest = bandwidth.FastestRead(torch.device("cuda"), 1 << 30)
    fastest.measure_between()
    fastest.measure()
    assert fastest.bytes_per_s == (1 << 22) / 0.25


def manifest_of(values):
    return RunManifest.from_json({"schema_version": 2, **values})


GRAPHS = {"engine": "graph", "graphs": ["1 x 1 rows, 256 keys", "1 x 8 rows, 256 keys"]}
NO_GRAPH = {
    "engine": "graph",
    "graphs": ["1 x 8 rows, 256 keys"],
    "eager": {"200 rows": "more", "1 x 1 rows, 256 keys": "operation not permitted"},
}


def warned(values, share=None, highest=None):
    """Codes of the warnings about a baseline that takes such shares of the memory's speed."""
    rows = [{"label": "ar", "task": "overall", "bandwidth_share": share}]
    rows.append({"label": "ar", "task": "qa", "bandwidth_share": highest})
    return [w.code for w in roofline_warnings(manifest_of({"baseline": "ar", **values}), rows)]


def test_the_baselines_share_and_its_warning():
    model = {"weight_bytes": 500_000_000, "read_bytes_per_s": 5e10, "passes": GRAPHS}
    assert warned({"model": model}, 0.8) == []
    context = baseline_context(manifest_of({"model": model | {"passes": None}}))
    assert context == BaselineContext({}, 0.01)  # the time to read the weights
    assert context.share(80.0) == pytest.approx(0.8) and context.share(None) is None
    for old in ({}, {"weight_bytes": 500_000_000}, {"read_bytes_per_s": 1e9}, None):
        assert warned({"model": old}) == []  # nothing is made up
        assert baseline_context(manifest_of({"model": old})).share(80.0) is None
    assert warned({"model": model}, 0.3) == ["SLOW_BASELINE"]
    large = model | {"weight_bytes": 2_000_000_000, "device": "cuda:0"}
    assert warned({"model": large}, 0.6) == ["NO_HEADLINE"] and warned({"model": large}, 0.7) == []
    assert warned({"model": large | {"device": "cpu"}}, 0.6) == []
    # Unpacking blocks takes longer than to read them, and no other pass over them would be faster.
    assert warned({"model": model | {"weights": "stored"}}, 0.3) == ["MEMORY"]


@pytest.mark.parametrize("cache", [None, 499_999_999, 500_000_000])
def test_no_share_of_the_memorys_speed_where_a_cache_holds_the_weights(cache):
    model = {"weight_bytes": 500_000_000, "read_bytes_per_s": 5e10, "device": "cpu"}
    here = {"model": model, "hardware": {"cache_bytes": cache}}
    elsewhere = {"surface": {"model": model, "machine": {"hardware": {"cache_bytes": cache}}}}
    expected = None if cache == 500_000_000 else pytest.approx(0.8)
    for manifest in (here, elsewhere):
        assert baseline_context(manifest_of(manifest)).share(80.0) == expected
    on_gpu = here | {"model": model | {"device": "cuda:0"}}
    assert baseline_context(manifest_of(on_gpu)).share(80.0) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("prices", "codes"),
    [
        ({"2": [0.87, 0.85, 0.9], "4": [0.98, 0.9, 1.02]}, ["SLOW_ROW"]),
        ({"2": [0.98, 0.9, 1.02]}, []),
        ({"2": [0.99, 0.98, 0.996]}, []),  # what is shown as 1
        ({"2": [0.87], "4": [1.17, 0.98, 1.2]}, []),  # few rounds have no spread
    ],
)
def test_a_price_below_one_beyond_its_spread_is_a_slow_baseline(prices, codes):
    times = {"context": 256, "seconds": {"1": 0.030, "2": 0.033, "4": 0.036}, "prices": prices}
    model = {"model": {"row_times": times}}
    assert [w.code for w in roofline_warnings(manifest_of(model), [])] == codes
    # A batch's price is not of its passes.
    batched = manifest_of({**model, "config": {"batch": {"size": 4}}})
    assert [*roofline_warnings(batched, [])] == []


def test_plain_decoding_that_is_faster_than_any_read_is_itself_the_fastest():
    model = {"weight_bytes": 500_000_000, "read_bytes_per_s": 5e10}
    context = baseline_context(manifest_of({"model": model}))
    assert context.with_passes(90.0) == context
    for tokens_per_s in (100.0, 118.0, 3.1e7):
        by_passes = context.with_passes(tokens_per_s)
        assert by_passes.share(tokens_per_s) == pytest.approx(1.0, abs=1e-12)
        assert by_passes.share(tokens_per_s) <= 1
        assert by_passes.share(tokens_per_s / 2) == pytest.approx(0.5)
    assert warned({"model": model}, 0.9, 1.0) == ["BANDWIDTH"]
    assert warned({"model": model}, 0.9, 0.99) == []


def test_a_graph_engine_without_a_graph_of_plain_decoding_is_warned_of():
    longer = GRAPHS | {"eager": {"1 x 1 rows, 512 keys": "out of memory"}}
    for passes in (NO_GRAPH, {"engine": "graph", "graphs": []}, longer):
        assert warned({"model": {"passes": passes}}) == ["BASELINE_LAUNCHED"]


TWO = {"ar": {"method": "ar"}, "ar_eager": {"method": "ar", "knobs": {"eager": True}}, "pld": {}}
ONE = {"ar": {"method": "ar", "knobs": {"eager": False}}, "pld": {"method": "pld"}}


@pytest.mark.parametrize(
    ("manifest", "plain"),
    [
        ({"labels": ONE, "model": {"passes": {"engine": "eager"}}}, {"eager": "ar"}),
        ({"labels": ONE, "model": {"passes": {"engine": "graph"}}}, {"graph": "ar"}),
        ({"labels": TWO, "model": {"passes": GRAPHS}}, {"graph": "ar", "eager": "ar_eager"}),
        ({"labels": TWO, "model": {"passes": NO_GRAPH}}, {"eager": "ar"}),
        ({"labels": ONE, "model": {"passes": {"engine": "graph", "graphs": []}}}, {"eager": "ar"}),
        # Where graphs were not to be had, the baseline is an eager one too.
        ({"labels": TWO, "model": {"passes": {"engine": "eager"}}}, {"eager": "ar"}),
        ({"labels": ONE, "model": None}, {}),
        ({"labels": ONE, "surface": {"model": {"passes": {"engine": "graph"}}}}, {"graph": "ar"}),
        ({}, {}),
    ],
    ids=str,
)
def test_which_plain_decodings_a_run_has(manifest, plain):
    context = baseline_context(manifest_of({"baseline": "ar", **manifest}))
    assert context.plain == plain
    assert context.floor_s is None
    assert context.share(10.0) is None
