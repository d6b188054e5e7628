"""Advice as it is typed (``python run.py advise prompts=FILE minutes=10``) and from Python."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt, Lt
from pydantic import TypeAdapter
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runners.advice import answer
from runners.advice.answer import Advice
from runners.advice.steps import Budget, find, subject_key
from runners.comparison import CallerInput, call, read_input
from runners.cost import Cost
from runners.job import Job
from runners.launch.dispatch import entry_of
from runners.run_folder.folder import is_complete, make_folder
from runners.search.backends import Bench, surface_job
from runners.search.space import typed
from specbench.config import compose
from specbench.config.run_key import key_of, run_identity
from specbench.config.schema import RECORD_STATES
from specbench.config.validate import check_values
from specbench.data.cases import Case, load_cases, prompt_set_hash
from specbench.errors import ConfigurationError, unknown_name
from specbench.models import loading
from specbench.models.given_back import given_back
from specbench.paths import file_name, typed_path
from specbench.replay.traces import Traces, load_traces
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.records import SURFACE

MINUTES = 10.0
MAX_NEW_TOKENS = 64  # where nothing else is typed: a prompt then takes seconds

_WORD = "advise"
_KEYS = ("prompts", "run", "minutes", "methods", "output_dir")
_TOKENS_KEY = "generation.max_new_tokens"
_USAGE = (
    'Type python run.py advise prompts=FILE (a prompt a line, or {"prompt": ...}), dataset=NAME, '
    "or run=DIR (a finished run), and model=..., minutes=10, methods=[pld,sam], output_dir=DIR as "
    "wanted. docs/advise.md explains them."
)
# What advice decides itself, or what would make its runs other ones than it takes them for.
_DECIDED = ("method", "compare", "runner", "baseline", "record", "repeats", "shard", "fresh")


@dataclass(frozen=True)
class Request:
    """What was typed.

    Attributes:
        typed: what advice was asked with, as it was typed.
        words: keys of a run, with what ``prompts`` or ``run`` stand for among them.
        prompts: a file.
        run: a finished run whose recording is used.
        output_dir: None: a folder of its own for these prompts and this model.
    """

    typed: tuple[str, ...]
    words: tuple[str, ...]
    prompts: str | None = None
    minutes: float = MINUTES
    run: Path | None = None
    methods: tuple[str, ...] | None = None
    output_dir: Path | None = None


def main(arguments: Sequence[str]) -> None:
    """Give the advice that is asked for, or help."""
    if {"--help", "-h"} & set(arguments):
        sys.stdout.write(f"{_USAGE}\n")
    else:
        give(read(arguments))


def read(arguments: Sequence[str]) -> Request:
    """Read the request that words on the command line make.

    Raises:
        ConfigurationError: they contradict each other, or one is for another command.
    """
    keys: dict[str, str] = {}
    words: list[str] = []
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError(f"{text!r} is not KEY=VALUE. {_USAGE}")
        if key in _KEYS:
            keys[key] = value
        elif key.lstrip("+~").partition(".")[0] in _DECIDED:
            raise ConfigurationError(f"{text}: advise decides that itself. Leave it out. {_USAGE}")
        elif get_close_matches(key, _KEYS, cutoff=0.8):  # no key of a run is spelled like these
            raise unknown_name("key", key, _KEYS)
        else:
            words.append(text)
    sources: list[str] = [key for key in ("prompts", "run") if key in keys]
    sources += ["dataset"] if any(word.startswith("dataset=") for word in words) else []
    if len(sources) > 1:
        raise ConfigurationError(f"{' and '.join(sources)} both name prompts. Leave one out.")
    minutes = _minutes(keys.get("minutes", str(MINUTES)))
    if "prompts" in keys:
        words += ["dataset=jsonl", f"dataset.path={_quoted(keys['prompts'])}"]
    run = Path(keys["run"]) if "run" in keys else None
    if run is not None:
        words = [*_words_of(run, {word.partition("=")[0] for word in words}), *words]
    if not any(word.startswith(f"{_TOKENS_KEY}=") for word in words):
        words.append(f"{_TOKENS_KEY}={MAX_NEW_TOKENS}")
    return Request(
        typed=tuple(arguments),
        words=tuple(words),
        prompts=keys.get("prompts"),
        minutes=minutes,
        run=run,
        methods=tuple(re.findall(r"\w+", keys["methods"])) if "methods" in keys else None,
        output_dir=Path(keys["output_dir"]) if keys.get("output_dir") else None,
    )


def _minutes(text: str) -> float:
    try:
        return TypeAdapter(Annotated[float, Gt(0), Lt(1e5)]).validate_python(text)
    except ValueError:
        raise ConfigurationError(
            f"minutes must be a number above 0, got {text}. Type minutes=10."
        ) from None


def _quoted(path: str) -> str:
    """A path as Hydra takes it whatever stands in it."""
    return path if re.fullmatch(r"[\w./~+-]+", path) else json.dumps(path, ensure_ascii=False)


def _words_of(run: Path, typed_keys: set[str]) -> list[str]:
    """Of the words that a finished run was typed with, those on model, prompts and answers."""
    if not is_complete(run):
        raise ConfigurationError(
            f"run={run} is not the folder of a finished run. Type run=DIR with one, or "
            "prompts=FILE."
        )
    manifest = RunManifest.read(run)
    words = [
        word
        for word in manifest.overrides
        if re.match(r"\+{0,2}(model|dataset|generation|engine|seed|data_dir|pair)\b", word)
        and word.partition("=")[0] not in typed_keys
    ]
    if not any(word.startswith(f"{_TOKENS_KEY}=") for word in words):
        words.append(f"{_TOKENS_KEY}={manifest.setting('generation', 'max_new_tokens')}")
    return words


def give(request: Request) -> Advice:
    """Find the advice, print it, and write its files.

    Raises:
        ConfigurationError: the request cannot be met; says what to type.
    """
    budget = Budget(request.minutes)
    if request.prompts is not None and not typed_path(request.prompts).is_file():
        raise ConfigurationError(
            f"prompts={request.prompts} is not a file. Type prompts=FILE.txt with a prompt a line, "
            'or FILE.jsonl with {"prompt": "..."} a line.'
        )
    cfg = compose.compose([f"method={BASELINE}", *request.words])
    cfg.measure.rerun_minutes = min(1.0, request.minutes / 10)
    check_values(cfg)
    if cfg.generation.temperature:
        raise ConfigurationError(
            "advise replays greedy answers: type generation=greedy, or leave generation out."
        )
    config = compose.typed(cfg)
    loading.model_files_present(config)
    cases = load_cases(config.dataset, config.data_dir)
    traces = None if request.run is None else _recording(request.run, cases)
    name = f"{file_name(cfg.model.name)}-{subject_key(cfg, cases)}"
    folder = request.output_dir or Path(cfg.paths.results) / "advice" / name
    make_folder(folder)
    questions = str(cfg.dataset.path or f"dataset={cfg.dataset.name}")
    budget.say(f"{len(cases)} prompts of {questions}, model {cfg.model.name}")
    advice = find(cases, questions, Bench(cfg), folder, budget, traces, request.methods)
    advice.command = command_of(advice, request)
    advice.write(folder)
    console = Console()
    answer.show(advice, console if console.is_terminal else Console(width=120))
    sys.stdout.write(f"files: {folder}/ ({answer.FILE}, {answer.PAGE})\n")
    return advice


def _recording(run: Path, cases: Sequence[Case]) -> Traces:
    if RunManifest.read(run).prompt_set_hash != prompt_set_hash(cases):
        raise ConfigurationError(
            f"the questions of run={run} are not those that its command names here: they have "
            "changed, or dataset.path and data_dir lie elsewhere. Type dataset.path=FILE or "
            "data_dir=DIR, or record anew: prompts=FILE instead of run."
        )
    return load_traces(run)


def command_of(advice: Advice, request: Request) -> str:
    """Write the line that uses what is advised on these prompts, or the one that decides more."""
    if advice.decision in (answer.USE, answer.PLAIN):
        item = advice.item
        words = [f"method={item.pop('method')}", *typed(item), *request.words]
    else:
        replaced = ("minutes=", "methods=") if advice.option else ("minutes=",)
        words = [_WORD, *(word for word in request.typed if not word.startswith(replaced))]
        words += [f"methods=[{','.join(advice.undecided)}]"] if advice.option else []
        words += [f"minutes={advice.minutes_to_decide}"]
    return shlex.join(["python", "run.py", *words])


class InMemory(Bench):
    """Makes the runs in this process, of a model that the caller lent."""

    def __init__(self, given: CallerInput) -> None:
        super().__init__(given.cfg)
        self._given = given

    def surface(self) -> Path:
        node, path = surface_job(self.cfg)
        identity, config = run_identity(node), compose.typed(node)
        with given_back(self._given.model):
            loaded = loading.in_memory(config.model, self._given.model, self._given.tokenizer)
            # Two models in memory may have one name.
            path = path.with_name(f"{path.name}-{(loaded.weights_hash or '')[:8]}")
            if not is_complete(path):
                make_folder(path)
                identity = {**identity, "shard": None}
                job = Job(config, (), identity, key_of(identity), path, (entry_of(node),), ())
                Cost(lambda _: loaded).run(job)
        return path / SURFACE

    def record(self, cases: Sequence[Case], path: Path) -> None:
        self._given.measure([], path, cases, record=RECORD_STATES, strict=False)

    def live(self, items: Sequence[Mapping[str, Any]], cases: Sequence[Case], path: Path) -> None:
        self._given.measure(items, path, cases, strict=False)


def advise(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Any],
    *,
    name: str | None = None,
    minutes: float = MINUTES,
    max_new_tokens: int = MAX_NEW_TOKENS,
    seed: int = 0,
    methods: Sequence[str] | None = None,
    output_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> Advice:
    """Find the drafting method for these prompts on this machine, as ``run.py advise`` does.

    Args:
        model, tokenizer, prompts, name, overrides: as for `runners.compare`.
        minutes: for everything; a step that was begun is finished.
        max_new_tokens, seed: as on the command line.
        methods: by name; None takes all that have a search space.
        output_dir: keeps files there, and goes on there. None keeps none but the cost surface.

    Raises:
        ComparisonRefused: a ValueError; something cannot be used, the message says what to type.
    """
    budget = Budget(minutes)
    arguments = ["generation=greedy", "verifier=auto", f"seed={seed}"]
    arguments += [f"{_TOKENS_KEY}={max_new_tokens}"]
    with call(output_dir) as path:
        given = read_input(model, tokenizer, prompts, name, arguments, overrides)
        make_folder(path)
        questions = f"{len(given.cases)} prompts"
        advice = find(given.cases, questions, InMemory(given), path, budget, methods=methods)
        if advice.decision == answer.USE:
            advice.command = f"compare(model, tokenizer, prompts, [{advice.item!r}])"
        elif advice.decision != answer.PLAIN:
            chosen = f", methods={advice.undecided!r}" if advice.option else ""
            more = f"minutes={advice.minutes_to_decide}{chosen}"
            advice.command = f"advise(model, tokenizer, prompts, {more})"
        if output_dir is None:
            advice.folder = ""
        else:
            advice.write(path)
    return advice
