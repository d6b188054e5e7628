"""What a Python caller hands over (model, prompts, drafters, options), as a job like any other."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runners.job import Entry, Job, refuse_doubled
from runners.launch.dispatch import entry_of
from specbench import paths
from specbench.config import compose
from specbench.config.compare import NamedMethod, compose_entry
from specbench.config.run_key import key_of, run_identity
from specbench.config.schema import ATTENTIONS, DTYPES, FLOAT32_WEIGHTS
from specbench.config.validate import check_values
from specbench.data.cases import Case
from specbench.data.chat_templates import PromptTemplate, TokenIdPrompts
from specbench.decoding.drafter import Drafter
from specbench.errors import ConfigurationError, first_line, unknown_name
from specbench.results.manifest import BASELINE

_DATASET = "prompts"  # what records call prompts that a caller handed over

# What arguments of the call say.
_ARGUMENTS = {
    *("method", "compare", "baseline", "model", "dataset", "runner", "generation", "verifier"),
    *(f"model.{key}" for key in ("id", "path", "name", "device", "device_map", "dtype", "shape")),
    *("generation.max_new_tokens", "generation.temperature", "seed", "repeats"),
    *("output_dir", "shard", "fresh", "logger", "record"),
}


@dataclass(frozen=True)
class CallerInput:
    """A job, and what of it lies in memory alone.

    Attributes:
        template: gives the ids of the job's cases.
        drafters: by label, those that the caller made.
        cfg: the configuration that the job is of.
    """

    job: Job
    template: TokenIdPrompts
    drafters: Mapping[str, Drafter]
    cfg: DictConfig


@contextmanager
def folder_of(output_dir: str | Path | None) -> Iterator[Path]:
    """The folder that the caller named, or one for the time of the call."""
    if output_dir is not None:
        yield Path(output_dir).expanduser()
        return
    with tempfile.TemporaryDirectory(prefix="specbench-") as path:
        yield Path(path)


def read_input(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Any],
    drafters: Iterable[Any],
    name: str | None,
    arguments: Sequence[str],
    overrides: Sequence[str],
    folder: Path,
    alone: bool = False,
) -> CallerInput:
    """Check what was handed over; see `runners.comparison.compare`.

    Args:
        arguments: the call's other arguments, as overrides.
        alone: there need be no drafter: plain decoding is wanted.

    Raises:
        ConfigurationError: something cannot be used; says what to type.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigurationError(
            f"model is of type {type(model).__name__}, it must be a transformers model. Pass what "
            "AutoModelForCausalLM.from_pretrained(...) returns: of torch.compile's result "
            "model._orig_mod, of a PEFT model model.merge_and_unload()."
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigurationError(
            f"tokenizer is of type {type(tokenizer).__name__}, it must be a transformers "
            "tokenizer. Pass what AutoTokenizer.from_pretrained(...) returns."
        )
    typed = [f"method={BASELINE}", "dataset=jsonl", "runner=offline", *arguments]
    typed += _checked_overrides(overrides)
    with own_hydra():
        cfg = _with_model(typed, model, name)
        template = PromptTemplate(
            tokenizer,
            _template_name(cfg, tokenizer, overrides),
            {str(k): v for k, v in cfg.model.template_kwargs.items()},
            cfg.dataset.special_tokens,
        )
        embedding: Any = model.get_input_embeddings()
        cases = _cases(prompts, template, tokenizer, int(embedding.num_embeddings))
        entries, given = _entries(cfg, drafters, alone)
        check_values(cfg)
        if cfg.engine.weights != FLOAT32_WEIGHTS:
            raise ConfigurationError(
                f"engine.weights={cfg.engine.weights} changes weights as they are loaded, and this "
                "model is loaded. Leave it out, or compare with run.py, which loads the model."
            )
        config = compose.typed(cfg)
        identity = run_identity(cfg)
    job = Job(
        config=config,
        overrides=tuple(overrides),
        identity={**identity, "shard": None},
        run_key=key_of(identity),
        folder=folder,
        entries=entries,
        cases=cases,
    )
    return CallerInput(job, TokenIdPrompts(template.sha), given, cfg)


# -- the configuration -----------------------------------------------------------------------------


@contextmanager
def own_hydra() -> Iterator[None]:
    """The caller may be a Hydra application itself, whose configuration is not ours."""
    theirs = {kind: Singleton._instances.pop(kind, None) for kind in (GlobalHydra, HydraConfig)}
    try:
        yield
    finally:
        for kind, instance in theirs.items():
            Singleton._instances.pop(kind, None)
            if instance is not None:
                Singleton._instances[kind] = instance


def _checked_overrides(overrides: Sequence[str]) -> list[str]:
    if isinstance(overrides, str):
        raise ConfigurationError(f"overrides is one text. Type overrides=[{overrides!r}].")
    for text in overrides:
        key = text.partition("=")[0].lstrip("+~")
        if key in _ARGUMENTS:
            raise ConfigurationError(
                f"overrides: {text!r} is for the command line. Here an argument of compare() says "
                f"it, or the model itself. Leave {key} out of overrides."
            )
    return list(overrides)


def _with_model(typed: Sequence[str], model: PreTrainedModel, name: str | None) -> DictConfig:
    """The composed configuration, with a ``model`` node for the model in memory."""
    place = str(model.name_or_path or type(model).__name__)
    known = compose.option_names("model")
    if name is None:
        ids = {str(OmegaConf.load(paths.CONF_DIR / "model" / f"{n}.yaml").id): n for n in known}
        name = ids.get(place)
    if name is not None and name in known:
        cfg = compose.compose([*typed, f"model={name}"])
        _check_architecture(cfg, model)
    else:
        cfg = compose.compose([*typed, "model=local"])
        cfg.model.id, cfg.model.name = place, name or compose.own_name(place)
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise unknown_name("dtype of the model:", dtype, DTYPES)
    spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    cfg.model.dtype, cfg.model.device = dtype, str(model.device)
    cfg.model.device_map = "auto" if spread else None
    attention = str(model.config._attn_implementation)
    cfg.model.attention = attention if attention in ATTENTIONS else ATTENTIONS[0]
    cfg.dataset.name = _DATASET
    use_project_cache(cfg)
    return cfg


def use_project_cache(cfg: DictConfig) -> None:
    """What lies in the project's own cache need not be made again in each script's folder."""
    if str(cfg.cache_dir) == "./.cache/specbench":  # nobody asked for another
        cfg.cache_dir = str(paths.PROJECT / ".cache" / "specbench")


def _check_architecture(cfg: DictConfig, model: PreTrainedModel) -> None:
    """Refuse a name of another model: its draft models and heads would not fit."""
    config = model.config.get_text_config()
    for key in ("hidden_size", "num_hidden_layers"):
        wanted, found = cfg.model.shape_config.get(key), getattr(config, key, None)
        if None not in (wanted, found) and wanted != found:
            raise ConfigurationError(
                f"name={cfg.model.name!r} has {key}={wanted}, but this model has {found}: it "
                "is another model. Type a name of your own, e.g. name='my_model'."
            )


def _template_name(
    cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, overrides: Sequence[str]
) -> str:
    """The configuration's, but bare text where neither it nor the tokenizer has a template."""
    named = any(re.match(r"\+{0,2}model\.template=", text) for text in overrides)
    if cfg.model.template == "auto" and not named and not tokenizer.chat_template:
        return "plain"
    return str(cfg.model.template)


# -- prompts ---------------------------------------------------------------------------------------


def _cases(
    prompts: Iterable[Any],
    template: PromptTemplate,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
) -> tuple[Case, ...]:
    """A case for each prompt: its ids, numbered from 0."""
    if isinstance(prompts, str):
        raise ConfigurationError("prompts is one text, it must be a list. Type prompts=[text].")
    given = list(prompts)
    if not given:
        raise ConfigurationError("prompts is empty. Type e.g. prompts=['Why is the sky blue?'].")
    if all(isinstance(prompt, Mapping | int) for prompt in given):
        what = "one dialogue" if isinstance(given[0], Mapping) else "one prompt's token ids"
        raise ConfigurationError(f"prompts is {what}, it must be a list. Type prompts=[...] of it.")
    found = []
    for number, prompt in enumerate(given):
        ids = _ids(f"prompts[{number}]", prompt, template, tokenizer)
        if not ids:
            raise ConfigurationError(f"prompts[{number}] is empty. Leave it out.")
        if not all(0 <= token < vocab_size for token in ids):
            raise ConfigurationError(
                f"prompts[{number}] has token ids outside the model's vocabulary, 0 to "
                f"{vocab_size - 1}. Make them with this model's tokenizer."
            )
        found.append(Case(str(number), _DATASET, _DATASET, (json.dumps(ids),)))
    return tuple(found)


def _ids(
    where: str, prompt: Any, template: PromptTemplate, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    if isinstance(prompt, str):
        return template.render([(prompt, None)]) if prompt.strip() else []
    if hasattr(prompt, "tolist"):  # of torch or numpy, perhaps a batch of one
        prompt = prompt.tolist()
        prompt = prompt[0] if len(prompt) == 1 and isinstance(prompt[0], list) else prompt
    if not isinstance(prompt, Sequence):
        raise ConfigurationError(
            f"{where} is of type {type(prompt).__name__}. Pass a text, a list of token ids, or a "
            "list of messages such as {'role': 'user', 'content': 'Hello'}."
        )
    if all(isinstance(part, int) and not isinstance(part, bool) for part in prompt):
        return [int(part) for part in prompt]
    for part in prompt:
        if not (isinstance(part, Mapping) and {"role", "content"} <= part.keys()):
            raise ConfigurationError(
                f"{where} holds {part!r:.60}. A prompt in parts is a list of token ids, or of "
                "messages such as {'role': 'user', 'content': 'Hello'}."
            )
    if not tokenizer.chat_template:
        raise ConfigurationError(
            f"{where} is a list of messages, but the tokenizer has no chat template. Pass a text."
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(part) for part in prompt], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template is a program that came with the model
        raise ConfigurationError(
            f"{where}: the tokenizer's chat template failed: {first_line(error)}. Pass a text."
        ) from error
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


# -- drafters --------------------------------------------------------------------------------------


def _entries(
    cfg: DictConfig, drafters: Iterable[Any], alone: bool
) -> tuple[tuple[Entry, ...], dict[str, Drafter]]:
    """The run's entries, the baseline first, and the caller's own drafters by label.

    What they are is noted in ``cfg.compare``, which is part of the run key.
    """
    if isinstance(drafters, str | Mapping | Drafter):
        raise ConfigurationError(
            "drafters is one drafter, it must be a list. Type drafters=["
            f"{repr(drafters) if isinstance(drafters, str) else '...'}]."
        )
    entries, noted = [entry_of(cfg)], []
    given: dict[str, Drafter] = {}
    for drafter in drafters:
        own = _own_drafter(drafter)
        if own is None:
            if drafter == BASELINE:
                continue  # always there
            NamedMethod.parse(
                drafter,
                "compare",
                f"drafters holds {drafter!r:.80}. It must be a method's name, a mapping such as "
                "{'method': 'pld', 'num_tokens': 5, 'label': 'short'}, or a Drafter. "
                "`python run.py --list methods` prints the names.",
            )
            entry = entry_of(compose_entry(cfg, drafter))
            noted.append(dict(drafter) if isinstance(drafter, Mapping) else drafter)
        else:
            label, made = own
            if any(made is other for other in given.values()):
                raise ConfigurationError(
                    f"the drafter {label!r} is given twice. Make two drafters: one would "
                    "know what the other learns."
                )
            entry = replace(entries[0], label=label, method=_described(made))
            given[label] = made
            noted.append({**entry.method, "label": label})
        entries.append(entry)
    if len(entries) == 1 and not alone:
        raise ConfigurationError(
            f"drafters must hold a method other than {BASELINE}. Type drafters=['pld']."
        )
    refuse_doubled(
        entries, "{'method': NAME, 'label': 'LABEL_2'} or {'drafter': INSTANCE, 'label': 'LABEL_2'}"
    )
    cfg.compare = noted
    return tuple(entries), given


def _own_drafter(drafter: Any) -> tuple[str, Drafter] | None:
    """Label and instance where the caller made it: a Drafter, or a mapping with one."""
    label = None
    if isinstance(drafter, Mapping) and "drafter" in drafter:
        drafter, label = drafter["drafter"], drafter.get("label")
    if isinstance(drafter, type) and issubclass(drafter, Drafter):
        raise ConfigurationError(f"{drafter.__name__} is a class. Type {drafter.__name__}().")
    if not isinstance(drafter, Drafter):
        return None
    return str(label or drafter.name), drafter


def _described(drafter: Drafter) -> dict[str, Any]:
    """Name, class and knobs, as a ``method`` node has them."""
    kind = type(drafter)
    names = [f.name for f in fields(drafter) if f.init and not f.name.startswith("_")]
    knobs = {name: _plain(getattr(drafter, name)) for name in names}
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **knobs}


def _plain(value: Any) -> Any:
    """A knob's value as JSON can hold it."""
    if isinstance(value, Drafter):
        return _described(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__name__  # never an address: the run key must not change by itself
