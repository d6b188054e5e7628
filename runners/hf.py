"""runner=hf: transformers' own decoding loops as peers, interleaved with ours case by case.

    python run.py runner=hf method=pld                     # ar, pld, hf_generate, hf_prompt_lookup
    python run.py runner=hf method=sps pair=random_draft   # and hf_assisted, with the same draft

The peers run on a copy of the model as transformers loads it: our attention, cache and packed
linears are not in it. Prompts, limit, end tokens, clock, audit and files are as in every run.

What a number means here: passes are counted by hooks on the model's forward; the assistant's pass
over the prompt is not among them, as in our own methods (``draft_forwards``). ``prefill_s`` is the
first pass. Assisted generation and prompt lookup draft before it, so their first pass reads the
prompt and verifies a draft at once: it counts as a step too where it commits more than its one
token. ``decode_s`` is everything else that ``generate`` does; what happens before the first pass is
also given as ``drafter_setup_s``.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from runners.job import Entry, Job
from runners.runner import Runner
from runners.session.live import run_live
from runners.session.speculation import LOOPS
from specbench.config.draft import draft_weights
from specbench.config.schema import HfConfig
from specbench.errors import ConfigurationError, NeedsNotMet, WeightsNotFound, unknown_name
from specbench.models import loading

log = logging.getLogger(__name__)

SCHEDULES = ("constant", "heuristic", "heuristic_transient")


class Hf(Runner):
    """``runner=hf``."""

    def run(self, job: Job) -> int:
        job = replace(job, entries=(*job.entries, *_peers(job)))
        # torch and transformers, in the child alone
        from runners.session.transformers_session import load_transformers_session

        return run_live(job, load_transformers_session)


def _peers(job: Job) -> list[Entry]:
    assert isinstance(job.config.runner, HfConfig)
    knobs = job.config.runner.hf
    if knobs.schedule is not None and knobs.schedule not in SCHEDULES:
        raise unknown_name("value of runner.hf.schedule:", knobs.schedule, SCHEDULES)
    for loop in knobs.loops or ():
        if loop not in LOOPS:
            raise unknown_name("loop in runner.hf.loops:", loop, LOOPS)
    loops = list(knobs.loops or LOOPS)
    reason = _no_assistant(job) if "assisted" in loops else ""
    if reason and knobs.loops:
        raise NeedsNotMet(f"runner.hf.loops names assisted, but {reason}.")
    if reason:
        log.warning("hf_assisted is left out: %s", reason)
        loops.remove("assisted")
    entries = []
    for loop in loops:
        label = f"hf_{loop}"
        if label in job.labels:
            raise ConfigurationError(f"the label {label!r} is taken by runner=hf: rename yours.")
        node = {"_target_": "runners.session.speculation.Peer", "name": f"hf:{loop}", "loop": loop}
        entries.append(Entry(label, node))
    return entries


def _no_assistant(job: Job) -> str:
    """Why the run's draft model cannot assist, or an empty text."""
    from specbench.models.draft.loading import ID_MAP_FILE

    weights = draft_weights(job.config.pair.draft, job.config.model)
    if weights is None:
        return "no draft model is named: type pair.draft.path=FOLDER or pair=random_draft"
    vocabulary = job.config.pair.draft.vocabulary
    if not weights.shape and vocabulary != "same":
        return (
            f"pair.draft.vocabulary={vocabulary} is for our methods: the runner's loop hands ids "
            "from one model to the other as they are"
        )
    if not weights.shape and (Path(weights.id) / ID_MAP_FILE).is_file():
        return (
            f"the draft {weights.id} has a reduced vocabulary ({ID_MAP_FILE}): transformers hands "
            "ids from one model to the other as they are, and refuses two vocabularies of unequal "
            "sizes. Type pair.draft.path=FOLDER or pair.draft.id=HUB_ID of a draft with the "
            "model's own vocabulary, or pair=random_draft"
        )
    try:
        loading.model_files_present(weights)
    except WeightsNotFound as error:
        return str(error).rstrip(".")
    return ""
