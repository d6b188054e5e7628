"""The self-check: a model reads here what it reads in transformers, or no run begins.

Our target has an attention, a cache and masks of its own, and on a CPU whole passes. Before
anything is measured, logits behind a prompt, of a chain and of a tree are compared with those of
the model as transformers loaded it: its attention, its cache, one branch at a time. Passes of one
row and of many round differently, the model's own too. How far those lie apart is measured, and
nothing may differ from them by more than a few times that.

What is measured could excuse anything, so it has a ceiling: a model whose own passes are further
apart than roundings can be is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specbench.decoding.structs import DraftTree
from specbench.decoding.tree import visibility
from specbench.errors import ConfigurationError, SpecBenchError, first_line
from specbench.kernels.architectures import ELSE, is_mixture
from specbench.models.checks.check_text import PARENTS, CheckText, make_text
from specbench.models.checks.own_passes import OwnRows, difference, differences, own_rows
from specbench.models.target import Target

# What a model's own passes may differ by, as a share of what the logits of a row vary by (their
# standard deviation). Of 50 architectures, widths to 1,024 and initial ranges to .4, right ones
# reach .0007 in float32 and .12 in half precision; attention that looks ahead .03 to 3.
_CEILING = {torch.float32: 0.01, torch.float64: 0.01}
_CEILING_OF_HALVES = 0.5

_TEXTS = 4  # that a mixture of experts reads; a router's near tie is in one or the other

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What a self-check found; written to the manifest.

    Attributes:
        prompt: tokens of the text.
        spread, tolerance: of the model's own passes; None where it has no finite logits.
        difference: the largest between our logits and the model's own, by part of the check.
        lengths: by sliding window, or by what else depends on a text's length, whether the text was
            long enough. Where it was not, only the model's configuration speaks for us.
        moved: of ``positions``, where the model's own passes of one row and of many choose
            different tokens.
    """

    prompt: int
    spread: float | None
    tolerance: float | None
    difference: dict[str, float]
    lengths: dict[str, str]
    moved: int = 0
    positions: int = 0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def checked(
    model: PreTrainedModel,
    make: Callable[[PreTrainedModel], Target],
    *,
    what: str,
    longest: int,
    drafts: bool = False,
    nodes: int = 0,
) -> tuple[Target, SelfCheck]:
    """The target that ``make`` makes of ``model``, and what its self-check found.

    Args:
        model: as transformers loaded it, on its device; ``make`` gives it another attention.
        what: the model in the words of its user, e.g. ``model.id=FOLDER``.
        longest: tokens of the longest text that will be read.
        drafts: the target is a draft model's, whose trees grow without a root.
        nodes: what a tree of the target may have; a check reads no larger ones.

    Raises:
        ConfigurationError: logits differ, or a pass fails; names the layer or the feature.
    """
    text, lengths = make_text(model, longest)
    own = _attempt(lambda: own_rows(model, text), f"{what}: transformers' own pass fails")
    failing = f"{what} does not decode here"
    if own.finite:
        _check_ceiling(own, failing)
    mixture = is_mixture(model)
    more_texts = [make_text(model, longest, seed)[0] for seed in range(1, _TEXTS if mixture else 1)]
    others = [(more, own_rows(model, more)) for more in more_texts]
    target = _attempt(lambda: make(model), failing)
    ours = _attempt(lambda: _our_rows(target, text, drafts), failing)
    if not own.finite:  # as after an overflow: its cases will fail, and say so
        return target, SelfCheck(len(text.prompt), None, None, {}, lengths)
    found = {part: difference(ours[part], own.logits[part], mixture) for part in ours}
    part, largest = max(found.items(), key=lambda item: item[1])
    spread = own.spread
    if largest > spread.tolerance:
        raise ConfigurationError(
            f"{failing} as it does in transformers: logits of a {part} differ by {largest:.2g} "
            f"from its own attention's and cache's, whose passes of one row and of many "
            f"differ by {spread.value:.2g} (allowed: {spread.tolerance:.2g}). First to "
            f"differ: {_first_to_differ(target, text, own)}. {_remedy(target)}"
        )
    apart = _rows_apart(ours, own)
    for more, rows in others:  # most mixtures have no such row, and read no other text here
        if any(bool(rows_apart.any()) for rows_apart in apart.values()):
            again = _rows_apart(_our_rows(target, more, drafts), rows)
            apart = {part: apart[part] & again[part] for part in apart}
    if mixture and (row := _first_row(apart)):
        raise ConfigurationError(
            f"{failing} as it does in transformers: {row} differs from its own attention and cache "
            f"in each of {_TEXTS} texts, which no router's near tie explains. {ELSE}"
        )
    return target, SelfCheck(
        prompt=len(text.prompt),
        spread=spread.value,
        tolerance=spread.tolerance,
        difference=found,
        lengths=lengths,
        moved=own.moved,
        positions=own.positions,
    )


def _rows_apart(ours: Mapping[str, torch.Tensor], own: OwnRows) -> dict[str, torch.Tensor]:
    """By part, ``[rows]`` that differ by more than is allowed.

    In a mixture of experts a rounding sends a row at a near tie to another expert, so that single
    rows of one text say nothing; a row that is apart in every text is wrong.
    """
    return {
        part: (differences(rows, own.logits[part]) > own.spread.tolerance).cpu()
        for part, rows in ours.items()
    }


