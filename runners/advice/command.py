"""``python run.py advise model=… prompts=FILE minutes=10``: words to advice and its files."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rich.console import Console

from runners.advice import answer
from runners.advice.answer import Advice
from runners.advice.steps import Budget, find, subject_key
from runners.run_folder.folder import is_complete, make_folder
from runners.search.live import Bench
from runners.search.space import typed
from specbench.config import compose
from specbench.config.validate import check_values
from specbench.data import cases as questions
from specbench.data.cases import prompt_set_hash
from specbench.errors import ConfigurationError, unknown_name
from specbench.models import loading
from specbench.paths import file_name, typed_path
from specbench.replay.traces import Traces, load_traces
from specbench.results.manifest import BASELINE, RunManifest

WORD = "advise"
MINUTES = 10.0
MAX_NEW_TOKENS = 64  # where nothing else is typed: a prompt then takes seconds

_OWN = ("prompts", "run", "minutes", "methods")
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


def shown(arguments: Sequence[str]) -> bool:
    """Give advice, if the arguments begin with the word for it; whether they did."""
    if list(arguments[:1]) != [WORD]:
        return False
    if {"--help", "-h"} & set(arguments):
        sys.stdout.write(f"{_USAGE}\n")
        return True
    give(read(arguments[1:]))
    return True


def read(arguments: Sequence[str]) -> Request:
    """The request that words on the command line make.

    Raises:
        ConfigurationError: they contradict each other, or one is for another command.
    """
    own: dict[str, str] = {}
    words: list[str] = []
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError(f"{text!r} is not KEY=VALUE. {_USAGE}")
        if key in (*_OWN, "output_dir"):
            own[key] = value
        elif key.lstrip("+~").partition(".")[0] in _DECIDED:
            raise ConfigurationError(f"{text}: advise decides that itself. Leave it out. {_USAGE}")
        elif get_close_matches(key, _OWN, cutoff=0.8):  # no key of a run is spelled like these
            raise unknown_name("key", key, [*_OWN, "output_dir"])
        else:
            words.append(text)
    minutes = _minutes(own.get("minutes", str(MINUTES)))
    asked: list[str] = [key for key in ("prompts", "run") if key in own]
    asked += ["dataset"] if any(re.match(r"dataset=", word) for word in words) else []
    if len(asked) > 1:
        raise ConfigurationError(f"{' and '.join(asked)} both name prompts. Leave one out.")
    if "prompts" in own:
        words += ["dataset=jsonl", f"dataset.path={_quoted(own['prompts'])}"]
    run = Path(own["run"]) if "run" in own else None
    if run is not None:
        words = [*_words_of(run, {word.partition("=")[0] for word in words}), *words]
    if not any(word.startswith("generation.max_new_tokens=") for word in words):
        words.append(f"generation.max_new_tokens={MAX_NEW_TOKENS}")
    methods = own.get("methods")
    return Request(
        typed=tuple(arguments),
        words=tuple(words),
        prompts=own.get("prompts"),
        minutes=minutes,
        run=run,
        methods=None if methods is None else tuple(re.findall(r"\w+", methods)),
        output_dir=Path(own["output_dir"]) if own.get("output_dir") else None,
    )


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 1e5:
        raise ConfigurationError(f"minutes must be a number above 0, got {text}. Type minutes=10.")
    return minutes


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
    kept = [
        word
        for word in manifest.overrides
        if re.match(r"\+{0,2}(model|dataset|generation|engine|seed|data_dir|pair)\b", word)
        and word.partition("=")[0] not in typed_keys
    ]
    if not any(word.startswith("generation.max_new_tokens=") for word in kept):
        tokens = manifest.setting("generation", "max_new_tokens")
        kept.append(f"generation.max_new_tokens={tokens}")
    return kept


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
    cases = questions.load_cases(config.dataset, config.data_dir)
    traces = None if request.run is None else _recording(request.run, cases)
    name = f"{file_name(cfg.model.name)}-{subject_key(cfg, cases)}"
    folder = request.output_dir or Path(cfg.paths.results) / "advice" / name
    make_folder(folder)
    asked = str(cfg.dataset.path or f"dataset={cfg.dataset.name}")
    budget.say(f"{len(cases)} prompts of {asked}, model {cfg.model.name}")
    advice = find(cases, asked, Bench(cfg), folder, budget, traces, request.methods)
    advice.command = command_of(advice, request)
    advice.write(folder)
    console = Console()
    answer.show(advice, console if console.is_terminal else Console(width=120))
    sys.stdout.write(f"files: {folder}/ ({answer.FILE}, {answer.PAGE})\n")
    return advice


def _recording(run: Path, cases: Sequence[questions.Case]) -> Traces:
    """A finished run's recording, of these very questions."""
    if RunManifest.read(run).prompt_set_hash != prompt_set_hash(cases):
        raise ConfigurationError(
            f"the questions of run={run} are not those that its command names here: they have "
            "changed, or dataset.path and data_dir lie elsewhere. Type dataset.path=FILE or "
            "data_dir=DIR, or record anew: prompts=FILE instead of run."
        )
    return load_traces(run)


def command_of(advice: Advice, request: Request) -> str:
    """Write the line that uses what is advised on these prompts, or the one that decides more."""
    option = advice.option
    if advice.decision in (answer.USE, answer.PLAIN):
        item = advice.item
        words = [f"method={item.pop('method')}", *typed(item), *request.words]
    else:
        replaced = ("minutes=", "methods=") if option else ("minutes=",)
        words = [WORD, *(word for word in request.typed if not word.startswith(replaced))]
        words += [f"methods=[{','.join(advice.undecided)}]"] if option else []
        words += [f"minutes={advice.minutes_to_decide}"]
    return shlex.join(["python", "run.py", *words])
