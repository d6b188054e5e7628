"""Loading what all labels of a run share: a `Session`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from runners.job import Job
from runners.session.build import batch_layouts, hidden_layers, make_target
from runners.session.drafts import load_drafts
from runners.session.method_files import find_artifacts, find_heads
from runners.session.method_runs import MethodRun
from runners.session.session import Session
from specbench.config.draft import draft_weights
from specbench.config.schema import DraftConfig
from specbench.data.chat_templates import PromptTemplate, TokenIdPrompts
from specbench.kernels.architectures import usable_context
from specbench.models import loading
from specbench.models.checkpoints import weights
from specbench.models.checks import self_check
from specbench.models.draft.loading import check_same_tokenizer
from specbench.models.loading import LoadedModel

# An answer is tokenised again in the next turn's prompt, and may then be longer than it was.
_RETOKENISED = 1.25


def load_session(
    job: Job,
    runs: Sequence[MethodRun],
    kind: type[Session] = Session,
    more_drafts: Sequence[DraftConfig] = (),
) -> Session:
    """Load what all labels of a run share; see `make_session`."""
    tokenizer = loading.load_tokenizer(job.config)
    template = PromptTemplate.from_config(tokenizer, job.config)
    load = partial(loading.load_model, job.config, tokenizer)
    return make_session(job, runs, tokenizer, template, load, kind, more_drafts)


def make_session(
    job: Job,
    runs: Sequence[MethodRun],
    tokenizer: PreTrainedTokenizerBase,
    template: PromptTemplate | TokenIdPrompts,
    load: Callable[[], LoadedModel],
    kind: type[Session] = Session,
    more_drafts: Sequence[DraftConfig] = (),
) -> Session:
    """Make what all labels of a run share.

    The methods' needs decide which artifacts are resolved (before ``load`` loads weights) and how
    large the engine's buffers are. ``more_drafts`` will be loaded later and are checked beforehand.

    Raises:
        NeedsNotMet: an artifact is missing and cannot be built here, or a draft model has another
            tokenizer.
        WeightsNotFound: the model's weights are not to be had.
        ConfigurationError: the model does not decode here as it does in transformers.
    """
    config = job.config
    files = {run.label: find_artifacts(config, run, tokenizer) for run in runs}
    heads = {run.label: find_heads(config, run) for run in runs}
    # Before the weights: a large target takes minutes to load.
    asked = [*(run.entry.draft for run in runs if run.drafter.needs.draft_model), *more_drafts]
    for i, draft in enumerate(asked):
        wanted = draft_weights(draft, config.model)
        if draft not in asked[:i] and wanted is not None and not wanted.shape:
            check_same_tokenizer(wanted, tokenizer)
    model = load()
    what = f"{weights.key_of(config.model)}={model.id}"
    self_check.check_tokenizer(model.model, tokenizer, what)
    max_len = min(_longest_turn(job, template), model.context_length)
    max_nodes = max(run.drafter.needs.max_nodes for run in runs)
    usable = usable_context(model.model, what, max_len, max_nodes)
    make = partial(
        make_target,
        config=config,
        max_len=max_len,
        max_nodes=max_nodes,
        batch=max(run.drafter.needs.batch for run in runs),
        layouts=batch_layouts(runs),
        hidden_layers=hidden_layers(runs),
    )
    target, check = self_check.checked(model.model, make, what=what, longest=max_len)
    model = replace(
        model,
        context_length=min(model.context_length, usable or model.context_length),
        self_check=check,
    )
    drafts = load_drafts(config, runs, target, tokenizer, max_len)
    return kind(job, runs, tokenizer, template, files, heads, model, target, drafts, max_len)


def _longest_turn(job: Job, template: PromptTemplate | TokenIdPrompts) -> int:
    """Tokens of the longest dialogue with its answers, as far as it can be told beforehand."""
    longest, limit = 0, job.config.generation.max_new_tokens
    for case in job.cases:
        turns: list[tuple[str, str | None]] = [(user, "") for user in case.turns[:-1]]
        answers = len(turns) * limit * _RETOKENISED
        prompt = len(template.render([*turns, (case.turns[-1], None)]))
        longest = max(longest, prompt + int(answers) + limit)
    return longest
