"""A model lent by its owner, given back as it was: the one place where everything is undone.

Target passes need another attention, packed linears and fused layers, in eval mode without
gradients. A process of its own never minds. A caller's model (`runners.compare`) must come back
unchanged. So nothing is undone step by step: the attributes of every module and configuration are
noted, and put back. A new way of changing an *instance* needs no line here; whoever changes a class
or a library must undo it in `restored_on_exit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specbench.system import cuda_settings


@contextmanager
def restored_on_exit(model: PreTrainedModel) -> Iterator[None]:
    """Undo on exit what happened to ``model`` within, also after an error.

    Undone are: replaced or added modules, hooks and ``forward``s, the attention, training mode,
    ``requires_grad``, and parameters that became views of a common matrix. Values of weights are
    nobody's to change. torch's CUDA settings are set back, and its random numbers go on from where
    they were.
    """
    parameters = [(p, p.requires_grad, _address(p)) for p in model.parameters()]
    before = [(holder, _attributes(holder)) for holder in _holders(model)]
    devices = {parameter.device for parameter in model.parameters()}
    gpus = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(gpus), cuda_settings.restored_on_exit():
        try:
            yield
        finally:
            for holder, attributes in before:
                vars(holder).clear()
                for name, (value, content) in attributes.items():
                    if content is not None:
                        value.clear()
                        value.update(content)
                    vars(holder)[name] = value
            # The clone must be an ordinary tensor, wherever the caller is.
            with torch.inference_mode(False):
                for parameter, requires_grad, address in parameters:
                    if _address(parameter) != address:
                        parameter.data = parameter.data.clone()
                    parameter.requires_grad_(requires_grad)


def _address(parameter: torch.nn.Parameter) -> int | None:
    return None if parameter.is_meta else parameter.data_ptr()


def _holders(model: PreTrainedModel) -> list[Any]:
    """List the modules, their configurations and those inside them, each once."""
    holders: dict[int, Any] = {id(module): module for module in model.modules()}
    waiting = [value for module in model.modules() for value in vars(module).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, PreTrainedConfig) and id(value) not in holders:
            holders[id(value)] = value
            waiting += vars(value).values()
    return list(holders.values())


def _attributes(holder: object) -> dict[str, tuple[Any, dict[Any, Any] | None]]:
    """Copy the attributes, and the content of dictionaries (children, parameters, hooks)."""
    return {
        name: (value, dict(value) if isinstance(value, dict) else None)
        for name, value in vars(holder).items()
    }
