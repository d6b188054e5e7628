"""The self-check: a model reads here what it reads in transformers, or no run begins.

Our target has an attention, a cache and masks of its own, and on a CPU other products. Before
anything is measured, logits behind a prompt, of a chain and of a tree are compared with those of
the model as transformers loaded it: its attention, its cache, one branch at a time. Passes of one
row and of many round differently, the model's own too. How far those lie apart is measured, and
nothing may differ from them by more than a few times that.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specbench.arrays import IntArray
from specbench.decoding.structs import DraftTree
from specbench.decoding.tree import visibility
from specbench.errors import ConfigurationError, SpecBenchError, first_line
from specbench.kernels.architectures import ELSE, is_mixture, window_sizes
from specbench.models.hidden_states import HiddenStates, decoder_layers
from specbench.models.target import Target

TIMES_SPREAD = 4  # what may differ, in spreads of the model's own passes
# Of the largest logit. In float16 passes of 34 tiny architectures differ by up to 3.9 where the
# model's own do not, of SmolLM2 by 2.4: half of what is then allowed.
_ROUNDINGS = 2

_PROMPT, _CHAIN = 16, 6  # tokens
# Most nodes have an earlier one that they must not see, and depths do not follow the order.
_PARENTS: IntArray = np.array([-1, -1, 0, 1, 1, 2, 4, 3], dtype=np.int64)
_ROWS = 1 + len(_PARENTS)
# Work that the check may take so that its text outgrows a window; about a second.
_FLOPS = {"cpu": 5e10, "cuda": 2e14}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """How far logits of the same tokens lie apart in passes of one row and of many.

    Attributes:
        value: largest difference of a logit.
        rounding: what roundings of the largest logit may come to. Passes that happen to be the
            same to the last bit have no spread, and others may still round.
    """

    value: float
    rounding: float

    @property
    def tolerance(self) -> float:
        return TIMES_SPREAD * max(self.value, self.rounding)


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What a self-check found; written to the manifest.

    Attributes:
        prompt: tokens of the text.
        spread, tolerance: of the model's own passes; None where it has no finite logits.
        difference: the largest between our logits and the model's own, by part of the check.
        windows: by size, whether the text outgrew the sliding window. Where it did not, only the
            model's configuration speaks for our masks.
    """

    prompt: int
    spread: float | None
    tolerance: float | None
    difference: dict[str, float]
    windows: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def measure_spread(one: torch.Tensor, *many: torch.Tensor, typical: bool = False) -> Spread:
    """The spread of logits ``[rows, vocab]`` of one-row passes and of others over the same tokens.

    Most models compute norms and softmax in float32, in float64 too: a difference of float32
    roundings is then right in any dtype. ``typical`` as in `_difference`.
    """
    unit = max(torch.finfo(one.dtype).eps, torch.finfo(torch.float32).eps)
    largest = float(one.abs().nan_to_num(0.0, 0.0).max())
    value = max(_difference(one, other, typical) for other in many)
    return Spread(value, _ROUNDINGS * unit * largest)


