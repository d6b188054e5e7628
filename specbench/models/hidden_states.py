"""Hidden states of chosen layers, taken out of a pass while it runs; embedding and LM head.

Transformers' ``output_hidden_states`` leaves a hook in every layer for all later passes, and before
its newest versions keeps the states of all layers. Here hooks are on the chosen layers, and only
while a pass runs that was asked for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from specbench.config.schema import FLOAT32_WEIGHTS
from specbench.errors import ConfigurationError
from specbench.kernels.compiled_pass import packed_model


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Find the list of modules that has the configuration's number of layers."""
    lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    n_layers = model.config.get_text_config().num_hidden_layers
    return next(m for m in lists if len(m) == n_layers)


class HiddenStates:
    """Hands out the hidden states of a model's passes, on the device of its embedding."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder: torch.nn.Module = model.get_decoder()
        self._layers = decoder_layers(model)
        self._device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment]

    def check(self, numbers: Sequence[int], who: str = "the pass") -> None:
        """Refuse numbers of states that the model does not have, see ``Needs.hidden_layers``.

        Raises:
            ConfigurationError: names them, and those there are.
        """
        n = len(self._layers)
        outside = [str(i) for i in numbers if not -n - 1 <= i <= n]
        if outside:
            raise ConfigurationError(
                f"{who} asks for the hidden states {', '.join(outside)}, and the model has 0 to "
                f"{n} (0 is the embedding's output, {n} or -1 the states after the final norm). "
                "State others in needs.hidden_layers, or choose the model that the heads were "
                "trained for."
            )

    @contextmanager
    def collected(self, numbers: Sequence[int]) -> Iterator[Mapping[int, torch.Tensor]]:
        """Collect the states ``[batch * rows, hidden]`` of passes within, by number."""
        states: dict[int, torch.Tensor] = {}
        if not numbers:
            yield states
            return
        self.check(numbers)
        n = len(self._layers)
        with ExitStack() as hooks:
            for i in numbers:
                keep, layer = partial(self._keep, states, i), i % (n + 1)
                handle = (
                    self._decoder.register_forward_hook(lambda _m, _args, out, keep=keep: keep(out))
                    if layer == n
                    else self._layers[layer].register_forward_pre_hook(
                        lambda _m, args, named, keep=keep: keep(args or named["hidden_states"]),
                        with_kwargs=True,
                    )
                )
                hooks.callback(handle.remove)
            yield states

    def _keep(self, states: dict[int, torch.Tensor], number: int, value: Any) -> None:
        rows: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
        if rows.dim() == 4:  # several streams a row (Gemma-3n): the one that layers work on
            rows = rows[0]
        states[number] = rows.flatten(0, -2).to(self._device)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """``specbench.decoding.protocols.TargetEmbeddings`` of a model, or of its files."""

    embedding: torch.Tensor
    lm_head: torch.Tensor
    lm_head_bias: torch.Tensor | None
    packed: str | None
    product: Callable[[torch.Tensor], torch.Tensor]  # with the LM head

    @classmethod
    def from_model(cls, model: PreTrainedModel, draft_weights: str = FLOAT32_WEIGHTS) -> Embeddings:
        """Take those of ``model``, packed or not."""
        head: Any = model.get_output_embeddings()
        table: Any = model.get_input_embeddings().weight
        packed = packed_model(model)
        return cls(
            embedding=table.detach(),
            lm_head=head.weight.detach(),
            lm_head_bias=None if head.bias is None else head.bias.detach(),
            packed=None if packed is None else draft_weights,
            product=head if packed is None else packed.lm_head,
        )

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        # Of a model that is spread over GPUs it may lie on another one than the heads that ask.
        return self.product(states).to(states.device)
