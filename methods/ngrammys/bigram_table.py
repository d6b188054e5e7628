"""N-Grammys' model-derived n-grams: a model's most probable next tokens after every single token.

Built by running the model once on every id of its vocabulary, and kept as ids only. The table of
continuations ``[vocab, k, w]`` of the paper follows from it (each token's best next one, again and
again), so it is not stored. The unigram ranking comes from the model's embeddings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specbench.arrays import Array
from specbench.errors import ArtifactError
from specbench.storage.arrays import open_array_file, write_array_file

if TYPE_CHECKING:
    import torch

KIND = "bigram_table"
VERSION = 1
# Ids kept per token: the paper's largest k, so that one table serves its whole grid.
TOP = 25

# Far beyond the rounding of any dtype, far below the difference of two trainings.
_TOLERANCE = 0.02


class BigramTable(NamedTuple):
    """A model's own n-grams.

    Attributes:
        bigrams: ``[vocab, K]`` int32: the most probable next ids after each id, best first; the
            smaller id on ties.
        unigrams: ``[K]`` int32: the ids that `rank_unigrams` puts first.
        sample: some of the model's weights, see ``specbench.models.checkpoints.weights``.
        bos: whether the begin token preceded each id.
    """

    bigrams: Array
    unigrams: Array
    sample: Array
    bos: bool

    @staticmethod
    def open(path: Path, tokenizer_hash: str | None) -> BigramTable:
        """Map a file, with the arguments and errors of `open_array_file`."""
        header, arrays = open_array_file(
            path, kind=KIND, version=VERSION, tokenizer_hash=tokenizer_hash
        )
        return BigramTable(
            arrays["bigrams"], arrays["unigrams"], arrays["sample"], bool(header["bos"])
        )

    def write(self, path: Path, *, tokenizer_hash: str, header: Mapping[str, Any]) -> None:
        """Write the file; ``header`` adds facts about the model."""
        write_array_file(
            path,
            kind=KIND,
            version=VERSION,
            tokenizer_hash=tokenizer_hash,
            arrays={"bigrams": self.bigrams, "unigrams": self.unigrams, "sample": self.sample},
            header={**header, "bos": self.bos},
        )

    def check_model(self, found: Array, path: Path) -> None:
        """Refuse a table that was built from other weights (in whatever dtype).

        Args:
            found: ``sample_weights`` of the run's model.
            path: the table's file.

        Raises:
            ArtifactError: it was.
        """
        scale = np.abs(self.sample).max(initial=0.0)
        if found.shape != self.sample.shape or not np.allclose(
            found, self.sample, rtol=_TOLERANCE, atol=_TOLERANCE**2 * scale
        ):
            raise ArtifactError(
                f"{path} was built from the model with weights {digest(self.sample)}, but this run "
                f"has weights {digest(found)} (the tokenizer is the same). Type, with the run's "
                "model for MODEL: python scripts/build_artifact.py bigram_table --model MODEL "
                "--out FILE, and run with method.bigram_table=FILE"
            )


def embedding_weight(embeddings: Any) -> torch.Tensor:
    """``[vocab, hidden]`` of input or output embeddings, which transformers types as any module."""
    weight: torch.Tensor = embeddings.weight
    return weight


def digest(sample: Array) -> str:
    """A short name of sampled weights."""
    return hashlib.sha256(np.ascontiguousarray(sample, dtype="<f4").tobytes()).hexdigest()[:12]
