"""Hidden states of chosen layers, taken out of a pass while it runs; embedding and LM head.

Transformers' ``output_hidden_states`` leaves a hook in every layer for all later passes, and before
its newest versions keeps the states of all layers. Here hooks are on the chosen layers, and only
while a pass runs that was asked for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from specbench.config.schema import FLOAT32_WEIGHTS
from specbench.errors import ConfigurationError
from specbench.kernels.compiled_pass import packed_model


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The list of modules that has the configuration's number of layers."""
    lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    n_layers = model.config.get_text_config().num_hidden_layers
    return next(m for m in lists if len(m) == n_layers)


class HiddenStates:
    """Hands out the hidden states of a model's passes.

    Args:
        layers: the model's decoder layers.
        device: where the states are wanted, on whatever device their layer lies.
    """

    def __init__(
        self, model: PreTrainedModel, layers: torch.nn.ModuleList, device: torch.device
    ) -> None:
        self._decoder: torch.nn.Module = model.get_decoder()
        self._layers, self._device = layers, device

    def check(self, wanted: Sequence[int], who: str = "the pass") -> None:
        """Refuse numbers of states that the model does not have, see ``Needs.hidden_layers``.

        Raises:
            ConfigurationError: names them, and those there are.
        """
        n = len(self._layers)
        outside = [str(i) for i in wanted if not -n - 1 <= i <= n]
        if outside:
            raise ConfigurationError(
                f"{who} asks for the hidden states {', '.join(outside)}, and the model has 0 to "
                f"{n} (0 is the embedding's output, {n} or -1 the states after the final norm). "
                "State others in needs.hidden_layers, or choose the model that the heads were "
                "trained for."
            )

    @contextmanager
    def collected(self, wanted: Sequence[int]) -> Iterator[Mapping[int, torch.Tensor]]:
        """What passes within it leave behind: ``[batch * rows, hidden]`` by number, as wanted."""
        found: dict[int, torch.Tensor] = {}
        if not wanted:
            yield found
            return
        self.check(wanted)
        n = len(self._layers)
        with ExitStack() as hooks:
            for i in wanted:
                place = i % (n + 1)
                keep = partial(self._keep, found, i)
                handle = (
                    self._decoder.register_forward_hook(lambda _m, _args, out, keep=keep: keep(out))
                    if place == n
                    else self._layers[place].register_forward_pre_hook(
                        lambda _m, args, named, keep=keep: keep(args or named["hidden_states"]),
                        with_kwargs=True,
                    )
                )
                hooks.callback(handle.remove)
            yield found

    def _keep(self, found: dict[int, torch.Tensor], number: int, value: Any) -> None:
        states: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
        if states.dim() == 4:  # several streams a row (Gemma-3n): the one that layers work on
            states = states[0]
        found[number] = states.flatten(0, -2).to(self._device)


class Embeddings:
    """``specbench.decoding.protocols.TargetEmbeddings`` of a model, packed or not."""

    def __init__(self, model: PreTrainedModel, draft_weights: str = FLOAT32_WEIGHTS) -> None:
        self._model, self._draft_weights = model, draft_weights

    @property
    def _lm_head(self) -> Any:
        return self._model.get_output_embeddings()

    @property
    def embedding(self) -> torch.Tensor:
        weight: Any = self._model.get_input_embeddings().weight
        return weight.detach()  # type: ignore[no-any-return]

    @property
    def lm_head(self) -> torch.Tensor:
        return self._lm_head.weight.detach()  # type: ignore[no-any-return]

    @property
    def lm_head_bias(self) -> torch.Tensor | None:
        bias: torch.Tensor | None = self._lm_head.bias
        return None if bias is None else bias.detach()

    @property
    def packed(self) -> str | None:
        return self._draft_weights if packed_model(self._model) else None

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        packed = packed_model(self._model)
        product = self._lm_head if packed is None else packed.lm_head
        # Of a model that is spread over GPUs it may lie on another one than the heads that ask.
        return product(states).to(states.device)
