"""Compare methods on a model in memory, from a script or a notebook.

A caller's model, prompts and methods become a job like any other, which measures as
``runner=offline`` does: the same engine, order, records and statistics. It runs in the caller's
process, and the model is restored to its earlier state.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any, cast

import pandas as pd
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runners.job import Entry, Job, refuse_duplicate_labels
from runners.launch.dispatch import entry_of
from runners.measure import live
from runners.measure.session import make_session
from runners.run_folder import folder as run_folder
from runners.run_folder.manifest import check_questions
from specbench import paths
from specbench.config import compose
from specbench.config.entries import NamedMethod, compose_entry
from specbench.config.run_key import key_of, run_identity
from specbench.config.schema import ATTENTIONS, DTYPES, FLOAT32_WEIGHTS
from specbench.config.validate import check_values
from specbench.data.cases import Case
from specbench.data.chat_templates import PromptTemplate, TokenIdPrompts
from specbench.decoding.drafter import Drafter
from specbench.errors import ConfigurationError, OutputRefused, unknown_name
from specbench.models import loading
from specbench.models.restore import restored_on_exit
from specbench.results import console, records
from specbench.results.conditions import Warned
from specbench.results.headline_table import outputs_text
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.summary_schema import Summary
from specbench.results.tasks import OVERALL
from specbench.storage import jsonl

_WIDTH = 100  # of the printed table
_ERROR_COLUMNS = ["label", "case_id", "turn", "repeat", "during", "type", "message"]
_DATASET = "prompts"  # the dataset's name in records of a caller's prompts
_UNSAVED = "DIR_OF_THE_SAVED_MODEL"  # in commands to type, for a model without files

# Keys that an argument of the call or the model itself decides.
_ARGUMENTS = {
    *("method", "compare", "baseline", "model", "dataset", "runner", "generation", "verifier"),
    *(f"model.{key}" for key in ("id", "path", "name", "device", "device_map", "dtype", "shape")),
    *("generation.max_new_tokens", "generation.temperature", "seed", "repeats"),
    *("output_dir", "shard", "fresh", "logger", "record"),
}


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. Printed, or displayed by a notebook, it is the table of a run.

    Attributes:
        table: a row for each method, the baseline ``ar`` first: ``label``, ``mat``, ``speedup``
            with its 95 % interval (``speedup_low``, ``speedup_high``), ``tokens_per_s``, and
            ``outputs``, the audit's verdicts on the turns.
        cases: a row for each prompt, method and repeat; columns as in ``cases.jsonl``, and
            ``prompt`` (its index in ``prompts``) and ``text`` (the output's text).
        steps: a row for each step: nodes drafted, tokens committed, seconds.
        errors: a row for each turn that failed, with the reason.
        summary: all of ``summary.json``: conditions, warnings, rows with all numbers, pairs.
        folder: where the run's files are; None if they were not kept.
        lossless: no case failed, and every greedy output was plain decoding's.
    """

    table: pd.DataFrame
    cases: pd.DataFrame
    steps: pd.DataFrame
    errors: pd.DataFrame
    summary: Summary = field(repr=False)
    folder: Path | None
    lossless: bool

    def __str__(self) -> str:
        terminal = Console(width=_WIDTH, color_system=None)
        with terminal.capture() as printed:
            console.print_summary(self.summary, terminal)
        return str(printed.get()).rstrip()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rendered = console.render(self.summary)
        deciding = (Warned(**line) for line in self.summary["warnings"])
        notes = [*rendered.caption.split("\n"), *(w.text for w in deciding if w.decides)]
        frame: str = pd.DataFrame(rendered.columns).map(str).to_html(index=False)
        return frame + "".join(f"<p>{escape(note, quote=False)}</p>" for note in notes if note)

    def plot(self) -> Figure:
        """Draw the speedup of each method with its 95 % interval, the fastest at the top.

        A matplotlib figure: a notebook shows it, ``savefig("speedup.png")`` writes it.
        """
        rows = self.table[self.table["label"] != BASELINE].dropna(subset="speedup")
        rows = rows.sort_values("speedup")
        value, low, high = (rows[f"speedup{end}"].astype(float) for end in ("", "_low", "_high"))
        figure = Figure(figsize=(6.0, 1.0 + 0.26 * len(rows)), layout="constrained")
        axes = figure.subplots()
        axes.errorbar(value, rows["label"], xerr=[value - low, high - value], fmt="o")
        axes.axvline(1.0, color="#333333", linewidth=0.8, linestyle="--")
        axes.set_xlabel("speedup (ratio of tokens/s)")
        return figure


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Any],
    methods: Iterable[Any] = (),
    *,
    drafters: None = None,
    name: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    repeats: int = 1,
    verifier: str = "auto",
    output_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> Comparison:
    """Compare drafting methods with plain decoding, on a model in memory.

    Args:
        model: a transformers model on one CUDA device or the CPU; given back as it was, whatever
            happens. tokenizer: its tokenizer.
        prompts: each a text (put into the tokenizer's chat template, where it has one), a list of
            messages (``role``, ``content``), or token ids, which are taken as they are.
        methods: each a method's name, a mapping (``{"method": "pld", "num_tokens": 5, "label":
            "short"}``), a `specbench.decoding.drafter.Drafter`, or one with a label
            (``{"drafter": drafter, "label": "mine"}``). Plain decoding, ``ar``, always runs too.
            ``drafters``, its earlier name, is refused.
        name: the model's name. One of ``conf/model`` says that these are its weights: draft models,
            heads and settings for it hold. None finds it by the model's hub id.
        max_new_tokens, temperature, seed, repeats, verifier: as on the command line.
        output_dir: keeps the run's files there; an interrupted call then goes on where it stopped,
            and a repeated one reads them. None keeps none.
        overrides: other keys as typed on the command line, e.g. ``["pair=random_draft"]``.

    Raises:
        ComparisonRefused: a ValueError; something cannot be used, the message says what to type.
    """
    arguments = [
        *(f"generation={'sampling' if temperature else 'greedy'}", f"verifier={verifier}"),
        f"generation.max_new_tokens={max_new_tokens}",
        *(f"generation.temperature={temperature}", f"seed={seed}", f"repeats={repeats}"),
    ]
    with call(output_dir) as path:
        if drafters is not None:
            raise ConfigurationError("drafters= is gone: type methods=[...].")
        caller = read_input(model, tokenizer, prompts, name, arguments, overrides)
        caller.measure(methods, path)
        return _read(path, None if output_dir is None else path, tokenizer)


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer of ``conf/model/<name>.yaml`` as a run loads them.

    ``smollm2_135m`` comes with the project and needs no network.

    Raises:
        ComparisonRefused: there is no such name, or the weights are not to be had.
    """
    with call():
        cfg = compose.compose([f"model={name}"])
        use_project_cache(cfg)
        node = compose.to_config(cfg).model
        tokenizer = loading.load_tokenizer(node)
        model = loading.load_model(node, tokenizer).model
    model.name_or_path = node.id  # the id that `compare` looks up, also for a cached model
    return model, tokenizer


def _read(path: Path, saved_folder: Path | None, tokenizer: PreTrainedTokenizerBase) -> Comparison:
    summary = cast("Summary", jsonl.read_json(path / records.SUMMARY))
    case_records, _ = records.read_records(path)
    errors, _ = jsonl.read_jsonl(path / records.ERRORS)
    cases = [
        {
            "prompt": int(record.case_id),
            **record.to_json(),
            "text": tokenizer.decode(list(record.output_ids), skip_special_tokens=True),
        }
        for record in case_records
    ]
    manifest = RunManifest.read(path)
    table = []
    for row in summary["rows"]:
        if row["task"] == OVERALL:
            low, high = row["speedup_ci"] or (None, None)
            columns = {key: row[key] for key in ("label", "mat", "speedup")}
            columns |= {"speedup_low": low, "speedup_high": high}
            columns |= {"tokens_per_s": row["tokens_per_s"]}
            table.append({**columns, "outputs": outputs_text(row["lossless"])})
    return Comparison(
        table=pd.DataFrame(table),
        cases=pd.DataFrame(cases),
        steps=pd.read_parquet(path / records.STEPS),
        errors=pd.DataFrame(errors, columns=None if errors else _ERROR_COLUMNS),
        summary=summary,
        folder=saved_folder,
        lossless=manifest.exit_code == 0,
    )


class ComparisonRefused(ConfigurationError, ValueError):
    """An argument of `compare` cannot be used; the message says what to type."""


@contextmanager
def call(output_dir: str | Path | None = None) -> Iterator[Path]:
    """Run a call: yield its folder, put the caller's Hydra aside, raise refusals as ValueError."""
    theirs = {kind: Singleton._instances.pop(kind, None) for kind in (GlobalHydra, HydraConfig)}
    try:
        with tempfile.TemporaryDirectory(prefix="specbench-") as temporary:
            yield Path(temporary if output_dir is None else output_dir).expanduser()
    except ConfigurationError as error:
        raise ComparisonRefused(str(error)) from error
    finally:
        for kind, instance in theirs.items():
            Singleton._instances.pop(kind, None)
            if instance is not None:
                Singleton._instances[kind] = instance


