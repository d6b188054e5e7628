"""Groups of texts in lock-step: which methods can be decoded so, and where a turn sits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runners.job import Job
from runners.session.blocks import Turn, each
from runners.session.method_runs import MethodRun
from specbench.config.schema import PER_SEQUENCE
from specbench.errors import ConfigurationError, NeedsNotMet


def check_budget(runs: Sequence[MethodRun], budget: str) -> None:
    """Refuse a budget of all texts together where no method has one.

    Raises:
        ConfigurationError: says which has.
    """
    if budget != PER_SEQUENCE and not any(run.drafter.needs.priced_rows for run in runs):
        raise ConfigurationError(
            f"batch.budget={budget} chooses over the drafts of all texts by what rows cost, and no "
            "method of this run goes by that. Type method=adaptive method.policy=marginal "
            "method.surface=COST/surface.json, or batch.budget=per_sequence."
        )


def check_batch(run: MethodRun, size: int) -> None:
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


def seat_turns(job: Job, turns: Sequence[Turn], ask: Callable[[Turn], None]) -> list[Turn]:
    """``ask`` `each` turn of a group for what it needs; those that can be decoded.

    The others' records name the group, too: one that failed leaves it out of all comparisons.
    """
    each(turns, ask)
    able = [turn for turn in turns if turn.error is None]
    for turn in turns:
        turn.record = turn.record.replace(batch=job.seat(turn.batch, turn.seat, len(able)))
    return able
