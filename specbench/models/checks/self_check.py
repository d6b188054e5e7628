"""The self-check: a model reads here what it reads in transformers, or no run begins.

Our target has an attention, a cache and masks of its own, and on a CPU other products. Before
anything is measured, logits behind a prompt, of a chain and of a tree are compared with those of
the model as transformers loaded it: its attention, its cache, one branch at a time. Passes of one
row and of many round differently, the model's own too. How far those lie apart is measured, and
nothing may differ from them by more than a few times that.

What is measured could excuse anything, so it has a ceiling: a model whose own passes are further
apart than roundings can be is refused. Packed products are compared one by one with torch's own;
their roundings, which a deep or saturated model enlarges, are measured in transformers' attention.
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
from specbench.kernels.architectures import ELSE, is_mixture, scaled_every, window_sizes
from specbench.kernels.attention import install
from specbench.models.checks.products import differing_product, differing_step, sample_products
from specbench.models.hidden_states import HiddenStates, decoder_layers
from specbench.models.target import Target

_UNPACKED = "Type engine.packed.enabled=false to do without."

TIMES_SPREAD = 4  # what may differ, in spreads of the model's own passes
# Of the largest logit. In float16 passes of 34 tiny architectures differ by up to 3.9 where the
# model's own do not, of SmolLM2 by 2.4: half of what is then allowed.
_ROUNDINGS = 2
# What a model's own passes may differ by, as a share of what the logits of a row vary by (their
# standard deviation). Of 50 architectures, widths to 1,024 and initial ranges to .4, right ones
# reach .0007 in float32 and .12 in half precision; attention that looks ahead .03 to 3.
_CEILING = {torch.float32: 0.01, torch.float64: 0.01}
_CEILING_OF_HALVES = 0.5

_PROMPT, _CHAIN = 16, 6  # tokens
_SINGLE = 4  # rows that are also read one by one
# Most nodes have an earlier one that they must not see, and depths do not follow the order.
_PARENTS: IntArray = np.array([-1, -1, 0, 1, 1, 2, 4, 3], dtype=np.int64)
_ROWS = 1 + len(_PARENTS)
# The last row's number in its pass, less what it may be at most by its depth: a step in what
# positions do shall lie between both.
_BEFORE_STEP = 5
# Work of one prompt's pass, so that the text outgrows a window or reaches a step. It is read up to
# five times: some three seconds on two cores.
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
    text, lengths = _make_text(model, longest)
    attention = model.config._attn_implementation
    own = _attempt(lambda: _own_rows(model, text), f"{what}: transformers' own pass fails")
    failing = f"{what} does not decode here"
    if own.finite:
        _check_ceiling(own, failing)
    products = sample_products(model)
    target = _attempt(lambda: make(model), failing)
    if wrong := differing_product(model, products) or differing_step(model):
        raise ConfigurationError(f"{failing}: {wrong} {_UNPACKED}")
    if own.finite and target.packed_weights["layers"]:
        plain, own = own, _attempt(lambda: _packed_rows(target, text, own, attention), failing)
        if own.finite:
            _check_ceiling(own, failing, plain)
    ours = _attempt(lambda: _our_rows(target, text, drafts), failing)
    if not own.finite:  # as after an overflow: its cases will fail, and say so
        return target, SelfCheck(len(text.prompt), None, None, {}, lengths)
    mixture = is_mixture(model)
    found = {part: _difference(ours[part], own.logits[part], mixture) for part in ours}
    part, largest = max(found.items(), key=lambda item: item[1])
    spread = own.spread
    if largest > spread.tolerance:
        raise ConfigurationError(
            f"{failing} as it does in transformers: logits of a {part} differ by {largest:.2g} "
            f"from those of its own attention and cache, whose passes of one row and of many "
            f"differ by {spread.value:.2g} (allowed: {spread.tolerance:.2g}). First to "
            f"differ: {_first_to_differ(target, text, own)}. {ELSE}"
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


def _check_ceiling(own: _OwnRows, failing: str, plain: _OwnRows | None = None) -> None:
    """Refuse a spread that is no rounding; of packed products where there is a ``plain`` one.

    Raises:
        ConfigurationError: it says what the logits vary by.
    """
    ceiling = _CEILING.get(own.logits["chain"].dtype, _CEILING_OF_HALVES)
    value, scale = own.spread.value, own.scale
    if value <= max(ceiling * scale, own.spread.rounding):
        return
    amounts = f"differ by {value:.2g}, where logits of a row vary by {scale:.2g}"
    allowed = f"roundings come to {ceiling * scale:.2g} at most"
    if plain is not None:
        raise ConfigurationError(
            f"{failing}: logits with packed products and without {amounts}; {allowed}. {_UNPACKED}"
        )
    raise ConfigurationError(
        f"{failing}: in transformers itself, passes of one row and of many over the same text "
        f"{amounts}; {allowed}. What it answers depends on how a text is cut into passes, as where "
        f"attention looks ahead (use_bidirectional_attention) or a cache is not exact. {ELSE}"
    )


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
    moved: int  # of ``positions``, where not all passes choose the same token
    positions: int

    @property
    def finite(self) -> bool:
        return not any((rows.isnan() | rows.isposinf()).any() for rows in self.logits.values())

    @property
    def scale(self) -> float:
        """The standard deviation of a row's logits, ids that are ruled out left aside."""
        rows = self.logits["chain"].double()
        return float(torch.stack([row[row.isfinite()].std() for row in rows]).median())


