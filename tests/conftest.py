"""Shared fixtures: tiny random targets in float64, small enough for thousands of passes."""

import gc
import os
import pickle

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU Triton's kernels are interpreted; it reads this when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig

from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftTree, Needs
from specbench.decoding.verify import GreedyVerifier, Verifier
from specbench.models.draft.model import DraftModel
from specbench.models.target import Target
from specbench.paths import CONF_DIR
from tests.small_run import (  # noqa: F401 (fixtures)
    checkpoint,
    environment,
    questions,
    signals_arrive,
    small,
)
from tests.tiny_checkpoint import TINY

# Examples of a property test that names no number, always the same ones in "quick"; `make test-all`
# selects "full". A test whose examples decode on a model names its own number.
for _profile, _examples in (("quick", 20), ("full", 250)):
    settings.register_profile(
        _profile,
        max_examples=_examples,
        deadline=None,  # the first example may compile
        derandomize=_profile == "quick",
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def quick_first(values, quick, *, unpack=False):
    """Mark the values that are not in ``quick`` as slow; ``unpack`` those of several arguments."""
    quick = [*quick]
    return [
        v if v in quick else pytest.param(*(v if unpack else [v]), marks=pytest.mark.slow)
        for v in values
    ]


VOCAB = 48
ARCHITECTURES = ("llama", "mistral", "mistral_window", "qwen2", "qwen3", "phi3")
# For properties independent of the architecture: two always, the others with the slow tests.
CARRIERS = quick_first(ARCHITECTURES, ("llama", "mistral_window"))


_SPECIFIC = {
    "mistral": {"sliding_window": None},
    "mistral_window": {"sliding_window": 12},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 8},
    "phi3": {"sliding_window": 20, "pad_token_id": 0},
}


def tiny_model(
    architecture: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    vocab_size: int = VOCAB,
) -> PreTrainedModel:
    """A random two-layer model of ``architecture`` with grouped-query attention."""
    torch.manual_seed(seed)
    numbers = dict(
        vocab_size=vocab_size,
        **TINY,
        max_position_embeddings=512,
        initializer_range=0.4,  # spread logits: no accidental ties, little repetition
        bos_token_id=1,
        eos_token_id=2,
    )
    numbers |= _SPECIFIC.get(architecture, {})
    config = AutoConfig.for_model(architecture.removesuffix("_window"), **numbers)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def tiny_draft(
    needs: Needs,
    architecture: str = "llama",
    *,
    seed: int = 1,
    vocab_size: int = VOCAB,
    target_vocab: int | None = None,
    max_len: int = 512,
    engine: Callable[..., Target] = Target,
    **options: Any,
) -> DraftModel:
    """A random draft model with room for what a method holds; other weights than a target's."""
    max_nodes = needs.draft_nodes or needs.max_nodes
    model = tiny_model(architecture, seed=seed, vocab_size=vocab_size)
    return DraftModel(
        engine(model, max_len=max_len + max_nodes, max_nodes=max_nodes),
        target_vocab=target_vocab or vocab_size,
        max_nodes=max_nodes,
        **options,
    )


def engine(
    target: Any,
    verifier: Verifier | None = None,
    *,
    eos: frozenset[int] = frozenset(),
    **options: Any,
) -> Engine:
    """Make an engine, by default greedy and without an end token."""
    return Engine(target, verifier or GreedyVerifier(), eos_ids=eos, **options)


def side_by_side(tokens: np.ndarray, width: int) -> DraftTree:
    """Build chains of ``width`` tokens each, as the batch layout runs them."""
    parents = np.arange(-1, len(tokens) - 1)
    parents[::width] = -1
    return DraftTree(tokens, parents, rows=(len(tokens) // width, width))


def pytest_collection_finish() -> None:
    """Freeze imported and collected objects, so that the garbage collector skips them."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Cache Hydra's reading of two dozen files for each of a thousand compositions.

    Only the choices of config groups decide which files; other values are inserted later.
    """
    try:
        from hydra._internal import config_loader_impl as hydra_loader
        from hydra._internal.config_repository import ConfigRepository
        from hydra._internal.defaults_list import DefaultsList, Overrides
    except ImportError:  # where a GPU is checked
        return
    cache: dict[object, bytes] = {}

    def once(key, repository, make):
        """Cache ``make()``, with a copy for each caller; a test may change files of its own."""
        sources = [source.path for source in repository.get_sources()]
        if str(CONF_DIR) not in sources:
            return make()
        key = (str(sources), key)
        if key not in cache:
            cache[key] = pickle.dumps(make())
        return pickle.loads(cache[key])

    loader = hydra_loader.ConfigLoaderImpl
    load, join = ConfigRepository.load_config, loader._compose_config_from_defaults_list
    choose = hydra_loader.create_defaults_list

    def load_config(self, config_path):
        return once(config_path, self, lambda: load(self, config_path))

    def joined(self, defaults, repo):
        return once(repr(defaults), repo, lambda: join(self, defaults, repo))

    def create(repo, config_name, overrides_list, **options):
        values = Overrides(repo, overrides_list).config_overrides
        groups = [override for override in overrides_list if override not in values]
        key = (config_name, str([override.input_line for override in groups]), str(options))
        chosen = once(key, repo, lambda: choose(repo, config_name, groups, **options))
        return DefaultsList(chosen.defaults, chosen.defaults_tree, values, chosen.overrides)

    ConfigRepository.load_config = load_config
    loader._compose_config_from_defaults_list = joined
    hydra_loader.create_defaults_list = create


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Target]:
    """Targets by architecture, cached for the session; extra arguments make a fresh one."""
    cache: dict[str, Target] = {}

    def make(architecture: str = "llama", **kwargs: int) -> Target:
        if kwargs:
            return Target(tiny_model(architecture), **({"max_len": 256, "max_nodes": 40} | kwargs))
        if architecture not in cache:
            cache[architecture] = Target(tiny_model(architecture), max_len=256, max_nodes=40)
        return cache[architecture]

    return make


@pytest.fixture
def rng() -> np.random.Generator:
    """A seeded generator."""
    return np.random.default_rng(0)
