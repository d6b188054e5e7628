"""``advise(model, tokenizer, prompts)``: advice on a model in memory, beside `runners.compare`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runners.advice import answer, command
from runners.advice.answer import Advice
from runners.advice.steps import Budget, find
from runners.caller_input import CallerInput, call, read_input
from runners.cost import Cost
from runners.job import Job
from runners.launch.dispatch import entry_of
from runners.run_folder.folder import is_complete, make_folder
from runners.search.live import Bench, surface_job
from specbench.config import compose
from specbench.config.run_key import key_of, run_identity
from specbench.config.schema import RECORD_STATES
from specbench.data.cases import Case
from specbench.models import loading
from specbench.models.given_back import given_back
from specbench.results.records import SURFACE


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
                own = {**identity, "shard": None}
                job = Job(config, (), own, key_of(identity), path, (entry_of(node),), ())
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
    minutes: float = command.MINUTES,
    max_new_tokens: int = command.MAX_NEW_TOKENS,
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
    arguments += [f"generation.max_new_tokens={max_new_tokens}"]
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