def _make_text(model: PreTrainedModel, longest: int) -> tuple[_Text, dict[str, str]]:
    """Random ids; as many as windows and steps of position need, where that is cheap."""
    per_token = 2 * sum(p.numel() for p in model.parameters())
    cheap = int(_FLOPS.get(model.device.type, 0) / per_token)
    length, lengths = max(1, min(_PROMPT, longest - _ROWS)), {}
    for window in window_sizes(model):
        wanted = min(window + max(window // 2, _ROWS), longest - _ROWS)
        if wanted <= window:
            said = "not reached by this run's texts"
        elif wanted > max(cheap, length):
            said = "not outgrown: the check would take too long"
        else:
            said, length = "outgrown", max(length, wanted)
        lengths[f"window of {window}"] = said
    for step in scaled_every(model):
        wanted = -(-(length + _BEFORE_STEP) // step) * step - _BEFORE_STEP
        if wanted >= longest:
            said = "not reached by this run's texts"
        elif wanted > max(cheap, length):
            said = "not reached: the check would take too long"
        else:
            said, length = "reached", max(length, wanted)
        lengths[f"attention scaled anew every {step}"] = said
    tables: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    vocab = min(int(table.weight.shape[0]) for table in tables)
    # Special tokens, and ids that stand for images, are at the ends of vocabularies.
    ids = np.random.default_rng(0).integers(vocab // 16, vocab // 2 + 1, length + _CHAIN + _ROWS)
    prompt, root, chain, nodes = np.split(ids, np.cumsum([length, 1, _CHAIN]))
    return _Text(prompt, int(root[0]), chain, nodes), lengths


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
    begun = _read(model, text.prompt, keep=1)
    if getattr(begun, "past_key_values", None) is None:
        raise ConfigurationError(
            f"{type(model).__name__} keeps a state instead of keys and values, which cannot go "
            f"back where a draft is rejected. {ELSE}"
        )
    tokens = [text.root, *text.chain]
    cache = copy.deepcopy(begun.past_key_values)
    one = torch.cat([_read(model, [token], cache).logits[0] for token in tokens[:_SINGLE]])
    logits, hidden = _own_parts(model, text, begun)
    whole = _read(model, [*text.prompt, *tokens], keep=len(tokens)).logits[0]
    many = [logits["chain"][1:][:_SINGLE], whole[:_SINGLE]]
    return _OwnRows(
        logits=logits,
        hidden=hidden,
        spread=measure_spread(one, *many, typical=is_mixture(model)),
        moved=_moved(one, *many),
        positions=_SINGLE,
    )


def _packed_rows(target: Target, text: _Text, plain: _OwnRows, attention: str) -> _OwnRows:
    """The same rows by packed products in transformers' ``attention``, and what the packing moves.

    By the fused steps too, which round otherwise as well.
    """
    model: PreTrainedModel = target.model
    model.set_attn_implementation(attention)
    try:
        with torch.inference_mode():
            logits, _ = _own_parts(model, text, _read(model, text.prompt, keep=1))
    finally:
        install(model)
    mixture = is_mixture(model)
    apart = [_difference(plain.logits[part], rows, mixture) for part, rows in logits.items()]
    spread = dataclasses.replace(plain.spread, value=max(plain.spread.value, *apart))
    moved = sum(_moved(plain.logits[part], rows) for part, rows in logits.items())
    return dataclasses.replace(
        plain,
        logits=logits,
        spread=spread,
        moved=plain.moved + moved,
        positions=plain.positions + sum(map(len, logits.values())),
    )


def _read(model: PreTrainedModel, ids: Iterable[int], cache: Any = None, *, keep: int = 0) -> Any:
    row = torch.tensor([list(ids)], device=model.device)
    return model(input_ids=row, past_key_values=cache, use_cache=True, logits_to_keep=keep)


def _own_parts(
    model: PreTrainedModel, text: _Text, begun: Any
) -> tuple[dict[str, torch.Tensor], dict[str, list[torch.Tensor]]]:
    """Logits by part, and hidden states by part and layer, behind the pass ``begun``."""
    # Not by transformers' own option, which would leave a hook in every layer for the whole run.
    layers = decoder_layers(model)
    states = HiddenStates(model, layers, model.device)
    numbers = range(len(layers) + 1)

    def behind(ids: list[int]) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        with states.collected(numbers) as hidden:
            return _read(model, ids, copy.deepcopy(begun.past_key_values)).logits[0], hidden

    chain, chain_states = behind([text.root, *text.chain])
    branches = [_path(node) for node in range(len(_PARENTS)) if node not in _PARENTS]
    passes = [behind([text.root, *text.nodes[path]]) for path in branches]

    def in_tree(rows: list[torch.Tensor]) -> torch.Tensor:
        """``[_ROWS, ..]`` of root and nodes, from the rows of each branch."""
        found = torch.empty(_ROWS, *rows[0].shape[1:], dtype=rows[0].dtype, device=rows[0].device)
        for path, branch in zip(branches, rows, strict=True):
            found[[0, *(node + 1 for node in path)]] = branch
        return found

    return (
        {
            "chain": torch.cat([begun.logits[0], chain]),
            "tree": in_tree([logits for logits, _ in passes]),
        },
        {
            "chain": [chain_states[i] for i in numbers],
            "tree": [in_tree([hidden[i] for _, hidden in passes]) for i in numbers],
        },
    )


def _moved(one: torch.Tensor, *others: torch.Tensor) -> int:
    """Rows whose likeliest token is not the same in all."""
    same = [one.argmax(-1) == other.argmax(-1) for other in others]
    return int((~torch.stack(same).all(0)).sum())


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
