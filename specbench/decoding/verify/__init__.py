"""Verification: the one place that decides which draft tokens are accepted.

==============  ==========================================================  ========
verifier        accepts a draft token                                       lossless
==============  ==========================================================  ========
``greedy``      that is the target's most likely one                        yes
``match``       that the target, drawing its own token there, draws         yes
``rejection``   by the ratio of target to draft probability; what is left   yes
                of the target's distribution is what the next token is drawn from
``block``       of a drawn chain by the ratios of all tokens up to it; other drafts yes
                as ``rejection`` and ``match`` do
``traversal``   of a drawn tree from its leaves up, a rejected one's mass going  yes
                to its siblings before their parent is tested
``typical``     that the target finds likely enough                         no
==============  ==========================================================  ========
"""

from __future__ import annotations

from specbench.config.schema import VERIFIERS, VerifierConfig, verifier_name
from specbench.decoding.sampling import Sampling, Uniforms
from specbench.decoding.verify.block import BlockVerifier
from specbench.decoding.verify.greedy import GreedyVerifier
from specbench.decoding.verify.interface import PassScores, Verifier
from specbench.decoding.verify.match import MatchVerifier
from specbench.decoding.verify.rejection import RejectionVerifier
from specbench.decoding.verify.traversal import TraversalVerifier
from specbench.decoding.verify.typical import TypicalVerifier
from specbench.errors import unknown_name

__all__ = [
    "BlockVerifier",
    "GreedyVerifier",
    "MatchVerifier",
    "PassScores",
    "RejectionVerifier",
    "TraversalVerifier",
    "TypicalVerifier",
    "Verifier",
    "build_verifier",
]


def build_verifier(
    config: VerifierConfig, sampling: Sampling, uniforms: Uniforms | None = None
) -> Verifier:
    """Build the verifier that the ``verifier`` group names for these sampling settings.

    Args:
        uniforms: of a target whose passes draw, for ``match``.

    Raises:
        ConfigurationError: an unknown name.
    """
    name = verifier_name(config.name, sampling.temperature)
    if name == "greedy":
        return GreedyVerifier()
    if name == "typical":
        assert config.epsilon is not None and config.delta is not None
        return TypicalVerifier(sampling, epsilon=config.epsilon, delta=config.delta)
    if name == "match":
        return MatchVerifier(sampling, uniforms)
    for verifier in (RejectionVerifier, BlockVerifier, TraversalVerifier):
        if name == verifier.name:
            return verifier(sampling)
    raise unknown_name("verifier", name, VERIFIERS)
