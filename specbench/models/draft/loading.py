"""The draft model of a run's ``pair`` group: found, checked against the target, placed, loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specbench.arrays import IntArray
from specbench.config.schema import (
    FLOAT32_WEIGHTS,
    DraftConfig,
    DraftWeights,
    ModelConfig,
    RandomDraftConfig,
    draft_weights,
)
from specbench.errors import ConfigurationError, NeedsNotMet, WeightsNotFound, first_line
from specbench.kernels import panel_kernels
from specbench.kernels.architectures import keeps_states, usable_context
from specbench.kernels.weight_forms import round_to
from specbench.models import loading
from specbench.models.checks import self_check
from specbench.models.draft.model import DraftModel
from specbench.models.draft.vocabulary import SharedVocabulary, shared_vocabulary
from specbench.models.target import Target
from specbench.results.manifest import DraftInfo

log = logging.getLogger(__name__)

# In the folder of a draft with a reduced vocabulary: its key ``ids`` holds, for every id of the
# draft, the target's id; -1 marks the row that stands for all the others (read, never proposed).
ID_MAP_FILE = "id_map.safetensors"
# In the config.json of a draft whose folder has no tokenizer: the hash of the target's.
TOKENIZER_KEY = "tokenizer_hash"


def load_draft_model(
    draft: DraftConfig,
    model: ModelConfig,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_len: int,
    max_nodes: int,
    make_target: Callable[..., Target] = Target,
    weights: str = FLOAT32_WEIGHTS,
) -> tuple[DraftModel, DraftInfo]:
    """Load the draft model of a run's ``pair`` group, and say what the manifest says about it.

    ``model`` and ``tokenizer`` are the target's; ``make_target`` makes the run's engine from a
    network, ``max_len`` and ``max_nodes``, the largest draft tree that is held at once. On a CPU
    the network is rounded to ``weights`` (``engine.draft_weights``).

    Raises:
        NeedsNotMet: its tokenizer is not the target's; names the first differing token.
        WeightsNotFound: its weights are not to be had.
        ConfigurationError: no such device, a damaged ``id_map``, or a model that does not decode
            here as in transformers.
    """
    node = draft_weights(draft, model)
    assert node is not None, "a method that needs a draft model was let in without one"
    device, devices_asked = _placed(str(node.device), draft.device, target)
    node.device = str(device)
    id_map: IntArray | None = None
    shared: SharedVocabulary | None = None
    described, subject, context_length = DraftInfo(id="random"), "pair.draft.random", None
    if node.shape:
        assert draft.random is not None
        network = _random_network(draft.random, node, target.vocab_size, device)
    else:
        if draft.vocabulary == "same":
            check_same_tokenizer(node, tokenizer)
        loaded = loading.load_model(node, tokenizer)
        network, subject = loaded.model, f"{node.key}={node.id}"
        described = DraftInfo(
            id=loaded.id, revision=loaded.revision, weights_hash=loaded.weights_hash
        )
        usable = usable_context(network, subject, max_len, max_nodes)
        context_length = min(loaded.context_length, usable or loaded.context_length)
        id_map = read_id_map(Path(node.id))
        if draft.vocabulary == "intersection":
            if id_map is not None:
                raise ConfigurationError(
                    f"pair.draft.vocabulary={draft.vocabulary}: {subject} has ids of its own "
                    f"tokenizer renumbered by {ID_MAP_FILE}. Type pair.draft.vocabulary=same."
                )
            max_len += max_len // 2  # as `DraftModel.reserve` has it
            shared = shared_vocabulary(
                tokenizer,
                loading.load_tokenizer(node),
                target_vocab=target.vocab_size,
                draft_vocab=int(network.config.get_text_config().vocab_size),
            )
            if not (count := int((shared.ids >= 0).sum())):
                raise NeedsNotMet(
                    f"{subject} shares no token with the target. Choose another draft, or type "
                    f"{node.remedy}."
                )
            log.info("%s: %d of its %d ids are the target's too", subject, count, len(shared.ids))
    if keeps_states(network):
        raise ConfigurationError(
            f"{subject}: a draft model whose layers keep a state cannot grow a tree. Name another "
            f"one, or type {node.remedy}."
        )
    if panel_kernels.available():
        round_to(network, weights)
    draft_target, check = self_check.checked(
        network,
        partial(make_target, max_len=max_len + max_nodes, max_nodes=max_nodes),
        subject=subject,
        longest=min(max_len, context_length or max_len),
        drafts=True,
    )
    drafter = DraftModel(
        draft_target,
        target_vocab=target.vocab_size,
        id_map=id_map,
        shared=shared,
        max_nodes=max_nodes,
        context_length=context_length,
        devices_asked=devices_asked,
        devices=len({device, *target.devices}),
    )
    described.dtype = str(draft_target.dtype).removeprefix("torch.")
    described.device = str(device)
    described.parameters = drafter.n_parameters
    described.vocab_size = drafter.vocab_size
    described.packed = draft_target.packed_weights
    described.passes = draft_target.describe()
    described.self_check = check.to_json()
    return drafter, described


def _placed(name: str, requested: str | None, target: Target) -> tuple[torch.device, int]:
    """Choose the draft's device, and count the devices requested, the target's included.

    A device that this machine lacks does not stop the run: the draft then shares the target's, and
    every record says that one device did what two were asked for.
    """
    if requested is None:
        return target.device, len({target.device, *target.devices})
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda:0")
    n_requested_devices = len({device, *target.devices})
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        missing = "pair.draft.device=%s is not there: the draft model shares %s with the target"
        log.warning(missing, name, target.device)
        device = target.device
    return device, n_requested_devices


def _random_network(
    random: RandomDraftConfig, node: DraftWeights, vocab_size: int, device: torch.device
) -> PreTrainedModel:
    shape = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": random.hidden,
        "intermediate_size": random.intermediate or 2 * random.hidden,
        "num_hidden_layers": random.layers,
        "num_attention_heads": random.heads,
        "num_key_value_heads": random.heads,
        "tie_word_embeddings": True,
    }
    network = loading.shape_model(
        shape, dtype=getattr(torch, str(node.dtype)), device=device, seed=int(random.seed)
    )
    network.eval().requires_grad_(False)
    return network


def read_id_map(folder: Path) -> IntArray | None:
    """Read the ids ``[draft vocab]`` of a folder with a reduced vocabulary, or None.

    Raises:
        ConfigurationError: it does not hold a list of whole numbers, each from 0 on once at most.
    """
    file = folder / ID_MAP_FILE
    if not file.is_file():
        return None
    from safetensors.torch import load_file

    try:
        ids: IntArray = load_file(file)["ids"].numpy()
        target_ids = ids[ids >= 0] if ids.dtype.kind in "iu" and ids.ndim == 1 else None
        if target_ids is None or len(np.unique(target_ids)) != len(target_ids):
            raise ValueError("it is no list of the target's ids, each once")
    except Exception as error:  # safetensors' own, KeyError, OSError
        raise ConfigurationError(
            f"{file} is damaged: {first_line(error)}. Fetch it again."
        ) from error
    return ids.astype(np.int64)


def check_same_tokenizer(node: DraftWeights, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a draft whose ids mean other tokens than the target's.

    Ids that only one of the two has (padding, added tokens) do no harm. A folder without a
    tokenizer names the one it was made for, by its hash, in its config.json.

    Raises:
        NeedsNotMet: with the first token that differs.
        WeightsNotFound: its config.json is damaged.
    """
    folder, subject = Path(str(node.id)), f"{node.key}={node.id}"
    remedy = (
        "Choose a draft of the same family, or type pair.draft.vocabulary=intersection, which "
        f"drafts the tokens that both have, or {node.remedy}."
    )
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            made_for = config.get(TOKENIZER_KEY)
        except (OSError, ValueError, AttributeError) as error:
            raise WeightsNotFound(
                f"{subject}: its config.json cannot be read: {first_line(error)}. Fetch it again."
            ) from error
        if made_for != (ours := loading.tokenizer_hash(tokenizer)):
            raise NeedsNotMet(
                f"{subject} has no tokenizer, and {TOKENIZER_KEY} in its config.json is not that "
                f"of the target's ({ours}). {remedy}"
            )
        return
    tokens = {i: token for token, i in tokenizer.get_vocab().items()}
    theirs = {i: token for token, i in loading.load_tokenizer(node).get_vocab().items()}
    for i in sorted(tokens.keys() & theirs.keys()):
        if tokens[i] != theirs[i]:
            raise NeedsNotMet(
                f"{subject} has another tokenizer than the target: id {i} is {theirs[i]!r} there "
                f"and {tokens[i]!r} here. {remedy}"
            )
