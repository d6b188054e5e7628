"""Loading what all labels of a run share: targets, draft models, a `Session`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runners.job import Job
from runners.session.method_runs import MethodRun, find_artifacts, find_heads, needs_of
from runners.session.session import Session
from specbench.config.schema import (
    FLOAT32_WEIGHTS,
    PER_SEQUENCE,
    DraftConfig,
    RunConfig,
    draft_weights,
    packed_bytes,
    verifier_name,
)
from specbench.data.chat_templates import PromptTemplate, TokenIdPrompts
from specbench.errors import ConfigurationError, NeedsNotMet
from specbench.kernels.architectures import usable_context
from specbench.models import loading
from specbench.models.checkpoints import weights
from specbench.models.checks import self_check
from specbench.models.draft.loading import check_same_tokenizer, load_draft_model
from specbench.models.graph_target import GraphTarget, no_graphs
from specbench.models.loading import LoadedModel
from specbench.models.target import Target

log = logging.getLogger(__name__)

# An answer is tokenised again in the next turn's prompt, and may then be longer than it was.
_RETOKENISED = 1.25
_ANSWER = "yes"  # stands for one that is not there yet: some templates refuse an empty one


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
    _check_budget(runs, config.batch.budget)
    checked: list[DraftConfig] = []
    for run in runs:
        with needs_of(run.entry):
            if config.batch.size > 1:
                _check_batch(run, config.batch.size)
            run.artifacts = find_artifacts(config, run, tokenizer)
            run.heads = find_heads(config, run)
            # Before the weights: a large target takes minutes to load.
            if run.drafter.needs.draft_model and run.entry.draft not in checked:
                _check_draft_tokenizer(run.entry.draft, config, tokenizer)
                checked.append(run.entry.draft)
    for draft in more_drafts:
        _check_draft_tokenizer(draft, config, tokenizer)
    model = load()
    what = f"{weights.key_of(config.model)}={model.id}"
    self_check.check_tokenizer(model.model, tokenizer, what)
    max_len = min(_longest_turn(job, template), model.context_length)
    needs = [run.drafter.needs for run in runs]
    max_nodes = max(n.max_nodes for n in needs)
    usable = usable_context(model.model, what, max_len, max_nodes)
    make = partial(
        make_target,
        config=config,
        max_len=max_len,
        max_nodes=max_nodes,
        batch=max(n.batch for n in needs),
        layouts=sorted({(n.batch, n.max_nodes // n.batch + 1) for n in needs if n.batch > 1}),
    )
    target, check = self_check.checked(
        model.model,
        make,
        what=what,
        longest=max_len,
    )
    model = replace(
        model,
        context_length=min(model.context_length, usable or model.context_length),
        self_check=check,
        tokenizer=tokenizer,
    )
    _load_drafts(config, runs, target, tokenizer, max_len)
    return kind(job, runs, template, model, target, max_len)


def _check_budget(runs: Sequence[MethodRun], budget: str) -> None:
    """Refuse a budget of all texts together where no method has one."""
    if budget != PER_SEQUENCE and not any(run.drafter.needs.priced_rows for run in runs):
        raise ConfigurationError(
            f"batch.budget={budget} chooses over the drafts of all texts by what rows cost, and no "
            "method of this run goes by that. Type method=adaptive method.policy=marginal "
            "method.surface=COST/surface.json, or batch.budget=per_sequence."
        )


def _check_batch(run: MethodRun, size: int) -> None:
    """Refuse what cannot be decoded beside other texts."""
    drafter, entry = run.drafter, run.entry
    remedy = f"Type batch.size=1, or leave {entry.label} out."
    if drafter.needs.overlap:
        raise NeedsNotMet(
            f"method={entry.name} drafts while the target reads its last draft, and with "
            f"batch.size={size} that pass is its neighbours', too: one device would have to run "
            f"{size} drafters beside it at once. {remedy}"
        )
    if drafter.state_scope == "run":
        raise NeedsNotMet(
            f"method={entry.name} learns from case to case (state_scope=run), and with "
            f"batch.size={size} cases are decoded at once, each with a drafter of its own. Type "
            "state_scope=prompt, and method.state_scope=prompt where it keeps its own. " + remedy
        )


def _check_draft_tokenizer(
    draft: DraftConfig, config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    wanted = draft_weights(draft, config.model)
    if wanted is not None and not wanted.shape and draft.vocabulary == "same":
        check_same_tokenizer(wanted, tokenizer)


def _longest_turn(job: Job, template: PromptTemplate | TokenIdPrompts) -> int:
    """Tokens of the longest dialogue with its answers, as far as it can be told beforehand."""
    longest, limit = 0, job.config.generation.max_new_tokens
    for case in job.cases:
        turns: list[tuple[str, str | None]] = [(user, _ANSWER) for user in case.turns[:-1]]
        answers = len(turns) * limit * _RETOKENISED
        prompt = len(template.render([*turns, (case.turns[-1], None)]))
        longest = max(longest, prompt + int(answers) + limit)
    return longest


def _load_drafts(
    config: RunConfig,
    runs: Sequence[MethodRun],
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    max_len: int,
) -> None:
    """Load the labels' draft models; labels with the same ``pair.draft`` share one."""
    for i, run in enumerate(runs):
        needs = run.drafter.needs
        if not needs.draft_model:
            continue
        max_nodes = needs.draft_nodes or needs.max_nodes
        same = [r.draft for r in runs[:i] if r.draft and r.entry.draft == run.entry.draft]
        if same:
            run.draft = same[0]
            run.draft[0].reserve(max_len, max_nodes)
            continue
        with needs_of(run.entry):
            run.draft = load_draft_model(
                run.entry.draft,
                config.model,
                target,
                tokenizer,
                max_len=max_len,
                max_nodes=max_nodes,
                make_target=partial(make_target, config=config, drafts=True),
                weights=config.engine.draft_weights
                if packed_bytes(config.engine.packed)
                else FLOAT32_WEIGHTS,
            )


def make_target(
    model: PreTrainedModel,
    config: RunConfig,
    *,
    max_len: int,
    max_nodes: int,
    batch: int = 1,
    drafts: bool = False,
    layouts: Sequence[tuple[int, int]] = (),
) -> Target:
    """The target of the ``engine`` group: graphs on one CUDA device, elsewhere eager passes.

    With ``drafts`` it is a draft model's; ``layouts`` are those of batches that are captured.
    """
    reason, name = None, config.engine.name
    if name == "graph" or (name == "auto" and model.device.type == "cuda"):
        reason = no_graphs(model)
        if config.batch.size > 1:
            reason = "passes of a batch have another number of rows at each step"
        if reason is None:
            verifier = verifier_name(config.verifier.name, config.generation.temperature)
            return GraphTarget(
                model,
                max_len=max_len,
                max_nodes=max_nodes,
                batch=batch,
                commits=verifier == "greedy",
                drafts=drafts,
                layouts=layouts,
                fused=config.engine.fused_layers,
            )
        log.warning("engine=graph runs eagerly: %s", reason)
    made = Target(
        model,
        max_len=max_len,
        max_nodes=max_nodes,
        batch=batch,
        reason=reason,
        packed_bytes=packed_bytes(config.engine.packed),
        texts=config.batch.size if drafts else 1,
    )
    made.draft_weights = config.engine.draft_weights
    return made
