"""What a model's own passes say of the self-check's text, and how far they lie apart.

Its own are those of transformers' attention and cache, one branch of a tree at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specbench.errors import ConfigurationError
from specbench.kernels.architectures import ELSE, is_mixture
from specbench.models.checks.check_text import PARENTS, ROWS, CheckText, path_to
from specbench.models.hidden_states import HiddenStates, decoder_layers

TIMES_SPREAD = 4  # what may differ in an audit, in spreads of the model's own passes
# And in the self-check. Of right random models up to 1,024 wide, with saturated attention, ours
# reach 4.4.
_TIMES = 8
# Of the largest logit. In float16 passes of 34 tiny architectures differ by up to 3.9 where the
# model's own do not, of SmolLM2 by 2.4: half of what is then allowed.
_ROUNDINGS = 2


@dataclass(frozen=True, slots=True)
class Spread:
    """How far logits of the same tokens lie apart in passes of one row and of many.

    Attributes:
        value: largest difference of a logit.
        rounding: what roundings of the largest logit may come to. Passes that happen to be the
            same to the last bit have no spread, and others may still round.
        times: that much may differ, in the larger of both.
    """

    value: float
    rounding: float
    times: int = TIMES_SPREAD

    @property
    def tolerance(self) -> float:
        return self.times * max(self.value, self.rounding)


def measure_spread(
    one: torch.Tensor, *many: torch.Tensor, typical: bool = False, times: int = TIMES_SPREAD
) -> Spread:
    """The spread of logits ``[rows, vocab]`` of one-row passes and of others over the same tokens.

    Most models compute norms and softmax in float32, in float64 too: a difference of float32
    roundings is then right in any dtype. ``typical`` as in `_difference`.
    """
    unit = max(torch.finfo(one.dtype).eps, torch.finfo(torch.float32).eps)
    largest = float(one.abs().nan_to_num(0.0, 0.0).max())
    value = max(difference(one, other, typical) for other in many)
    return Spread(value, _ROUNDINGS * unit * largest, times)


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Of a model's own passes over the text; the root is in both parts.

    Attributes:
        spread: of passes of one row and of many.
        moved: of ``positions``, where not all of them choose the same token.
    """

    logits: dict[str, torch.Tensor]  # by part, [rows, vocab]
    hidden: dict[str, list[torch.Tensor]]  # by part and layer, [rows, hidden]
    spread: Spread
    moved: int
    positions: int

    @property
    def finite(self) -> bool:
        return not any((rows.isnan() | rows.isposinf()).any() for rows in self.logits.values())

    @property
    def scale(self) -> float:
        """The standard deviation of a row's logits, ids that are ruled out left aside."""
        rows = self.logits["chain"].double()
        return float(torch.stack([row[row.isfinite()].std() for row in rows]).median())


@torch.inference_mode()
def own_rows(model: PreTrainedModel, text: CheckText) -> OwnRows:
    """What transformers' attention and cache give, and how far its own passes lie apart.

    Raises:
        ConfigurationError: the model has no cache of keys and values.
    """
    begun = _read(model, text.prompt, keep=1)
    if getattr(begun, "past_key_values", None) is None:
        raise ConfigurationError(
            f"{type(model).__name__} keeps a state instead of keys and values, which cannot go "
            f"back where a draft is rejected. {ELSE}"
        )
    tokens = [text.root, *text.chain]
    cache = copy.deepcopy(begun.past_key_values)
    one = torch.cat([_read(model, [token], cache).logits[0] for token in tokens])
    logits, hidden = _own_parts(model, text, begun)
    whole = _read(model, [*text.prompt, *tokens], keep=len(tokens)).logits[0]
    many = [logits["chain"][1:], whole]
    return OwnRows(
        logits=logits,
        hidden=hidden,
        spread=measure_spread(one, *many, typical=is_mixture(model), times=_TIMES),
        moved=_moved(one, *many),
        positions=len(tokens),
    )


def _read(model: PreTrainedModel, ids: Iterable[int], cache: Any = None, *, keep: int = 0) -> Any:
    row = torch.tensor([list(ids)], device=model.device)
    return model(input_ids=row, past_key_values=cache, use_cache=True, logits_to_keep=keep)


def _own_parts(
    model: PreTrainedModel, text: CheckText, begun: Any
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
    branches = [path_to(node) for node in range(len(PARENTS)) if node not in PARENTS]
    passes = [behind([text.root, *text.nodes[path]]) for path in branches]

    def in_tree(rows: list[torch.Tensor]) -> torch.Tensor:
        """``[ROWS, ..]`` of root and nodes, from the rows of each branch."""
        found = torch.empty(ROWS, *rows[0].shape[1:], dtype=rows[0].dtype, device=rows[0].device)
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


def difference(a: torch.Tensor, b: torch.Tensor, typical: bool = False) -> float:
    """The largest between two logits of the rows that both have; inf where one is not a number.

    With ``typical``, the median row's.
    """
    apart = differences(a, b)
    return float(apart.median() if typical else apart.max())


def differences(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``[rows]`` the largest between two logits of each row that both have; inf for no number."""
    rows = min(len(a), len(b))
    a, b = a[:rows].double(), b[:rows].to(a.device).double()
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(torch.inf).amax(1)
