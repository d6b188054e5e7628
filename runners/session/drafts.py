"""The draft models of a run's labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from runners.session.build import make_target
from runners.session.method_runs import MethodRun
from specbench.config.schema import RunConfig
from specbench.models.draft.loading import load_draft_model
from specbench.models.draft.model import DraftModel
from specbench.models.target import Target
from specbench.results.manifest import DraftInfo

LoadedDraft = tuple[DraftModel, DraftInfo]


def load_drafts(
    config: RunConfig,
    runs: Sequence[MethodRun],
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    max_len: int,
) -> dict[str, LoadedDraft]:
    """By label its draft model; labels with the same ``pair.draft`` share one."""
    drafts: dict[str, LoadedDraft] = {}
    for run in runs:
        needs = run.drafter.needs
        if not needs.draft_model:
            continue
        max_nodes = needs.draft_nodes or needs.max_nodes
        same = [r.label for r in runs if r.label in drafts and r.entry.draft == run.entry.draft]
        if same:
            drafts[run.label] = drafts[same[0]]
            drafts[run.label][0].reserve(max_len, max_nodes)
            continue
        drafts[run.label] = load_draft_model(
            run.entry.draft,
            config.model,
            target,
            tokenizer,
            max_len=max_len,
            max_nodes=max_nodes,
            make_target=partial(make_target, config=config, drafts=True),
        )
    return drafts
