"""N-Grammys' model-derived n-grams: a model's most probable next tokens after every single token.

Built by running the model once on every id of its vocabulary; only ids are stored. The paper's
table of continuations ``[vocab, k, w]`` follows from it by repeating each token's best next one,
so it is not stored. The unigram ranking comes from the model's embeddings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specbench.arrays import Array
from specbench.artifacts.corpora import progress_bar
from specbench.errors import ArtifactError, ConfigurationError
from specbench.storage.arrays import open_array_file, write_array_file

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


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

    def check_model(self, sample: Array, path: Path) -> None:
        """Refuse a table that was built from other weights (in whatever dtype).

        Args:
            sample: ``sample_weights`` of the run's model.
            path: the table's file.

        Raises:
            ArtifactError: the weights differ.
        """
        scale = np.abs(self.sample).max(initial=0.0)
        if sample.shape != self.sample.shape or not np.allclose(
            sample, self.sample, rtol=_TOLERANCE, atol=_TOLERANCE**2 * scale
        ):
            raise ArtifactError(
                f"{path} was built from the model with weights {digest(self.sample)}, but this run "
                f"has weights {digest(sample)} (the tokenizer is the same). Type, with the run's "
                "model for MODEL: python scripts/build_artifact.py bigram_table --model MODEL "
                "--out FILE, and run with method.bigram_table=FILE"
            )


def embedding_weight(embeddings: Any) -> torch.Tensor:
    """Return ``[vocab, hidden]`` weights of embeddings, which transformers types as any module."""
    weight: torch.Tensor = embeddings.weight
    return weight


def digest(sample: Array) -> str:
    """Hash sampled weights to a short name."""
    return hashlib.sha256(np.ascontiguousarray(sample, dtype="<f4").tobytes()).hexdigest()[:12]


STEM = "bigram_table"
# Raised when the same model gives another table: every machine then rebuilds it.
BUILDER_VERSION = 2  # 2: unigrams ranked as the paper's listing does

# Contexts per pass.
_BATCH = 256


def rank_unigrams(model: PreTrainedModel, count: int) -> Array:
    """Rank ids as unigrams like the paper's listing: smallest ``ūᵀ Vᵀ V u_x`` first.

    u are the output embeddings, ū their mean, V the input embeddings. The paper's text ranks by the
    distance ``‖u_x − ū‖_V`` instead, nearest first. The two orders differ: for the bundled model
    the text's begins with " Yoga" and " neurological", which occur in no output, the listing's
    with a space, " (", " and" and ",". We follow the listing (Appendix B).

    Returns:
        ``[min(count, vocab)]`` int32, most probable first; the smaller id on ties.
    """
    import torch

    with torch.inference_mode():
        inputs = embedding_weight(model.get_input_embeddings()).float()
        outputs = embedding_weight(model.get_output_embeddings()).float().to(inputs.device)
        products = outputs @ (inputs.T @ (inputs @ outputs.mean(0)))
        # Stable, so that equal products keep the order of ids.
        order = torch.sort(products, stable=True).indices[:count]
    return order.cpu().numpy().astype(np.int32)


def build_table(
    model: PreTrainedModel, *, top: int = TOP, bos_id: int | None = None, batch: int = _BATCH
) -> BigramTable:
    """Run the model on every id alone.

    Args:
        model: a causal language model in eval mode.
        top: next ids kept.
        bos_id: begin token before each id, if any (the paper does not specify it).
        batch: contexts per pass.
    """
    from specbench.models.checkpoints.weights import sample_weights

    vocab = len(embedding_weight(model.get_output_embeddings()))
    top = min(top, vocab)
    begins = progress_bar("running the model on tokens", " passes", items=range(0, vocab, batch))
    rows = [_next_ids(model, i, min(i + batch, vocab), top, bos_id) for i in begins]
    unigrams = rank_unigrams(model, top)
    return BigramTable(np.concatenate(rows), unigrams, sample_weights(model), bos_id is not None)


def _next_ids(model: PreTrainedModel, begin: int, end: int, top: int, bos_id: int | None) -> Array:
    import torch

    with torch.inference_mode():
        device = embedding_weight(model.get_input_embeddings()).device
        ids = torch.arange(begin, end, device=device)[:, None]
        cache = None
        if bos_id is not None:
            # Once for all rows: on a CPU a batch of pairs takes four times as long as one of ids.
            first = torch.tensor([[bos_id]], device=device)
            cache = model(input_ids=first, use_cache=True).past_key_values
            cache.batch_repeat_interleave(end - begin)
        logits = model(
            input_ids=ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1
        ).logits[:, -1]
        values, indices = torch.topk(logits, top)
        # Ties in the order of ids, so that every machine builds the same table.
        by_id = torch.sort(indices, stable=True)
        by_value = torch.sort(
            values.gather(1, by_id.indices), dim=1, descending=True, stable=True
        ).indices
        indices = by_id.values.gather(1, by_value)
    return indices.cpu().numpy().astype(np.int32)


def build(tokenizer: Any, path: Path, *, top: int = TOP, bos: bool = False) -> None:
    """Write the bundled model's table, in a few minutes."""
    from specbench.models import loading

    table = build_table(
        load_model_of(tokenizer), top=top, bos_id=begin_token(tokenizer) if bos else None
    )
    header = {"weights": digest(table.sample), "builder_version": BUILDER_VERSION}
    table.write(path, tokenizer_hash=loading.tokenizer_hash(tokenizer), header=header)


def begin_token(tokenizer: Any) -> int:
    """Return the tokenizer's begin token.

    Raises:
        ConfigurationError: it has none.
    """
    bos_id = getattr(tokenizer, "bos_token_id", None)
    if bos_id is None:
        raise ConfigurationError("this model's tokenizer has no begin token: set method.bos=false.")
    return int(bos_id)


def load_model_of(tokenizer: Any) -> PreTrainedModel:
    """Load the model from the folder that a tokenizer was loaded from."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        tokenizer.name_or_path, dtype="auto", trust_remote_code=False, local_files_only=True
    )
    model.requires_grad_(False).eval()
    return model
