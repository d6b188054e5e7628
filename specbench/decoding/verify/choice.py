"""Which verifier a run has."""

from __future__ import annotations

from specbench.config.schema import VERIFIERS, VerifierConfig, verifier_name
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import (
    BlockVerifier,
    GreedyVerifier,
    MatchVerifier,
    RejectionVerifier,
    TypicalVerifier,
    Verifier,
)
from specbench.errors import unknown_name


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
    if name == "block":
        return BlockVerifier(sampling)
    if name == "typical":
        assert config.epsilon is not None
        assert config.delta is not None
        return TypicalVerifier(sampling, epsilon=config.epsilon, delta=config.delta)
    raise unknown_name("verifier", name, VERIFIERS)
