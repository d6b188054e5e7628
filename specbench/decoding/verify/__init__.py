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
``typical``     that the target finds likely enough                         no
==============  ==========================================================  ========
"""

from __future__ import annotations

from specbench.decoding.verify.block import BlockVerifier
from specbench.decoding.verify.greedy import GreedyVerifier
from specbench.decoding.verify.interface import PassScores, Verifier
from specbench.decoding.verify.match import MatchVerifier
from specbench.decoding.verify.rejection import RejectionVerifier
from specbench.decoding.verify.typical import TypicalVerifier

__all__ = [
    "BlockVerifier",
    "GreedyVerifier",
    "MatchVerifier",
    "PassScores",
    "RejectionVerifier",
    "TypicalVerifier",
    "Verifier",
]
