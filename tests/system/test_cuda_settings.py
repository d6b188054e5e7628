"""Torch's settings on CUDA are set before anything is compared, and recorded."""

import pytest
import torch

from specbench.models.target import Target
from specbench.results import records
from specbench.storage import jsonl
from specbench.system import cuda_settings, environment
from tests.conftest import tiny_model
from tests.small_run import run_here


@pytest.fixture
def torch_s_own():
    """As on a machine with a GPU whose image prefers speed to equality."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction",
                 "allow_tf32"):  # fmt: skip
        setattr(torch.backends.cuda.matmul, name, True)
    yield
    cuda_settings.fix()


def in_force(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return cuda_settings.in_force()


WANTED = {
    "cudnn_attention": False,
    "flash_attention": True,
    "efficient_attention": True,
    "allow_bf16_reduced_precision_reduction": False,
    "allow_fp16_reduced_precision_reduction": False,
    "allow_tf32": False,
}


def test_a_target_computes_with_the_settings_of_all(torch_s_own, monkeypatch):
    assert cuda_settings.in_force() == {}  # without a CUDA device
    assert in_force(monkeypatch)["cudnn_attention"]
    Target(tiny_model("llama"), max_len=32)
    assert WANTED.items() <= in_force(monkeypatch).items()


def test_a_run_notes_them_before_its_first_pass(torch_s_own, small, tmp_path, monkeypatch):
    real = cuda_settings.in_force

    def as_on_a_gpu():
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            return real()

    monkeypatch.setattr(cuda_settings, "in_force", as_on_a_gpu)
    assert run_here([*small, "dataset.limit=1", f"output_dir={tmp_path}"]) == 0
    noted = jsonl.read_json(tmp_path / records.MANIFEST)["cuda_settings"]
    assert WANTED.items() <= noted.items()
    assert environment.fingerprint(environment.describe())["cuda_settings"] == noted
