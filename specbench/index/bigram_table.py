"""N-Grammys' model-derived n-grams: a model's most probable next tokens after every single token.

Built by running the model once on every id of its vocabulary, and kept as ids only. The table of
continuations ``[vocab, k, w]`` of the paper follows from it (each token's best next one, again and
again), so it is not stored. The unigram ranking comes from the model's embeddings.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from specbench.errors import ArtefactError, ConfigurationError
from specbench.index.array_file import open_array_file, write_array_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    Progress = Callable[[str, int, int], None]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

KIND = "bigram_table"
VERSION = 1
# The name of built files begins with the stem; raise the version when the same model gives another
# table, and every machine builds again.
STEM = "bigram_table"
BUILDER_VERSION = 2  # 2: unigrams ranked as the paper's listing does

# Ids kept per token: the paper's largest k, so that one table serves its whole grid.
TOP = 25

# Contexts per pass, and values of each parameter that tell models apart.
_BATCH = 256
_SAMPLE = 4
# Far beyond the rounding of any dtype, far below the difference of two trainings.
_TOLERANCE = 0.02


class BigramTable(NamedTuple):
    """A model's own n-grams.

    Attributes:
        bigrams: ``[vocab, K]`` int32: the most probable next ids after each id, best first; the
            smaller id on ties.
        unigrams: ``[K]`` int32: the ids that `rank_unigrams` puts first.
        sample: values of the model's parameters, see `sample_weights`.
        bos: whether the begin token preceded each id.
    """

    bigrams: Array
    unigrams: Array
    sample: Array
    bos: bool

    @staticmethod
    def open(path: Path, tokenizer_hash: str | None) -> BigramTable:
        """Map a file.

        Args:
            path: the file.
            tokenizer_hash: what it must have been built for; None takes any.

        Raises:
            ArtefactError: wrong kind, version or tokenizer (both are named), or a damaged file.
        """
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
            header={**header, "builder_version": BUILDER_VERSION, "bos": self.bos},
        )

    def check_model(self, model: PreTrainedModel, path: Path) -> None:
        """Refuse a table that was built from other weights (in whatever dtype).

        Raises:
            ArtefactError: it was.
        """
        found = sample_weights(model)
        scale = np.abs(self.sample).max(initial=0.0)
        if found.shape != self.sample.shape or not np.allclose(
            found, self.sample, rtol=_TOLERANCE, atol=_TOLERANCE**2 * scale
        ):
            raise ArtefactError(
                f"{path} was built from the model with weights {digest(self.sample)}, but this run "
                f"has weights {digest(found)} (the tokenizer is the same). Type, with the run's "
                "model for MODEL: python scripts/build_bigram_table.py --model MODEL --out FILE, "
                "and run with method.bigram_table=FILE"
            )


def sample_weights(model: PreTrainedModel) -> Array:
    """A few values of every parameter, evenly spaced, as float32: what tells two models apart."""
    values = []
    for _, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        flat = parameter.detach().reshape(-1)
        step = max(1, len(flat) // _SAMPLE)
        values.append(flat[::step][:_SAMPLE].float().cpu().numpy())
    return np.concatenate(values)


def _weight(embeddings: Any) -> torch.Tensor:
    """``[vocab, hidden]`` of input or output embeddings, which transformers types as any module."""
    weight: torch.Tensor = embeddings.weight
    return weight


def digest(sample: Array) -> str:
    """A short name of sampled weights."""
    return hashlib.sha256(np.ascontiguousarray(sample, dtype="<f4").tobytes()).hexdigest()[:12]


def rank_unigrams(model: PreTrainedModel, count: int) -> Array:
    """The ids that the paper's listing ranks first as unigrams: smallest ``ūᵀ Vᵀ V u_x``.

    u are the output embeddings, ū their mean, V the input embeddings. The paper's text ranks by the
    distance ``‖u_x − ū‖_V`` instead, nearest first. The two orders differ: the text's order of the
    embedded model begins with " Yoga" and " neurological", which no answer holds, the listing's
    with a space, " (", " and" and ",". We follow the listing (Appendix B).

    Args:
        model: a causal language model.
        count: ids wanted.

    Returns:
        ``[min(count, vocab)]`` int32, most probable first; the smaller id on ties.
    """
    import torch

    with torch.inference_mode():
        inputs = _weight(model.get_input_embeddings()).float()
        outputs = _weight(model.get_output_embeddings()).float().to(inputs.device)
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
    progress: Progress | None = None,
) -> BigramTable:
    """Run the model on every id alone.

    Args:
        model: a causal language model in eval mode.
        top: next ids kept.
        bos_id: begin token put before each id; None for none (the paper does not say).
        unfinished: file that finished rows are kept in while the table is being built; a killed
            build goes on from it. Its name gets the model's digest added. None keeps none.
        batch: contexts per pass.
        progress: called with what is being done, and how much of how much.

    Returns:
        The table.
    """
    vocab = len(_weight(model.get_output_embeddings()))
    top = min(top, vocab)
    sample = sample_weights(model)
    path = None
    if unfinished is not None:
        key = f"{digest(sample)}-{vocab}-{top}-{bos_id}"
        path = unfinished.with_name(f"{unfinished.name}.{key}.rows")
    rows, done = _start(path, vocab, top)
    for begin in range(done, vocab, batch):
        end = min(begin + batch, vocab)
        rows[begin:end] = _next_ids(model, begin, end, top, bos_id)
        if isinstance(rows, np.memmap):
            rows.flush()
        if progress is not None:
            progress("running the model on every token", end, vocab)
    bigrams = np.array(rows)
    del rows
    if path is not None:
        path.unlink()
    return BigramTable(bigrams, rank_unigrams(model, top), sample, bos_id is not None)


def _start(path: Path | None, vocab: int, top: int) -> tuple[Array, int]:
    """Rows to fill, and how many are filled already; -1 stands where nothing is yet."""
    shape = (vocab, top)
    if path is None:
        return np.full(shape, -1, dtype=np.int32), 0
    if not path.is_file() or path.stat().st_size != 4 * vocab * top:
        rows = np.memmap(path, np.int32, "w+", shape=shape)
        rows[:] = -1
        return rows, 0
    rows = np.memmap(path, np.int32, "r+", shape=shape)
    missing = np.flatnonzero((rows < 0).any(1))
    return rows, int(missing[0]) if len(missing) else vocab


def _next_ids(model: PreTrainedModel, begin: int, end: int, top: int, bos_id: int | None) -> Array:
    import torch

    with torch.inference_mode():
        device = _weight(model.get_input_embeddings()).device
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


def build_default(
    tokenizer: Any, out_path: Path, progress: Progress | None, *, top: int = TOP, bos: bool = False
) -> None:
    """The embedded model's table, in a few minutes; a killed build goes on where it was.

    Args:
        tokenizer: the model's tokenizer, loaded from the folder that holds the model, too.
        out_path: the file to write.
        progress: see `build_table`.
        top: next ids kept.
        bos: put the begin token before each id.
    """
    from specbench.models import tokenizer_hash

    table = build_table(
        load_beside(tokenizer),
        top=top,
        bos_id=begin_token(tokenizer) if bos else None,
        unfinished=out_path,
        progress=progress,
    )
    header = {"weights": digest(table.sample)}
    table.write(out_path, tokenizer_hash=tokenizer_hash(tokenizer), header=header)


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