def use_project_cache(cfg: DictConfig) -> None:
    """Use the project's own cache, wherever the caller's script is."""
    if str(cfg.cache_dir) == "./.cache/specbench":  # the default
        cfg.cache_dir = str(paths.PROJECT / ".cache" / "specbench")


@dataclass(frozen=True)
class CallerInput:
    """A model in memory with prompts for it, checked.

    Attributes:
        cfg: the configuration of plain decoding.
        overrides: the caller's overrides of it.
        template_sha: the hash of the template that made the cases' token ids.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cfg: DictConfig
    overrides: tuple[str, ...]
    cases: tuple[Case, ...]
    template_sha: str

    def measure(
        self,
        methods: Iterable[Any],
        folder: Path,
        cases: Sequence[Case] | None = None,
        record: str | bool = False,
        strict: bool = True,
    ) -> None:
        """Measure what the folder lacks; the model is restored afterwards.

        Args:
            methods: see `runners.comparison.compare`.
            cases: None takes all.
            record: like the configuration's ``record``.
            strict: False leaves out methods that cannot run.

        Raises:
            ConfigurationError: something cannot be used; says what to type.
        """
        with restored_on_exit(self.model):
            cfg = self.cfg.copy()
            OmegaConf.update(cfg, "record", record)
            entries, instances, cfg.compare = _entries(cfg, methods)
            if strict and len(entries) == 1:
                raise ConfigurationError(
                    f"methods must name a method other than {BASELINE}. Type methods=['pld']."
                )
            check_values(cfg)
            identity = run_identity(cfg)
            job = Job(
                config=compose.to_config(cfg),
                overrides=self.overrides,
                identity={**identity, "shard": None},
                run_key=key_of(identity),
                folder=folder,
                entries=entries,
                cases=self.cases if cases is None else tuple(cases),
                optional=frozenset(() if strict else (entry.label for entry in entries[1:])),
            )
            loaded = loading.in_memory(job.config.model, self.model, self.tokenizer)
            run_folder.check_owner(folder, job.run_key, job.identity)
            if run_folder.is_complete(folder):
                _check_finished(job, loaded.weights_hash)
                return
            run_folder.make_folder(folder)
            template = TokenIdPrompts(self.template_sha)
            live.run_live(
                job,
                lambda job, runs: make_session(job, runs, self.tokenizer, template, lambda: loaded),
                instances,
            )


def _check_finished(job: Job, weights_hash: str | None) -> None:
    manifest = RunManifest.read(job.folder)
    check_questions(manifest, job.config, job.cases, job.folder)
    before = manifest.model and manifest.model.weights_hash
    if before != weights_hash:
        raise OutputRefused(
            f"{job.folder} holds a run of other weights of the same name (weights_hash there "
            f"{before}, here {weights_hash}). Give another output_dir."
        )
    manifest.check_files(job.folder)


def read_input(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Any],
    name: str | None,
    arguments: Sequence[str],
    overrides: Sequence[str],
) -> CallerInput:
    """Check the arguments of `runners.comparison.compare`.

    ``arguments``: the call's other arguments, as overrides.

    Raises:
        ConfigurationError: something cannot be used; says what to type.
    """
    for value, kind, remedy in (
        (model, PreTrainedModel, "model._orig_mod of torch.compile's, model.merge_and_unload()"),
        (tokenizer, PreTrainedTokenizerBase, "what AutoTokenizer.from_pretrained(...) returns"),
    ):
        if not isinstance(value, kind):
            raise ConfigurationError(
                f"a {kind.__name__} is needed, got {type(value).__name__}. Pass {remedy}."
            )
    for text in overrides:
        if text.partition("=")[0].lstrip("+~") in _ARGUMENTS:
            raise ConfigurationError(
                f"overrides: {text!r} is for the command line. Leave it out: an argument of the "
                "call sets it, or the model itself."
            )
    typed = [f"method={BASELINE}", "dataset=jsonl", "runner=offline", *arguments, *overrides]
    cfg = _with_model(typed, model, name)
    if cfg.engine.weights != FLOAT32_WEIGHTS:
        raise ConfigurationError(
            f"engine.weights={cfg.engine.weights} changes weights as they are loaded, and this "
            "model is loaded. Leave it out, or compare with run.py, which loads the model."
        )
    named = any(re.match(r"\+{0,2}model\.template=", text) for text in overrides)
    if cfg.model.template == "auto" and not named and not tokenizer.chat_template:
        cfg.model.template = "plain"  # a text, not Vicuna's dialogue
    template = PromptTemplate.from_config(tokenizer, compose.to_config(cfg))
    embedding: Any = model.get_input_embeddings()
    cases = _cases(prompts, template, int(embedding.num_embeddings))
    return CallerInput(model, tokenizer, cfg, tuple(overrides), cases, template.sha)


def _with_model(overrides: Sequence[str], model: PreTrainedModel, name: str | None) -> DictConfig:
    """Compose the configuration, with a ``model`` node for the model in memory."""
    source = str(model.name_or_path or _UNSAVED)
    names = compose.option_names("model")
    if name is None:
        ids = {str(OmegaConf.load(paths.CONF_DIR / "model" / f"{n}.yaml").id): n for n in names}
        name = ids.get(source)
    if name in names:
        cfg = compose.compose([*overrides, f"model={name}"])
    else:
        cfg = compose.compose([*overrides, "model=local"])
        weights = str(model.name_or_path or type(model).__name__)
        cfg.model.id, cfg.model.name = source, name or compose.weights_name(weights)
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


def _cases(prompts: Iterable[Any], template: PromptTemplate, vocab_size: int) -> tuple[Case, ...]:
    """Make a case of the ids of each prompt, numbered from 0."""
    items = [] if isinstance(prompts, str | Mapping) else list(prompts)
    if all(isinstance(prompt, Mapping | int) for prompt in items):  # a single prompt, or none
        raise ConfigurationError(
            f"prompts must be a list of prompts, got {prompts!r:.60}. Type prompts=[...]."
        )
    cases = []
    for number, prompt in enumerate(items):
        try:
            ids = _ids(prompt, template)
        except ConfigurationError as error:
            raise ConfigurationError(f"prompts[{number}]: {error}") from error
        if not ids or not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ConfigurationError(
                f"prompts[{number}] must have tokens of the model's vocabulary, 0 to "
                f"{vocab_size - 1}, got {ids!r:.60}."
            )
        cases.append(Case(str(number), _DATASET, _DATASET, (json.dumps(ids),)))
    return tuple(cases)


def _ids(prompt: Any, template: PromptTemplate) -> list[int]:
    if isinstance(prompt, str):
        return template.render([(prompt, None)]) if prompt.strip() else []
    if hasattr(prompt, "tolist"):  # torch or numpy, perhaps a batch of one
        prompt = prompt.tolist()
        prompt = prompt[0] if len(prompt) == 1 and isinstance(prompt[0], list) else prompt
    if isinstance(prompt, Sequence):
        if all(isinstance(part, int) and not isinstance(part, bool) for part in prompt):
            return list(prompt)
        if all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompt):
            return template.render_messages(prompt)
    raise ConfigurationError(
        "a prompt must be a text, a list of token ids, or a list of messages such as "
        f"{{'role': 'user', 'content': 'Hello'}}, got {prompt!r:.60}."
    )


def _entries(
    cfg: DictConfig, methods: Iterable[Any]
) -> tuple[tuple[Entry, ...], dict[str, Drafter], list[Any]]:
    """Return the run's entries, the baseline first, the caller's drafters by label, ``compare``."""
    if isinstance(methods, str | Mapping | Drafter):
        raise ConfigurationError(
            f"methods must be a list, got {methods!r:.80}. Type methods=[{methods!r:.80}]."
        )
    entries, compared = [entry_of(cfg)], []
    instances: dict[str, Drafter] = {}
    for item in methods:
        named = item if isinstance(item, Mapping) and "drafter" in item else {"drafter": item}
        drafter = named["drafter"]
        if drafter == BASELINE:
            continue  # always measured
        if isinstance(drafter, Drafter):
            if any(drafter is other for other in instances.values()):
                raise ConfigurationError(
                    f"methods holds {drafter.name!r} twice, and one would know what the other "
                    "learns. Make two."
                )
            label = str(named.get("label") or drafter.name)
            entries.append(replace(entries[0], label=label, method=_describe(drafter)))
            instances[label] = drafter
            compared.append({**entries[-1].method, "label": label})
        else:
            NamedMethod.parse(
                item,
                "compare",
                f"methods holds {item!r:.80}. It must be a method's name, a mapping such as "
                "{'method': 'pld', 'num_tokens': 5, 'label': 'short'}, or a Drafter. "
                "`python run.py --list methods` prints the names.",
            )
            entries.append(entry_of(compose_entry(cfg, item)))
            compared.append(dict(item) if isinstance(item, Mapping) else item)
    refuse_duplicate_labels(
        entries,
        "{'method': 'METHOD', 'label': 'LABEL_2'} or {'drafter': INSTANCE, 'label': 'LABEL_2'}",
    )
    return tuple(entries), instances, compared


def _describe(drafter: Drafter) -> dict[str, Any]:
    """Describe name, class and knobs as a ``method`` node does."""
    kind = type(drafter)
    names = [f.name for f in fields(drafter) if f.init and not f.name.startswith("_")]
    knobs = json.dumps({name: getattr(drafter, name) for name in names}, default=_plain)
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **json.loads(knobs)}


def _plain(value: Any) -> Any:
    """Describe what JSON cannot hold, never by its address: the run key must be stable."""
    if isinstance(value, Drafter):
        return _describe(value)
    return sorted(value) if isinstance(value, set | frozenset) else type(value).__name__
