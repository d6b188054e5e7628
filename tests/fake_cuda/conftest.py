"""Where there is a GPU, the tests of this folder run on it; elsewhere on a pretended one."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from specbench.kernels import cuda_graphs
from specbench.system import environment
from tests.fake_cuda.pretended import pretended_cuda

REAL = torch.cuda.is_available()


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if REAL and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def gpu():
    """Give the pretended GPUs' state, or None if there is a real GPU, which has its own rules."""
    if REAL:
        yield None
        return
    # No library has to choose kernels there: one run before a capture is enough.
    with mock.patch.object(cuda_graphs, "_WARM_UPS", 1), pretended_cuda() as world:
        yield world
    environment._gpus.cache_clear()  # a run there had cached the pretended GPUs


@pytest.fixture
def pretended(gpu):
    """Skip on a real GPU, which keeps no such counts."""
    if gpu is None:
        pytest.skip("a real GPU does not tell its rules")
    return gpu
