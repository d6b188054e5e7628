"""A model lent by its owner, given back as it was: the one place where everything is undone.

Target passes need another attention, packed linears and fused layers, in eval mode without
gradients. A process of its own never minds. A caller's model (`runners.compare`) must come back
unchanged. So nothing is undone step by step: the attributes of every module and configuration are
noted, and put back. A new way of changing an *instance* needs no line here; whoever changes a class
or a library must undo it in `given_back`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specbench.system import cuda_settings


@contextmanager
def given_back(model: PreTrainedModel) -> Iterator[None]:
    """What happens to ``model`` within is undone at its end, also after an error.

    Undone are: replaced or added modules, hooks and ``forward``s, the attention, training mode,
    ``requires_grad``, and parameters that became views of a common matrix. Values of weights are
    nobody's to change. torch's CUDA settings are set back, and its random numbers go on from where
    they were.
    """
    parameters = [(p, p.requires_grad, _address(p)) for p in model.parameters()]
    holders = [*model.modules(), *_configurations(model)]
    before = [(holder, _attributes(holder)) for holder in holders]
    with torch.random.fork_rng(_cuda_devices(model)), cuda_settings.kept():
        try:
            yield
        finally:
            for holder, attributes in before:
                _restore(holder, attributes)
            # The clone must be an ordinary tensor, wherever the caller is.
            with torch.inference_mode(False):
                for parameter, requires_grad, address in parameters:
                    if _address(parameter) != address:
                        parameter.data = parameter.data.clone()
                    parameter.requires_grad_(requires_grad)


def _address(parameter: torch.nn.Parameter) -> int | None:
    return None if parameter.is_meta else parameter.data_ptr()


def _cuda_devices(model: PreTrainedModel) -> list[int]:
    devices = {parameter.device for parameter in model.parameters()}
    return sorted({device.index or 0 for device in devices if device.type == "cuda"})


def _configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Of the model and its parts, and those inside them; each once."""
    waiting: list[Any] = [value for m in model.modules() for value in vars(m).values()]
    found: dict[int, PreTrainedConfig] = {}
    while waiting:
        value = waiting.pop()
        if isinstance(value, PreTrainedConfig) and id(value) not in found:
            found[id(value)] = value
            waiting += vars(value).values()
    return list(found.values())


def _attributes(holder: object) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and what is in it where it is a dictionary (children, parameters, hooks)."""
    return {
        name: (value, dict(value) if isinstance(value, dict) else None)
        for name, value in vars(holder).items()
    }


def _restore(holder: object, attributes: dict[str, tuple[Any, Any]]) -> None:
    present = vars(holder)
    for name in present.keys() - attributes.keys():
        del present[name]
    for name, (value, content) in attributes.items():
        if present.get(name) is not value:
            present[name] = value
        # Order counts: `named_modules` gives it.
        if content is not None and _places(value) != _places(content):
            value.clear()
            value.update(content)


def _places(content: dict[Any, Any]) -> list[tuple[Any, int]]:
    """Names with their objects; tensors do not compare to true or false."""
    return [(name, id(value)) for name, value in content.items()]
