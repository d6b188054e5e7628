"""Builds N-Grammys' bigram table by running the model once on every id of its vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from methods.ngrammys.bigram_table import TOP, BigramTable, digest, embedding_weight
from specbench.arrays import Array
from specbench.artifacts.progress import Progress, silent
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.models.checkpoints.weights import sample_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEM = "bigram_table"
# Raised when the same model gives another table: every machine then builds again.
BUILDER_VERSION = 2  # 2: unigrams ranked as the paper's listing does

# Contexts per pass.
_BATCH = 256


def rank_unigrams(model: PreTrainedModel, count: int) -> Array:
    """The ids that the paper's listing ranks first as unigrams: smallest ``ūᵀ Vᵀ V u_x``.

    u are the output embeddings, ū their mean, V the input embeddings. The paper's text ranks by the
    distance ``‖u_x − ū‖_V`` instead, nearest first. The two orders differ: the text's order of the
    bundled model begins with " Yoga" and " neurological", which no answer holds, the listing's
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
    model: PreTrainedModel,
    *,
    top: int = TOP,
    bos_id: int | None = None,
    unfinished: Path | None = None,
    batch: int = _BATCH,
    progress: Progress = silent,
) -> BigramTable:
    """Run the model on every id alone.

    Args:
        model: a causal language model in eval mode.
        top: next ids kept.
        bos_id: begin token put before each id; None for none (the paper does not say).
        unfinished: the table's file; finished rows are kept beside it, so that a killed build goes
            on. Their file's name says of which weights, in which dtype, with which arguments;
            whoever calls removes it. None keeps none.
        batch: contexts per pass.
    """
    vocab = len(embedding_weight(model.get_output_embeddings()))
    top = min(top, vocab)
    sample = sample_weights(model)
    path = None
    if unfinished is not None:
        # Weights are sampled alike in each dtype, and the most probable tokens differ.
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        key = f"{digest(sample)}-{dtype}-{vocab}-{top}-{bos_id}-{BUILDER_VERSION}"
        path = unfinished.with_name(f"{unfinished.name}.{key}.rows")
    rows, done = _start(path, vocab, top)
    for begin in range(done, vocab, batch):
        end = min(begin + batch, vocab)
        rows[begin:end] = _next_ids(model, begin, end, top, bos_id) + 1
        if isinstance(rows, np.memmap):
            rows.flush()
        progress("running the model on every token", end, vocab)
    return BigramTable(np.array(rows) - 1, rank_unigrams(model, top), sample, bos_id is not None)


def _start(path: Path | None, vocab: int, top: int) -> tuple[Array, int]:
    """Rows to fill with ids plus 1, and how many are filled already.

    0 stands where nothing is yet, as in a file of which a kill left no more than its size.
    """
    shape = (vocab, top)
    if path is None:
        return np.zeros(shape, dtype=np.int32), 0
    if not path.is_file() or path.stat().st_size != 4 * vocab * top:
        return np.memmap(path, np.int32, "w+", shape=shape), 0
    rows = np.memmap(path, np.int32, "r+", shape=shape)
    missing = np.flatnonzero((rows == 0).any(1))
    return rows, int(missing[0]) if len(missing) else vocab


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
        # Equal logits in the order of ids, so that every machine's table is the same.
        by_id = torch.sort(indices, stable=True)
        by_value = torch.sort(
            values.gather(1, by_id.indices), dim=1, descending=True, stable=True
        ).indices
        indices = by_id.values.gather(1, by_value)
    return indices.cpu().numpy().astype(np.int32)


def build(
    tokenizer: Any, path: Path, progress: Progress = silent, *, top: int = TOP, bos: bool = False
) -> None:
    """The bundled model's table, in a few minutes; a killed build goes on where it was."""
    table = build_table(
        load_beside(tokenizer),
        top=top,
        bos_id=begin_token(tokenizer) if bos else None,
        unfinished=path,
        progress=progress,
    )
    header = {"weights": digest(table.sample), "builder_version": BUILDER_VERSION}
    table.write(path, tokenizer_hash=loading.tokenizer_hash(tokenizer), header=header)


def begin_token(tokenizer: Any) -> int:
    """The tokenizer's begin token.

    Raises:
        ConfigurationError: it has none.
    """
    bos_id = getattr(tokenizer, "bos_token_id", None)
    if bos_id is None:
        raise ConfigurationError("this model's tokenizer has no begin token: set method.bos=false.")
    return int(bos_id)


def load_beside(tokenizer: Any) -> PreTrainedModel:
    """The model in the folder that a tokenizer was loaded from."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        tokenizer.name_or_path, dtype="auto", trust_remote_code=False, local_files_only=True
    )
    model.requires_grad_(False).eval()
    return model
