"""The self-check: a model reads here what it reads in transformers, or no run begins.

Our target has an attention, a cache and masks of its own, and on a CPU whole passes. Before
anything is measured, logits after a prompt, of a chain, of a tree, and of the text that goes on
behind half a chain and half a path of that tree are compared with the logits of the model as
transformers loaded it: its attention, its cache, one branch at a time. Passes of one row and of
many round differently in transformers, too. This spread is measured, and our logits may differ from
transformers' by a few times as much.

The spread has a ceiling, or it could excuse anything: a model is refused if its passes in
transformers disagree by more than rounding can explain.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specbench.arrays import IntArray
from specbench.decoding.structs import NO_TOKENS, DraftTree
from specbench.decoding.tree import visibility
from specbench.errors import ConfigurationError, SpecBenchError, first_line
from specbench.kernels.architectures import ELSE, is_mixture, scaled_every, window_sizes
from specbench.kernels.weight_forms import is_quantised
from specbench.models.hidden_states import HiddenStates, decoder_layers
from specbench.models.target import Target

# What may differ, in spreads of the model's own passes. Of right random models up to 1,024 wide,
# with saturated attention, ours reach 4.4.
TIMES = 8
# Of the largest logit. In float16 passes of 34 tiny architectures differ by up to 3.9 where the
# model's own do not, of SmolLM2 by 2.4: half of what is then allowed.
_ROUNDINGS = 2
# What a model's own passes may differ by, as a share of what the logits of a row vary by (their
# standard deviation). Of 50 architectures, widths to 1,024 and initial ranges to .4, right ones
# reach .0007 in float32 and .12 in half precision; attention that looks ahead .03 to 3.
_CEILING = {torch.float32: 0.01, torch.float64: 0.01}
_CEILING_OF_HALVES = 0.5

_TEXTS = 4  # that a mixture of experts reads; a router's near tie is in one or the other
_PROMPT, _CHAIN = 16, 6  # tokens
# Most nodes have an earlier one that they must not see, and depths do not follow the order.
_PARENTS: IntArray = np.array([-1, -1, 0, 1, 1, 2, 4, 3], dtype=np.int64)
_ROWS = 1 + len(_PARENTS)
# Half of a path, in the tree with siblings between.
_HALVES = {part: np.array(path) for part, path in (("chain", [0, 1]), ("tree", [1, 4]))}
_CONTINUED = "continued "  # chain, tree
# The last row's number in its pass, less what it may be at most by its depth: a step in what
# positions do shall lie between both.
_BEFORE_STEP = 5
# Work of one prompt's pass, so that the text outgrows a window or reaches a step. It is read up to
# five times: some three seconds on two cores.
FLOPS = {"cpu": 5e10, "cuda": 2e14}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Result of a self-check; written to the manifest.

    Attributes:
        prompt: tokens of the text.
        spread, tolerance: of the model's own passes; None where it has no finite logits.
        difference: the largest between our logits and the model's own, by part of the check:
            of a chain, of a tree, and of a row of either that is read once half of its path is
            committed.
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


class Spread(NamedTuple):
    """The difference of the same tokens' logits between passes of one row and of many.

    ``rounding`` is the largest rounding error of the largest logit: passes that happen to be the
    same to the last bit have no spread, and others may still round.
    """

    value: float
    rounding: float

    def tolerance(self, times: int) -> float:
        """Multiply the larger of spread and rounding by ``times``."""
        return times * max(self)


class _Text(NamedTuple):
    """A prompt and, after its last token (the root), a chain and a tree."""

    prompt: IntArray
    root: int
    chain: IntArray  # [_CHAIN]
    nodes: IntArray  # [len(_PARENTS)]

    def trees(self, most: int) -> dict[str, DraftTree]:
        """Make chain and tree, each cut to its first ``most`` nodes."""
        return {
            "chain": DraftTree.chain(self.chain[:most]),
            "tree": DraftTree(self.nodes[:most], _PARENTS[:most]),
        }


class _ReferenceRows(NamedTuple):
    """Results of transformers' passes over the text; the root is in both parts."""

    logits: dict[str, torch.Tensor]  # by part, [rows, vocab]
    hidden: dict[str, list[torch.Tensor]]  # by part and layer, [rows, hidden]
    spread: Spread
    moved: int  # of `_CHAIN` and the root, where not all passes choose the same token


