"""Bandwidth and weights: what a baseline is held against."""

from __future__ import annotations

import pytest
import torch

from specbench import roofline
from specbench.statistics.roofline import note, share
from tests.conftest import tiny_model


def test_a_lookup_table_is_not_read_once_a_token():
    model = tiny_model("llama")
    size = sum(p.numel() for p in model.parameters()) * 8
    embedding = model.get_input_embeddings().weight
    assert roofline.streamed_bytes(model) == size - embedding.numel() * 8
    model.get_output_embeddings().weight = embedding  # tied: the head reads it after all
    assert roofline.streamed_bytes(model) == sum(p.numel() for p in model.parameters()) * 8


def test_a_copy_counts_reading_and_writing(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setitem(roofline.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: float(next(clock)))
    assert roofline.copy_bandwidth(torch.device("cpu")) == 2 << 20


def test_the_share_and_its_warning():
    model = {"weight_bytes": 5e8, "copy_bytes_per_s": 5e10, "passes": {"engine": "graph"}}
    assert share(model, 80.0) == pytest.approx(0.8)
    assert note(model, 80.0) == (
        "ar (graph engine) reads its weights at 80% of this machine's copy bandwidth (50 GB/s)."
    )
    assert "slowness" in (note(model, 30.0) or "")


@pytest.mark.parametrize("model", [{}, {"weight_bytes": 5e8}, {"copy_bytes_per_s": 1e9}])
def test_what_an_old_manifest_lacks_is_not_made_up(model):
    assert note(model, 80.0) is None
    assert share({"weight_bytes": 1.0, "copy_bytes_per_s": 1.0}, None) is None