def checked(
    model: PreTrainedModel,
    make: Callable[[PreTrainedModel], Target],
    *,
    what: str,
    longest: int,
    drafts: bool = False,
) -> tuple[Target, SelfCheck]:
    """The target that ``make`` makes of ``model``, and what its self-check found.

    Args:
        model: as transformers loaded it, on its device; ``make`` gives it another attention.
        what: the model in the words of its user, e.g. ``model.id=FOLDER``.
        longest: tokens of the longest text that will be read.
        drafts: the target is a draft model's, whose trees grow without a root.

    Raises:
        ConfigurationError: logits differ, or a pass fails; names the layer or the feature.
    """
    text, windows = _make_text(model, longest)
    own = _attempt(lambda: _own_rows(model, text), f"{what}: transformers' own pass fails")
    failing = f"{what} does not decode here"
    target = _attempt(lambda: make(model), failing)
    ours = _attempt(lambda: _our_rows(target, text, drafts), failing)
    if not own.finite:  # as after an overflow: its cases will fail, and say so
        return target, SelfCheck(len(text.prompt), None, None, {}, windows)
    mixture = is_mixture(model)
    found = {part: _difference(ours[part], own.logits[part], mixture) for part in ours}
    part, largest = max(found.items(), key=lambda item: item[1])
    if largest > own.spread.tolerance:
        raise ConfigurationError(
            f"{failing} as it does in transformers: logits of a {part} differ by {largest:.2g} "
            f"from those of its own attention and cache, whose passes of one row and of many "
            f"differ by {own.spread.value:.2g} (allowed: {own.spread.tolerance:.2g}). First to "
            f"differ: {_first_to_differ(target, text, own)}. {ELSE}"
        )
    spread = own.spread
    return target, SelfCheck(len(text.prompt), spread.value, spread.tolerance, found, windows)


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt, and behind its last token, the root, a chain and a tree."""

    prompt: IntArray
    root: int
    chain: IntArray  # [_CHAIN]
    nodes: IntArray  # [len(_PARENTS)]


@dataclass(frozen=True, slots=True)
class _OwnRows:
    logits: dict[str, torch.Tensor]  # by part, [rows, vocab]
    hidden: dict[str, list[torch.Tensor]]  # by part and layer, [rows, hidden]
    spread: Spread

    @property
    def finite(self) -> bool:
        return not any((rows.isnan() | rows.isposinf()).any() for rows in self.logits.values())


def _make_text(model: PreTrainedModel, longest: int) -> tuple[_Text, dict[str, str]]:
    """Random ids; longer than the windows that the run's texts outgrow, where that is cheap."""
    per_token = 2 * sum(p.numel() for p in model.parameters())
    cheap = int(_FLOPS.get(model.device.type, 0) / per_token)
    length, windows = max(1, min(_PROMPT, longest - _ROWS)), {}
    for window in window_sizes(model):
        wanted = min(window + max(window // 2, _ROWS), longest - _ROWS)
        if wanted <= window:
            windows[str(window)] = "not reached by this run's texts"
        elif wanted > max(cheap, length):
            windows[str(window)] = "not outgrown: the check would take too long"
        else:
            windows[str(window)] = "outgrown"
            length = max(length, wanted)
    tables: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    vocab = min(int(table.weight.shape[0]) for table in tables)
    # Special tokens, and ids that stand for images, are at the ends of vocabularies.
    ids = np.random.default_rng(0).integers(vocab // 16, vocab // 2 + 1, length + _CHAIN + _ROWS)
    prompt, root, chain, nodes = np.split(ids, np.cumsum([length, 1, _CHAIN]))
    return _Text(prompt, int(root[0]), chain, nodes), windows


def _attempt(call: Callable[[], T], failing: str) -> T:
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except SpecBenchError as error:
        raise type(error)(f"{failing}: {error}") from error
    except Exception as error:  # what a model's code raises when it meets another cache or dtype
        raise ConfigurationError(f"{failing}: {first_line(error)}. {ELSE}") from error


@torch.inference_mode()
def _own_rows(model: PreTrainedModel, text: _Text) -> _OwnRows:
    def read(ids: Iterable[int], cache: Any, keep: int = 0, **options: Any) -> Any:
        row = torch.tensor([list(ids)], device=model.device)
        return model(
            input_ids=row, past_key_values=cache, use_cache=True, logits_to_keep=keep, **options
        )

    begun = read(text.prompt, None, keep=1)
    if getattr(begun, "past_key_values", None) is None:
        raise ConfigurationError(
            f"{type(model).__name__} keeps a state instead of keys and values, which cannot go "
            f"back where a draft is rejected. {ELSE}"
        )
    tokens = [text.root, *text.chain]

    # Not by transformers' own option, which would leave a hook in every layer for the whole run.
    layers = decoder_layers(model)
    states = HiddenStates(model, layers, model.device)
    numbers = range(len(layers) + 1)

    def behind(ids: list[int]) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        with states.collected(numbers) as hidden:
            return read(ids, copy.deepcopy(begun.past_key_values)).logits[0], hidden

    cache = copy.deepcopy(begun.past_key_values)
    one = torch.cat([read([token], cache).logits[0] for token in tokens])
    chain, chain_states = behind(tokens)
    whole = read([*text.prompt, *tokens], None, keep=len(tokens))
    branches = [_path(node) for node in range(len(_PARENTS)) if node not in _PARENTS]
    passes = [behind([text.root, *text.nodes[path]]) for path in branches]

    def in_tree(rows: list[torch.Tensor]) -> torch.Tensor:
        """``[_ROWS, ..]`` of root and nodes, from the rows of each branch."""
        found = rows[0].new_empty(_ROWS, rows[0].shape[-1])
        for path, of_branch in zip(branches, rows, strict=True):
            found[[0, *(node + 1 for node in path)]] = of_branch
        return found

    return _OwnRows(
        logits={
            "chain": torch.cat([begun.logits[0], one]),
            "tree": in_tree([logits for logits, _ in passes]),
        },
        hidden={
            "chain": [chain_states[i] for i in numbers],
            "tree": [in_tree([hidden[i] for _, hidden in passes]) for i in numbers],
        },
        spread=measure_spread(one, chain, whole.logits[0], typical=is_mixture(model)),
    )


def _path(node: int) -> list[int]:
    """Nodes from below the root down to ``node``."""
    return [*_path(int(_PARENTS[node])), node] if node >= 0 else []


def _trees(text: _Text, most: int) -> dict[str, DraftTree]:
    """Chain and tree, each cut to its first ``most`` nodes."""
    return {
        "chain": DraftTree.chain(text.chain[:most]),
        "tree": DraftTree(text.nodes[:most], _PARENTS[:most]),
    }


@torch.inference_mode()
def _our_rows(target: Target, text: _Text, drafts: bool) -> dict[str, torch.Tensor]:
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


def _difference(a: torch.Tensor, b: torch.Tensor, typical: bool = False) -> float:
    """The largest between two logits of the rows that both have; inf where one is not a number.

    With ``typical``, the median row's.
    """
    rows = min(len(a), len(b))
    a, b = a[:rows].double(), b[:rows].to(a.device).double()
    apart = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(torch.inf).amax(1)
    return float(apart.median() if typical else apart.max())


@torch.inference_mode()
def _first_to_differ(target: Target, text: _Text, own: _OwnRows) -> str:
    """The layer where our hidden states leave the model's own."""
    layers = tuple(range(len(own.hidden["chain"])))
    target.prefill(text.prompt)
    apart = np.zeros(len(layers))
    for part, tree in _trees(text, target.max_nodes).items():
        hidden = target.forward(text.root, tree, hidden_layers=layers).hidden or {}
        for i, wanted in enumerate(own.hidden[part]):
            scale = float(wanted.abs().max()) or 1.0
            apart[i] = max(apart[i], _difference(hidden[i], wanted) / scale)
    # Rounding grows from layer to layer, and a fault is far larger.
    first = int(np.argmax(apart >= apart.max() / 10)) if layers else 0
    if first == 0:
        return "the embedding of ids and positions, or what stands behind the layers"
    layer = target.layers[first - 1]
    kinds = (type(module).__name__ for module in layer.modules())
    attention = next((kind for kind in kinds if "Attention" in kind), type(layer).__name__)
    return f"layer {first - 1} ({attention})"


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Refuse a tokenizer with ids that the model has no embedding of.

    Raises:
        ConfigurationError: with the first such token.
    """
    embedding: Any = model.get_input_embeddings()
    rows = int(embedding.weight.shape[0])
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= rows)
    if beyond:
        i, token = beyond[0]
        raise ConfigurationError(
            f"{what}: the tokenizer has {len(beyond)} tokens that the model has no embedding of, "
            f"{token!r} (id {i}) the first of them: there are {rows}. Take the tokenizer that the "
            "model was trained with, or resize the model's embeddings and save it again."
        )
