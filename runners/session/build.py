"""From configuration to the engine's parts: target and verifier."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from runners.session.method_runs import MethodRun
from specbench.config.schema import (
    VERIFIERS,
    RunConfig,
    VerifierConfig,
    packed_bytes,
    verifier_name,
)
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import (
    GreedyVerifier,
    MatchVerifier,
    RejectionVerifier,
    TypicalVerifier,
    Verifier,
)
from specbench.errors import unknown_name
from specbench.models.graph_target import GraphTarget, no_graphs
from specbench.models.target import Target

log = logging.getLogger(__name__)

ENGINES = ("auto", "eager", "graph")


def make_target(
    model: PreTrainedModel,
    config: RunConfig,
    *,
    max_len: int,
    max_nodes: int,
    batch: int = 1,
    drafts: bool = False,
    layouts: Sequence[tuple[int, int]] = (),
    hidden_layers: Sequence[tuple[int, ...]] = (),
) -> Target:
    """The target of the ``engine`` group, or the eager one where the machine has no other.

    With ``drafts`` it is a draft model's (``DraftModel``). ``layouts`` are the batch layouts, and
    ``hidden_layers`` the sets of hidden states, that ``GraphTarget`` captures beforehand.

    ``engine=graph`` needs a model on one CUDA device; elsewhere passes run eagerly, and
    ``Target.describe`` says why. ``auto`` is ``graph`` on CUDA.
    """
    if config.engine.name not in ENGINES:
        raise unknown_name("engine", config.engine.name, ENGINES)
    reason, name = None, config.engine.name
    if name == "graph" or (name == "auto" and model.device.type == "cuda"):
        reason = no_graphs(model)
        if reason is None:
            verifier = verifier_name(config.verifier.name, config.generation.temperature)
            commits = verifier == "greedy"
            return GraphTarget(
                model,
                max_len=max_len,
                max_nodes=max_nodes,
                batch=batch,
                commits=commits,
                drafts=drafts,
                layouts=layouts,
                hidden_layers=hidden_layers,
                fused=config.engine.fused_layers,
            )
        log.warning("engine=graph runs eagerly: %s", reason)
    return Target(
        model,
        max_len=max_len,
        max_nodes=max_nodes,
        batch=batch,
        reason=reason,
        packed_bytes=packed_bytes(config.engine.packed),
        cache_dir=Path(config.cache_dir),
    )


def batch_layouts(runs: Sequence[MethodRun]) -> list[tuple[int, int]]:
    """Batch rows, and rows of each with the root's, of all labels that run in a batch layout."""
    needs = [c.drafter.needs for c in runs if c.drafter.needs.batch > 1]
    return sorted({(need.batch, need.max_nodes // need.batch + 1) for need in needs})


def hidden_layers(runs: Sequence[MethodRun]) -> list[tuple[int, ...]]:
    """The sets of hidden states that labels ask for; those that ask for none left out."""
    return sorted({run.drafter.needs.hidden_layers for run in runs} - {()})


def build_verifier(config: VerifierConfig, sampling: Sampling) -> Verifier:
    """The verifier that the ``verifier`` group names for this way of sampling.

    Raises:
        ConfigurationError: an unknown name.
    """
    name = verifier_name(config.name, sampling.temperature)
    if name == "greedy":
        return GreedyVerifier()
    if name == "match":
        return MatchVerifier(sampling)
    if name == "rejection":
        return RejectionVerifier(sampling)
    if name == "typical":
        assert config.epsilon is not None
        assert config.delta is not None
        return TypicalVerifier(sampling, epsilon=config.epsilon, delta=config.delta)
    raise unknown_name("verifier", name, VERIFIERS)