def checked(
    model: PreTrainedModel,
    make: Callable[[PreTrainedModel], Target],
    *,
    subject: str,
    longest: int,
    drafts: bool = False,
) -> tuple[Target, SelfCheck]:
    """Make a target of ``model`` and compare it with the model's own passes.

    Args:
        model: as transformers loaded it, on its device; ``make`` gives it another attention.
        subject: the model as its user names it, e.g. ``model.id=FOLDER``.
        longest: tokens of the longest text that will be read.
        drafts: the target is a draft model's, whose trees grow without a root.

    Raises:
        ConfigurationError: logits differ, or a pass fails; names the layer or the feature.
    """
    failing = f"{subject} does not decode here"
    mixture = is_mixture(model)
    drawn = [make_text(model, longest, seed) for seed in range(_TEXTS if mixture else 1)]
    texts, lengths = [text for text, _ in drawn], drawn[0][1]
    references = [
        _attempt(partial(_reference_rows, model, text), f"{subject}: transformers' own pass fails")
        for text in texts
    ]
    spread, logits = references[0].spread, references[0].logits
    finite = not any((rows.isnan() | rows.isposinf()).any() for rows in logits.values())
    if finite:
        _check_ceiling(spread, logits["chain"], failing, is_quantised(model))
    target = _attempt(partial(make, model), failing)
    # In a mixture of experts a rounding sends a row at a near tie to another expert, so that rows
    # of one text say nothing; a row that is apart in every text is wrong.
    tolerance = spread.tolerance(TIMES)
    smallest: dict[str, torch.Tensor] = {}
    for text, reference in zip(texts, references, strict=True):
        ours = _attempt(partial(_our_rows, target, text, drafts), failing)
        for part, rows in ours.items():
            differences = _differences(rows, reference.logits[part])
            smallest[part] = torch.minimum(differences, smallest.get(part, differences))
        if not any((rows > tolerance).any() for rows in smallest.values()):
            break
    if not finite:  # as after an overflow: its cases will fail, and say so
        return target, SelfCheck(len(texts[0].prompt), None, None, {}, lengths)
    difference = {part: float(rows.max()) for part, rows in smallest.items()}
    apart = [(part, largest) for part, largest in difference.items() if largest > tolerance]
    for part, largest in apart[:1]:  # what is wrong in a chain goes on to be wrong
        packed, where = target.packed_weights["products"], "what a commit keeps"
        if not part.startswith(_CONTINUED):
            where = _first_to_differ(target, texts[0], references[0])
        raise ConfigurationError(
            f"{failing} as it does in transformers: logits of a {part} differ by {largest:.2g} "
            f"from its own attention's and cache's, whose passes of one row and of many "
            f"differ by {spread.value:.2g} (allowed: {tolerance:.2g}). First to "
            f"differ: {where}. "
            f"{'Type engine.packed.enabled=false to do without one call.' if packed else ELSE}"
        )
    return target, SelfCheck(
        prompt=len(texts[0].prompt),
        spread=spread.value,
        tolerance=tolerance,
        difference=difference,
        lengths=lengths,
        moved=references[0].moved,
        positions=1 + _CHAIN,
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


def _check_ceiling(spread: Spread, logits: torch.Tensor, failing: str, packed: bool) -> None:
    """Refuse a spread that is no rounding, of ``logits [rows, vocab]``."""
    # Ids that are ruled out left aside.
    scale = float(torch.stack([row[row.isfinite()].double().std() for row in logits]).median())
    ceiling = _CEILING.get(logits.dtype, _CEILING_OF_HALVES) * scale
    if spread.value > max(ceiling, spread.rounding):
        packed_too = (
            "Or its products depend on the other rows of a pass (activations are quantised "
            "together), so that drafts would change outputs. "
        )
        raise ConfigurationError(
            f"{failing}: in transformers itself, passes of one row and of many over the same text "
            f"differ by {spread.value:.2g}, where logits of a row vary by {scale:.2g}; roundings "
            f"come to {ceiling:.2g} at most. What it answers depends on how a text is cut into "
            "passes, as where attention looks ahead (use_bidirectional_attention) or a cache is "
            f"not exact. {packed_too if packed else ''}{ELSE}"
        )


# -- the text ------------------------------------------------------------------------------------


def make_text(model: PreTrainedModel, longest: int, seed: int = 0) -> tuple[_Text, dict[str, str]]:
    """Draw random ids; as many as windows and steps of position need, where that is cheap."""
    per_token = 2 * sum(p.numel() for p in model.parameters())
    length = max(1, min(_PROMPT, longest - _ROWS))
    lengths: dict[str, str] = {}
    cheap = max(length, int(FLOPS.get(model.device.type, 0) / per_token))

    def grow(name: str, tokens: int, fits: bool) -> int:
        lengths[name] = "not reached by this run's texts"
        if fits:
            lengths[name] = "reached" if tokens <= cheap else "not reached: it would take too long"
        return max(length, tokens) if fits and tokens <= cheap else length

    for window in window_sizes(model):
        required = min(window + max(window // 2, _ROWS), longest - _ROWS)
        length = grow(f"window of {window}", required, required > window)
    for step in scaled_every(model):
        required = -(-(length + _BEFORE_STEP) // step) * step - _BEFORE_STEP
        length = grow(f"attention scaled anew every {step}", required, required < longest)
    tables: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    vocab = min(int(table.weight.shape[0]) for table in tables)
    # Special tokens, and ids that stand for images, are at the ends of vocabularies.
    ids = np.random.default_rng(seed).integers(vocab // 16, vocab // 2 + 1, length + _CHAIN + _ROWS)
    prompt, root, chain, nodes = np.split(ids, np.cumsum([length, 1, _CHAIN]))
    return _Text(prompt, int(root[0]), chain, nodes), lengths


def _path_to(node: int) -> list[int]:
    """List the nodes from below the root down to ``node``."""
    return [*_path_to(int(_PARENTS[node])), node] if node >= 0 else []


# -- transformers' attention and cache, one branch at a time -------------------------------------


@torch.inference_mode()
def _reference_rows(model: PreTrainedModel, text: _Text) -> _ReferenceRows:
    prompt_pass = _read(model, text.prompt, keep=1)
    if getattr(prompt_pass, "past_key_values", None) is None:
        raise ConfigurationError(
            f"{type(model).__name__} keeps a state instead of keys and values, which cannot go "
            f"back where a draft is rejected. {ELSE}"
        )
    tokens = [text.root, *text.chain]
    cache = copy.deepcopy(prompt_pass.past_key_values)
    end = len(text.prompt)
    singles = [_read(model, [token], cache, end + i).logits[0] for i, token in enumerate(tokens)]
    single_rows = torch.cat(singles)
    # Not by transformers' own option, which would leave a hook in every layer for the whole run.
    states, numbers = HiddenStates(model), range(len(decoder_layers(model)) + 1)

    def behind(ids: list[int]) -> list[torch.Tensor]:
        """Read ``ids`` after the prompt: logits, and hidden states by layer."""
        with states.collected(numbers) as hidden:
            logits = _read(model, ids, copy.deepcopy(prompt_pass.past_key_values), end).logits[0]
        return [logits, *(hidden[i] for i in numbers)]

    chain, *chain_states = behind(tokens)
    paths = [_path_to(node) for node in range(len(_PARENTS)) if node not in _PARENTS]
    branches = [behind([text.root, *text.nodes[path]]) for path in paths]
    tree = [rows.new_empty(_ROWS, rows.shape[1]) for rows in branches[0]]
    for path, branch in zip(paths, branches, strict=True):
        for whole, rows in zip(tree, branch, strict=True):
            whole[[0, *(node + 1 for node in path)]] = rows
    many = [chain, _read(model, [*text.prompt, *tokens], keep=len(tokens)).logits[0]]
    same = torch.stack([single_rows.argmax(-1) == other.argmax(-1) for other in many]).all(0)
    logits = {"chain": torch.cat([prompt_pass.logits[0], chain]), "tree": tree[0]}
    return _ReferenceRows(
        logits=logits | {_CONTINUED + part: rows for part, rows in logits.items()},
        hidden={"chain": chain_states, "tree": tree[1:]},
        spread=measure_spread(single_rows, *many, typical=is_mixture(model)),
        moved=int((~same).sum()),
    )


def _read(
    model: PreTrainedModel, ids: Iterable[int], cache: Any = None, first: int = 0, *, keep: int = 0
) -> Any:
    row = torch.tensor([list(ids)], device=model.device)
    return model(
        input_ids=row,
        # Some models (Bamba) would count from 0 again behind a text.
        position_ids=torch.arange(first, first + row.shape[1], device=model.device)[None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
    )


def measure_spread(single: torch.Tensor, *others: torch.Tensor, typical: bool = False) -> Spread:
    """Measure the spread of logits ``[rows, vocab]`` of one-row passes and of others.

    Most models compute norms and softmax in float32, in float64 too: a difference of float32
    roundings is then right in any dtype. With ``typical``, the median row's in place of the
    largest.
    """
    unit = max(torch.finfo(single.dtype).eps, torch.finfo(torch.float32).eps)
    largest = float(single.abs().nan_to_num(0.0, 0.0).max())
    rows = [_differences(single, other) for other in others]
    value = max(float(row.median() if typical else row.max()) for row in rows)
    return Spread(value, _ROUNDINGS * unit * largest)


def _differences(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute ``[rows]`` largest differences, of the rows that both have; inf for NaN."""
    rows = min(len(a), len(b))
    a, b = a[:rows].double(), b[:rows].to(a.device).double()
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(torch.inf).amax(1)


# -- our attention, cache and masks --------------------------------------------------------------


@torch.inference_mode()
def _our_rows(target: Target, text: _Text, drafts: bool) -> dict[str, torch.Tensor]:
    """Compute logits by part; fewer rows if the target's largest tree has fewer nodes."""
    rows, trees = {}, text.trees(target.max_nodes)
    # The chain again behind the prompt read anew, where nothing of the first text may be left.
    for parts in (("chain", "tree"), ("chain",)):
        # Cloned, since a captured pass overwrites the logits of the pass before.
        prompt = target.prefill(text.prompt).logits[-1:].clone()
        if drafts:
            root = target.append(torch.tensor([text.root], device=target.device)).logits.clone()
        for part in parts:
            tree = trees[part]
            if drafts:
                visible, depths = visibility(torch.from_numpy(tree.parents).to(target.device))
                ids = torch.as_tensor(tree.tokens, device=target.device)
                below = target.extend(ids, visible[1:, 1:], depths[1:] - 1).logits
                read = torch.cat([root, below])
                target.cache.retained = 0
            else:
                scores = target.forward(text.root, tree)
                read = scores.logits.clone()
            rows[part] = torch.cat([prompt, read]) if part == "chain" else read
        path = _HALVES[part] if (tree.parents == _HALVES[part][-1]).any() else NO_TOKENS
        if not drafts and scores.verified is not None:
            path = scores.verified[0]  # the pass itself has kept its rows
        last, after = int(path[-1]) if len(path) else -1, rows[part].clone()
        for child in np.flatnonzero(tree.parents == last)[:1]:
            token = int(tree.tokens[child])
            if drafts:
                target.cache.commit(torch.from_numpy(path), len(path))
                following = target.append(torch.tensor([token], device=target.device))
            else:
                target.commit(tree, path)
                following = target.forward(token, DraftTree.empty())
            after[child - len(tree)] = following.logits[-1]
        rows[_CONTINUED + part] = after
    return rows


@torch.inference_mode()
def _first_to_differ(target: Target, text: _Text, reference: _ReferenceRows) -> str:
    """Name the first layer whose hidden states differ from transformers'."""
    layers = tuple(range(len(reference.hidden["chain"])))
    target.prefill(text.prompt)
    by_layer = np.zeros(len(layers))
    for part, tree in text.trees(target.max_nodes).items():
        hidden = target.forward(text.root, tree, hidden_layers=layers).hidden or {}
        for i, expected_hidden in enumerate(reference.hidden[part]):
            difference = float(_differences(hidden[i], expected_hidden).max())
            by_layer[i] = max(by_layer[i], difference / (float(expected_hidden.abs().max()) or 1.0))
    # Rounding grows from layer to layer, and a fault is far larger.
    first = int(np.argmax(by_layer >= by_layer.max() / 10)) if layers else 0
    if first == 0:
        return "the embedding of ids and positions, or what follows the layers"
    layer = target.layers[first - 1]
    kinds = (type(module).__name__ for module in layer.modules())
    attention = next((kind for kind in kinds if "Attention" in kind), type(layer).__name__)
    return f"layer {first - 1} ({attention})"


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
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
            f"{key}: the tokenizer has {len(beyond)} tokens that the model has no embedding of, "
            f"{token!r} (id {i}) the first of them: there are {rows}. Take the tokenizer that the "
            "model was trained with, or resize the model's embeddings and save it again."
        )
