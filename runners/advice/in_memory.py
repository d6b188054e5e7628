"""``advise(model, tokenizer, prompts)``: advice on a model in memory, beside `runners.compare`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runners.advice import command
from runners.advice.answer import Advice
from runners.advice.budget import Budget
from runners.advice.steps import Wanted, find
from runners.caller_input import folder_of, own_hydra, read_input
from runners.cost import Cost
from runners.job import Job
from runners.launch.dispatch import entry_of
from runners.run_folder.folder import is_complete, make_folder
from runners.search import jobs
from runners.search.entries import mapping_of
from specbench.config import compose
from specbench.config.run_key import key_of, run_identity
from specbench.config.schema import RECORD_STATES
from specbench.data.cases import Case
from specbench.models import loading
from specbench.models.given_back import given_back
from specbench.results.records import SURFACE


class InMemory:
    """A `runners.advice.bench.Bench` of a model in this process.

    Args:
        arguments: the call's other arguments, as overrides.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Iterable[Any],
        name: str | None,
        arguments: Sequence[str],
        overrides: Sequence[str],
    ) -> None:
        self._given = read_input(model, tokenizer, prompts, name, arguments, overrides)
        self.cfg, self.cases = self._given.cfg, self._given.cases

    def surface(self) -> Path:
        node, path = jobs.surface_job(self.cfg)
        identity, config = run_identity(node), compose.typed(node)
        with given_back(self._given.model), own_hydra():
            loaded = loading.in_memory(config.model, self._given.model, self._given.tokenizer)
            # Two models in memory may have one name.
            path = path.with_name(f"{path.name}-{(loaded.weights_hash or '')[:8]}")
            if not is_complete(path):
                make_folder(path)
                own = {**identity, "shard": None}
                job = Job(config, (), own, key_of(identity), path, (entry_of(node),), ())
                Cost(lambda _: loaded).run(job)
        return path / SURFACE

    def record(self, cases: Sequence[Case], path: Path) -> Path:
        self._given.measure([], path, cases, record=RECORD_STATES, strict=False)
        return path

    def live(self, items: Sequence[Mapping[str, Any]], cases: Sequence[Case], path: Path) -> Path:
        self._given.measure(items, path, cases, strict=False)
        return path


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
    with folder_of(output_dir) as path, own_hydra():
        budget = Budget(minutes)
        arguments = ["generation=greedy", "verifier=auto", f"seed={seed}"]
        arguments += [f"generation.max_new_tokens={max_new_tokens}"]
        bench = InMemory(model, tokenizer, prompts, name, arguments, overrides)
        make_folder(path)
        questions = f"{len(bench.cases)} prompts"
        found = find(Wanted(bench.cases, questions, methods=methods), bench, path, budget)
        option = found.best or found.candidate
        if option is not None:
            drafter = mapping_of(option.method, option.knobs)
            found.command = f"compare(model, tokenizer, prompts, [{drafter!r}])"
        if output_dir is None:
            found.folder = ""
        else:
            command.write(found, path)
        return found
