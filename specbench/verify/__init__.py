"""Verification: the one place that decides which draft tokens are accepted.

==============  ==========================================================  ========
verifier        accepts a draft token                                       lossless
==============  ==========================================================  ========
``greedy``      that is the target's most likely one                        yes
``match``       that the target, drawing its own token there, draws         yes
``rejection``   by the ratio of target to draft probability; what is left   yes
                of the target's law is what the next token is drawn from
``typical``     that the target finds likely enough                         no
==============  ==========================================================  ========
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.errors import unknown_name
from specbench.verify.greedy import GreedyVerifier
from specbench.verify.interface import PassScores, Verifier
from specbench.verify.match import MatchVerifier
from specbench.verify.rejection import RejectionVerifier
from specbench.verify.typical import TypicalVerifier

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specbench.sampling import Sampling

__all__ = [
    "GreedyVerifier",
    "MatchVerifier",
    "PassScores",
    "RejectionVerifier",
    "TypicalVerifier",
    "Verifier",
    "build_verifier",
]


def build_verifier(config: DictConfig, sampling: Sampling) -> Verifier:
    """The verifier that the ``verifier`` group names.

    Args:
        config: the group's node.
        sampling: how the target chooses its tokens.

    Raises:
        ConfigurationError: an unknown name.
    """
    # Here, and not above: whoever names a verifier class directly needs no configuration library.
    from specbench.schema import VERIFIERS, verifier_name

    name = verifier_name(str(config.name), sampling.temperature)
    if name == "greedy":
        return GreedyVerifier()
    if name == "match":
        return MatchVerifier(sampling)
    if name == "rejection":
        return RejectionVerifier(sampling)
    if name == "typical":
        return TypicalVerifier(sampling, epsilon=float(config.epsilon), delta=float(config.delta))
    raise unknown_name("verifier", name, VERIFIERS)
