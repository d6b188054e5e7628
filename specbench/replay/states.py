"""Hidden states of recorded turns: a file for each turn, in the folder ``states`` of a run.

They are stored in the target's type (bfloat16, which numpy lacks, as float32), so a head computes
from them what it would compute live, up to the rounding of passes of other shapes. Torch is
imported only where needed: traces are read without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specbench.arrays import IntArray
from specbench.decoding.structs import DraftTree
from specbench.errors import ArtifactError
from specbench.storage import jsonl
from specbench.storage.arrays import open_array_file, read_header, write_array_file

if TYPE_CHECKING:
    import torch

    from specbench.models.scores import Scores
    from specbench.models.target import Target

FOLDER = "states"
_KIND, _VERSION = "hidden_states", 1
_AGAIN = "Record the run again, with record=states and fresh=true."


def path_of(run: Path, stream_index: int, turn: int) -> Path:
    """Give the file of a turn, in a run's folder."""
    return run / FOLDER / f"{stream_index:06d}-{turn}.states"


def index_of(layer: int, n_layers: int) -> int:
    """Convert a number of ``Needs.hidden_layers``, which may count from the end, to 0 or more."""
    return layer % (n_layers + 1)


def states_along(
    target: Target, prompt: IntArray, output: IntArray, layers: tuple[int, ...]
) -> dict[int, torch.Tensor]:
    """Compute the hidden states of a prompt and its greedy output by passes over the text itself.

    Returns:
        ``[n_prompt + n_new - 1, hidden]`` by layer (``Needs.hidden_layers``), of all tokens but the
        last; the target's cache is overwritten.
    """
    import torch

    passes: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}

    def keep(scores: Scores) -> None:
        for layer, rows in (scores.hidden or {}).items():
            passes[layer].append(rows.clone())  # a captured pass overwrites the one before

    with torch.inference_mode():
        keep(target.prefill(prompt, hidden_layers=layers))
        chunk = target.max_nodes + 1  # one token per pass if only ar is run
        text = output[:-1]
        for tokens in (text[start : start + chunk] for start in range(0, len(text), chunk)):
            tree = DraftTree.chain(tokens[1:])
            keep(target.forward(int(tokens[0]), tree, hidden_layers=layers))
            target.commit(tree, np.arange(len(tree)))
        return {layer: torch.cat(rows).cpu() for layer, rows in passes.items()}


def write_states(
    path: Path,
    states: Mapping[int, torch.Tensor],
    *,
    n_layers: int,
    prompt: IntArray | Sequence[int],
    output: IntArray | Sequence[int],
    tokenizer_hash: str,
) -> int:
    """Write a turn's states from `states_along`, whole or not at all; returns the file's bytes.

    Raises:
        DiskError: the disk is full or broken.
    """
    arrays = {}
    for layer, rows in states.items():
        values = rows.float() if str(rows.dtype) == "torch.bfloat16" else rows
        arrays[str(index_of(layer, n_layers))] = values.cpu().numpy()
    temporary = path.with_name(path.name + ".tmp")
    with jsonl.reporting(path):
        path.parent.mkdir(exist_ok=True)
        write_array_file(
            temporary,
            kind=_KIND,
            version=_VERSION,
            tokenizer_hash=tokenizer_hash,
            arrays=arrays,
            header={"n_layers": n_layers, "text": _text(prompt, output)},
        )
        temporary.replace(path)
    return path.stat().st_size


def recorded_layers(path: Path) -> tuple[int, frozenset[int]]:
    """Read the target's number of layers, and the numbers of the states in a file."""
    header = read_header(path)
    try:
        return int(header["n_layers"]), frozenset(map(int, header["sections"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path} holds no hidden states. {_AGAIN}") from error


def read_states(
    path: Path, prompt: IntArray, output: IntArray, dtype: torch.dtype, device: torch.device
) -> dict[int, torch.Tensor]:
    """Read a turn's states from `write_states`, by number from 0.

    Raises:
        ArtifactError: the file is damaged, or of another text.
    """
    import torch

    header, arrays = open_array_file(path, kind=_KIND, version=_VERSION, tokenizer_hash=None)
    if header.get("text") != _text(prompt, output):
        raise ArtifactError(f"{path} holds the hidden states of another text. {_AGAIN}")
    # A copy: torch takes no arrays that cannot be written.
    return {
        int(name): torch.from_numpy(np.array(rows)).to(device, dtype)
        for name, rows in arrays.items()
    }


def _text(prompt: IntArray | Sequence[int], output: IntArray | Sequence[int]) -> str:
    ids = np.concatenate([[len(prompt)], prompt, output]).astype("<i8")
    return hashlib.sha256(ids.tobytes()).hexdigest()
