"""Layers that keep a state, row by row, so that rejected drafts can be taken back.

A recurrent layer (gated delta rule, Kimi's delta rule, Mamba-2) folds each row into a state, and a
short convolution keeps its last inputs; neither can forget a row. So a pass never writes the
committed states. It leaves the inputs of its kernels, and a commit computes the states anew from
those of the accepted rows: one step of the recurrence for each, and no weight is read. A row of a
tree starts from the state after its parent's row, and a convolution follows a row's ancestors.

transformers' layers call their kernels by names in their own files; `row_by_row` puts ours there
while a pass runs. A prompt keeps the stock kernel over chunks. All later passes go row by row
through the stock recurrent one (Mamba-2: a formula equal to it), so k rows are the same
computation as k passes of one row; chunks would round differently.

Replay from kept inputs: vLLM's ReplaySSM (RFC 47572) and ``dflash/model_mlx.py`` of z-lab/dflash;
each node from its parent's state: vLLM's RFC 54080.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from specbench.arrays import IntArray
from specbench.errors import ConfigurationError
from specbench.kernels.architectures import ELSE, keeps_states

Rows = slice | torch.Tensor
State = torch.Tensor | None
Outputs = tuple[torch.Tensor, torch.Tensor]  # ``[1, rows, heads, size]``, and the state behind
Recurrence = Callable[[Rows, State], Outputs]  # of rows of a pass, one after the other
Kernel = Callable[..., Outputs]
_Key = tuple[int, int]
Convolution = Callable[..., torch.Tensor]

CONVOLUTION, SCAN = "causal_conv1d_fn", "mamba2_chunk_scan"
# Kernels over chunks of a text, and the recurrent ones of the same files.
DELTA_RULES = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}


class Kept(NamedTuple):
    """A layer's state behind the committed text."""

    inputs: torch.Tensor  # the convolution's last, ``[1, channels, kernel]``
    recurrent: State = None  # ``[1, heads, .., ..]``; before any text, and in LFM2, there is none


@dataclass(slots=True)
class LayerPass:
    """What the last pass left of a layer, to commit some of its rows."""

    window: torch.Tensor  # kept inputs and those of the pass, ``[1, channels, kernel + rows]``
    recurrence: Recurrence | None = None
    last: State = None  # behind all rows of a chain

    def behind(self, state: Kept, rows: torch.Tensor | None, count: int) -> Kept:
        """Compute the state behind ``rows [count]``; None: behind the first ``count``."""
        kernel, whole = state.inputs.shape[-1], self.window.shape[-1]
        accepted: Rows = slice(count) if rows is None else rows
        if rows is None:
            inputs = self.window[..., count : count + kernel].clone()
        else:
            text = torch.arange(kernel, device=rows.device)
            inputs = self.window[..., torch.cat([text, rows + kernel])[-kernel:]]
        if self.recurrence is None:
            return Kept(inputs)
        if rows is None and self.last is not None and kernel + count == whole:
            return Kept(inputs, self.last)
        return Kept(inputs, self.recurrence(accepted, state.recurrent)[1])