def _first_row(wrong: Mapping[str, torch.Tensor]) -> str:
    """The first row that is marked, in words; "" for none."""
    named = [(part, int(rows.nonzero()[0])) for part, rows in wrong.items() if bool(rows.any())]
    return f"row {named[0][1]} of a {named[0][0]}" if named else ""


def _remedy(target: Target) -> str:
    packed = target.packed_weights["products"]
    return "Type engine.packed.enabled=false to do without one call." if packed else ELSE


def _check_ceiling(own: OwnRows, failing: str) -> None:
    """Refuse a spread that is no rounding.

    Raises:
        ConfigurationError: it says what the logits vary by.
    """
    ceiling = _CEILING.get(own.logits["chain"].dtype, _CEILING_OF_HALVES)
    value, scale = own.spread.value, own.scale
    if value <= max(ceiling * scale, own.spread.rounding):
        return
    raise ConfigurationError(
        f"{failing}: in transformers itself, passes of one row and of many over the same text "
        f"differ by {value:.2g}, where logits of a row vary by {scale:.2g}; roundings come to "
        f"{ceiling * scale:.2g} at most. What it answers depends on how a text is cut into passes, "
        "as where attention looks ahead (use_bidirectional_attention) or a cache is not exact. "
        f"{ELSE}"
    )


def _attempt(call: Callable[[], T], failing: str) -> T:
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except SpecBenchError as error:
        raise type(error)(f"{failing}: {error}") from error
    except Exception as error:  # what a model's code raises when it meets another cache or dtype
        raise ConfigurationError(f"{failing}: {first_line(error)}. {ELSE}") from error


def _trees(text: CheckText, most: int) -> dict[str, DraftTree]:
    """Chain and tree, each cut to its first ``most`` nodes."""
    return {
        "chain": DraftTree.chain(text.chain[:most]),
        "tree": DraftTree(text.nodes[:most], PARENTS[:most]),
    }


@torch.inference_mode()
def _our_rows(target: Target, text: CheckText, drafts: bool) -> dict[str, torch.Tensor]:
    """Logits by part; fewer rows where the target's largest tree has fewer nodes."""
    prompt = target.prefill(text.prompt).logits[-1:].clone()
    found, trees = {}, _trees(text, target.max_nodes)
    if not drafts:
        # Cloned, since a captured pass overwrites the logits of the pass before.
        for part, tree in trees.items():
            found[part] = target.forward(text.root, tree).logits.clone()
        return {**found, "chain": torch.cat([prompt, found["chain"]])}
    root = target.append(torch.tensor([text.root], device=target.device)).logits.clone()
    for part, tree in trees.items():
        visible, depths = visibility(torch.from_numpy(tree.parents).to(target.device))
        ids = torch.as_tensor(tree.tokens, device=target.device)
        rows = target.extend(ids, visible[1:, 1:], depths[1:] - 1).logits
        found[part] = torch.cat([root, rows])
        target.cache.retained = 0
    return {**found, "chain": torch.cat([prompt, found["chain"]])}


@torch.inference_mode()
def _first_to_differ(target: Target, text: CheckText, own: OwnRows) -> str:
    """The layer where our hidden states leave the model's own."""
    layers = tuple(range(len(own.hidden["chain"])))
    target.prefill(text.prompt)
    apart = np.zeros(len(layers))
    for part, tree in _trees(text, target.max_nodes).items():
        hidden = target.forward(text.root, tree, hidden_layers=layers).hidden or {}
        for i, wanted in enumerate(own.hidden[part]):
            scale = float(wanted.abs().max()) or 1.0
            apart[i] = max(apart[i], difference(hidden[i], wanted) / scale)
    # Rounding grows from layer to layer, and a fault is far larger.
    first = int(np.argmax(apart >= apart.max() / 10)) if layers else 0
    if first == 0:
        return "the embedding of ids and positions, or what stands behind the layers"
    layer = target.layers[first - 1]
    kinds = (type(module).__name__ for module in layer.modules())
    attention = next((kind for kind in kinds if "Attention" in kind), type(layer).__name__)
    return f"layer {first - 1} ({attention})"


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Refuse a tokenizer whose texts have ids that the model has no embedding of.

    Of tokens that were added to it, as one for padding, only a prompt that has them fails.

    Raises:
        ConfigurationError: with the first such token.
    """
    embedding: Any = model.get_input_embeddings()
    rows = int(embedding.weight.shape[0])
    vocabulary = tokenizer.get_vocab().items() - tokenizer.get_added_vocab().items()
    beyond = sorted((i, token) for token, i in vocabulary if i >= rows)
    if beyond:
        i, token = beyond[0]
        raise ConfigurationError(
            f"{what}: the tokenizer has {len(beyond)} tokens that the model has no embedding of, "
            f"{token!r} (id {i}) the first of them: there are {rows}. Take the tokenizer that the "
            "model was trained with, or resize the model's embeddings and save it again."
        )
