"""Hidden states that vLLM recorded (``extract_hidden_states``), put beside recorded outputs.

vLLM's connector writes a file of safetensors per request: ``token_ids`` ``[n]``, of the prompt and,
where asked (``include_output_tokens``), of the output but its last token; ``hidden_states``
``[n, layers, hidden]``, in the order of rising layers. Layer i's are what layer i reads, as here,
but those behind the last layer, which vLLM takes before the final norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from specbench.errors import ArtifactError, ConfigurationError
from specbench.models.stored_target import StoredTarget
from specbench.replay import states
from specbench.replay.traces import RecordedTurn, Traces

# Of the greedy tokens, what the LM head must say over the states. The rest are near ties of another
# engine's arithmetic; states of a wrong layer say few.
_AGREE = 0.95
_NAMES = ("hidden_states", "token_ids")


@dataclass(frozen=True, slots=True)
class ImportedStates:
    """What was taken over.

    Attributes:
        turns: that have states now; ``others``: files of other texts.
        agreement: share of the output's tokens that the LM head chooses over the states.
        n_bytes: of the files written.
    """

    turns: int
    others: int
    agreement: float
    n_bytes: int


def import_states(
    traces: Traces, files: Iterable[Path], layers: Sequence[int], target: StoredTarget
) -> ImportedStates:
    """Give every recorded turn of a run folder the states that vLLM kept of its text.

    Args:
        traces: of the folder, whose plain outputs the files hold.
        files: vLLM's.
        layers: their numbers, as vLLM was asked for (``eagle_aux_hidden_state_layer_ids``).
        target: the model, without its network.

    Raises:
        ArtifactError: a file is none of vLLM's, or has other layers.
        ConfigurationError: a turn has no file, or the states are not the model's.
    """
    wanted, last = sorted({*layers}), target.n_layers
    if last not in wanted or not 0 <= wanted[0] <= wanted[-1] <= last:
        raise ConfigurationError(
            f"--layers {' '.join(map(str, layers))}: the model has {last} layers, and all heads "
            f"read what stands behind the last. Have vLLM extract layer {last} too, none beyond."
        )
    by_text = {_text(_ids(file)): file for file in files}
    turns = [turn for turns in traces.cases().values() for turn in turns]
    pairs: list[tuple[RecordedTurn, Path]] = []
    for turn in turns:
        text = np.concatenate([turn.prompt_ids, turn.output_ids[:-1]])
        file = by_text.get(_text(text))
        if file is None:
            raise ConfigurationError(
                f"no file holds case {turn.case_id}, turn {turn.turn} of {traces.path} "
                f"({len(text)} tokens: prompt and output without its last). Have vLLM record these "
                "answers with include_output_tokens, greedily and by the same chat template."
            )
        pairs.append((turn, file))
    right = total = 0
    for turn, file in pairs:  # all of them before anything is written
        found = _read(file, wanted, target)
        said = target.embeddings.logits(found[last][len(turn.prompt_ids) - 1 :]).argmax(-1)
        right += int((said.cpu().numpy() == turn.output_ids).sum())
        total += len(turn.output_ids)
    if right < _AGREE * total:
        raise ConfigurationError(
            f"over these states the LM head says {right} of {total} output tokens, and "
            f"{_AGREE:.0%} are asked for. They are another model's, or --layers does not name what "
            "vLLM extracted."
        )
    written = sum(
        states.write_states(
            states.path_of(traces.path, turn.stream_index, turn.turn),
            _read(file, wanted, target),
            n_layers=last,
            prompt=turn.prompt_ids,
            output=turn.output_ids,
            tokenizer_hash=traces.model["tokenizer_hash"],
        )
        for turn, file in pairs
    )
    used = {file for _, file in pairs}
    return ImportedStates(len(pairs), len(by_text) - len(used), right / total, written)


def _text(ids: np.ndarray) -> bytes:
    return np.asarray(ids, dtype="<i8").tobytes()


def _ids(file: Path) -> np.ndarray:
    """The tokens of a file.

    Raises:
        ArtifactError: it is none of vLLM's.
    """
    try:
        with safe_open(file, framework="np") as stored:
            if missing := sorted({*_NAMES} - {*stored.keys()}):
                raise ArtifactError(f"{file} has no {' and no '.join(missing)}: {_WRITTEN}")
            ids: np.ndarray = stored.get_tensor("token_ids")
            shape = stored.get_slice("hidden_states").get_shape()
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{file} cannot be read: {error}. {_WRITTEN}") from error
    if ids.ndim != 1 or len(shape) != 3 or shape[0] != len(ids):
        raise ArtifactError(
            f"{file} has hidden states {shape} for token ids {list(ids.shape)}, not a row of "
            f"layers for each token: {_WRITTEN}"
        )
    return ids


_WRITTEN = "name files that vLLM's ExampleHiddenStatesConnector wrote."


def _read(file: Path, layers: Sequence[int], target: StoredTarget) -> dict[int, torch.Tensor]:
    with safe_open(file, framework="pt") as stored:
        found = stored.get_tensor("hidden_states")
    hidden = int(target.config["hidden_size"])
    if found.shape[1:] != (len(layers), hidden):
        raise ArtifactError(
            f"{file} has {found.shape[1]} layers of {found.shape[2]} numbers, and --layers names "
            f"{len(layers)} of a model with {hidden}. Name what vLLM extracted."
        )
    rows = {layer: found[:, i].to(target.device, target.dtype) for i, layer in enumerate(layers)}
    last = target.n_layers
    return {**rows, last: target.normed(found[:, layers.index(last)])}