class States:
    """The states of all layers of one text: this part of transformers' cache interface.

    Layers ask for no state: none is handed out, so that they take one path for any number of rows,
    which gives a convolution its whole window and writes nothing in place.

    Attributes:
        layers: by number of the layer, and of the state within it; ``before`` the last commit.
    """

    def __init__(self) -> None:
        self.layers: dict[_Key, Kept] = {}
        self.before: dict[_Key, Kept] = {}
        self._passes: dict[_Key, LayerPass] = {}
        self._parents: IntArray | None = None
        # Of text that is committed whole: its pass keeps the states itself, since inputs of a long
        # prompt would be larger than its keys and values.
        self._prompt = False
        self._current: _Key = (-1, 0)  # the layer whose kernels are called next

    def commit(self, rows: torch.Tensor | None, count: int) -> None:
        """Advance all layers by ``rows [count]`` of the last pass; None: its first ``count``."""
        self.before, moved = dict(self.layers), {}
        for key, read in self._passes.items():
            device = read.window.device
            if rows is not None and device not in moved:
                moved[device] = rows.to(device)
            self.layers[key] = read.behind(self.layers[key], moved.get(device), count)
        self._passes = {}

    # -- what transformers' layers call during a pass ------------------------------------------

    def get_conv_state(self, *_: object, **__: object) -> None:
        """Return no state, see the class."""

    get_recurrent_state = get_conv_state

    def update_conv_state(
        self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> torch.Tensor:
        """Append a pass's ``new [1, channels, rows]`` to the last inputs of a convolution."""
        key = self._current = (layer_idx, state_idx)
        if key not in self.layers:
            self.layers[key] = Kept(new.new_zeros(*new.shape[:-1], conv_kernel_size))
        state = self.layers[key]
        window = torch.cat([state.inputs, new], -1)
        if self._prompt:
            self.layers[key] = Kept(window[..., -conv_kernel_size:].clone(), state.recurrent)
        else:
            self._passes[key] = LayerPass(window)
        return window

    def update_recurrent_state(self, new: object, layer_idx: int, **_: object) -> None:
        """Raise ConfigurationError where the kernel was not ours, which has the state already."""
        state, read = self.layers.get(self._current), self._passes.get(self._current)
        if (state and state.recurrent if self._prompt else read and read.recurrence) is None:
            raise ConfigurationError(
                f"layer {layer_idx} computes its state by code that this project cannot take row "
                f"by row. {ELSE}"
            )

    # -- what our kernels call -----------------------------------------------------------------

    def run(self, chunked: Kernel, recurrence: Recurrence) -> Outputs:
        """Compute the pass of one layer: outputs ``[1, rows, ..]``, and the last row's state."""
        saved = self.layers[self._current]
        if self._prompt:
            out, state = chunked(initial_state=saved.recurrent)
            self.layers[self._current] = Kept(saved.inputs, state)
            return out, state
        read = self._passes[self._current]
        read.recurrence = recurrence
        if self._parents is not None:
            return _along_tree(recurrence, self._parents.tolist(), saved.recurrent)
        out, read.last = recurrence(slice(None), saved.recurrent)
        return out, read.last

    @contextmanager
    def row_by_row(
        self, files: list[ModuleType], parents: IntArray | None = None, *, prompt: bool = False
    ) -> Iterator[None]:
        """Let the model's pass within compute its states here; ``files``: see `kernel_files`.

        ``parents [rows]``, -1 above the root, are given where some row does not follow the one
        before it; ``prompt``: the rows are text and committed whole.
        """
        self._parents, self._prompt, self._passes = parents, prompt, {}
        stock = [
            (file, name, getattr(file, name))
            for file in files
            for name in (*DELTA_RULES, SCAN, CONVOLUTION)
            if hasattr(file, name)
        ]
        for file, name, kernel in stock:
            if name in DELTA_RULES:
                setattr(file, name, _delta_rule(self, kernel, getattr(file, DELTA_RULES[name])))
            elif name == SCAN:
                setattr(file, name, _scan(self, kernel))
            elif parents is not None:
                setattr(file, name, _tree_convolution(kernel, parents))
        try:
            yield
        finally:
            for file, name, kernel in stock:
                setattr(file, name, kernel)


def kernel_files(model: PreTrainedModel) -> list[ModuleType]:
    """List the modules of Python that define the layers of a model that keeps states; else none."""
    names = {type(module).__module__ for module in model.modules()} if keeps_states(model) else ()
    return [sys.modules[name] for name in names]


def _along_tree(recurrence: Recurrence, parents: list[int], state: State) -> Outputs:
    """Run each row from the state behind its parent's, which goes when no child is left."""
    outputs, behind = [], {-1: state}
    last_child = {parent: row for row, parent in enumerate(parents)}
    for row, parent in enumerate(parents):
        above = behind[parent] if last_child[parent] > row else behind.pop(parent)
        output, below = recurrence(slice(row, row + 1), above)
        outputs.append(output)
        if row in last_child:
            behind[row] = below
    return torch.cat(outputs, 1), below


# -- kernels of one pass, with the arguments of the stock ones over chunks -------------------------


def _delta_rule(states: States, chunked: Kernel, recurrent: Kernel) -> Kernel:
    def kernel(
        *qkv: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: None = None,
        **options: Any,
    ) -> Outputs:
        # Sums in another memory layout would round differently.
        qkv, g = tuple(x.contiguous() for x in qkv), g.contiguous()

        def recurrence(rows: Rows, state: State) -> Outputs:
            read, gates = (x[:, rows] for x in qkv), {"g": g[:, rows], "beta": beta[:, rows]}
            return recurrent(*read, **gates, initial_state=state, **options)

        return states.run(partial(chunked, *qkv, g=g, beta=beta, **options), recurrence)

    return kernel


def _scan(states: States, chunked: Kernel) -> Kernel:
    """Give Mamba-2's scan.

    As ``mamba2_selective_state_update`` computes it, which writes its state in place and takes as
    many exponentials as that has elements, where a head has one.
    """

    def kernel(*args: torch.Tensor, initial_states: None = None, **options: Any) -> Outputs:
        x, raw_dt, A, B, C = args
        # Once for all rows: a function of more numbers may round differently.
        dt = torch.nn.functional.softplus(raw_dt + options["dt_bias"].to(raw_dt.dtype))
        dt = dt.clamp(*options["dt_limit"])
        decay = torch.exp(dt.float() * A.float())[..., None, None]
        repeats = x.shape[2] // B.shape[2]

        def recurrence(rows: Rows, state: State) -> Outputs:
            assert state is not None
            new, retained, outputs = x[:, rows], decay[:, rows], []
            write = dt[:, rows, :, None] * B[:, rows].repeat_interleave(repeats, 2)
            read = C[:, rows].repeat_interleave(repeats, 2)[..., None]
            for i in range(new.shape[1]):
                behind = state * retained[:, i] + write[:, i, :, None] * new[:, i, ..., None]
                outputs.append(behind.to(C.dtype) @ read[:, i])
                state = behind.to(state.dtype)
            out = torch.stack(outputs, 1)[..., 0] + new * options["D"][:, None]
            return out.to(x.dtype), state

        return states.run(
            lambda initial_state: chunked(*args, initial_states=initial_state, **options),
            recurrence,
        )

    return kernel


def _tree_convolution(convolve: Convolution, parents: IntArray) -> Convolution:
    """Give a convolution over each row's own input and its nearest ancestors'."""

    def kernel(
        window: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        width, text = weight.shape[-1], window.shape[-1] - len(parents)
        above = np.concatenate([np.arange(-1, text - 1), parents + text])
        columns = [np.arange(text, window.shape[-1])]
        for _ in range(width - 1):
            columns.insert(0, above[columns[0]])
        index = torch.from_numpy(np.stack(columns, 1).ravel()).to(window.device)
        return convolve(window[..., index], weight, *args, **options)[..., width - 1 :: width]

    return kernel
