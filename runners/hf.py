"""runner=hf: transformers' own decoding loops as peers, interleaved with ours case by case.

    python run.py runner=hf method=pld                     # ar, pld, hf_generate, hf_prompt_lookup
    python run.py runner=hf method=sps pair=random_draft   # and hf_assisted, with the same draft

The peers run on a copy of the model as transformers loads it: our attention, cache and packed
linears are not in it. Prompts, limit, end tokens, clock, audit and files are those of every run.

What a number means here: passes are counted by hooks on the model's forward; the assistant's pass
over the prompt is not among them, as in our own methods (``draft_forwards``). ``prefill_s`` is the
first pass. Assisted generation and prompt lookup draft before it, so their first pass reads the
prompt and verifies a draft at once: it counts as a step too where it commits more than its one
token. ``decode_s`` is everything else that ``generate`` does; what happens before the first pass is
also given as ``drafter_setup_s``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from runners import offline
from runners.job import Entry
from specbench.config.draft import draft_node
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import Needs
from specbench.errors import ConfigurationError, NeedsNotMet, WeightsNotFound, unknown_name
from specbench.models import loading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runners.job import Job
    from runners.session.method_runs import MethodRun
    from runners.session.session import Session

log = logging.getLogger(__name__)

LOOPS = ("generate", "assisted", "prompt_lookup")
SCHEDULES = ("constant", "heuristic", "heuristic_transient")


@dataclass(kw_only=True, eq=False)
class Peer(Drafter):
    """Stands for one of transformers' loops among the contenders; it drafts nothing for ours.

    Attributes:
        loop: one of ``LOOPS``.
    """

    loop: str
    state_scope: str = "turn"

    @property
    def needs(self) -> Needs:
        """Greedy decoding alone."""
        # Assisted generation drafts greedily whatever the temperature, so that its ratio test is
        # given another distribution than the one that was drawn from.
        return Needs(tokens_only=False, max_nodes=1, sampling=False)


IN_PROCESS = False
adopt, questions, show = offline.adopt, offline.questions, offline.show


def run(job: Job) -> int:
    """As :func:`runners.offline.run`, with the peers behind the job's own entries.

    Raises:
        ConfigurationError: a knob is out of range, or a peer cannot work in this run.
    """
    return offline.run(replace(job, entries=(*job.entries, *_peers(job))), _make_stage)


def _peers(job: Job) -> list[Entry]:
    knobs = job.config["runner"]["hf"]
    if knobs["schedule"] is not None and knobs["schedule"] not in SCHEDULES:
        raise unknown_name("value of runner.hf.schedule:", str(knobs["schedule"]), SCHEDULES)
    for loop in knobs["loops"] or ():
        if loop not in LOOPS:
            raise unknown_name("loop in runner.hf.loops:", str(loop), LOOPS)
    loops = list(knobs["loops"] or LOOPS)
    reason = _no_assistant(job) if "assisted" in loops else ""
    if reason and knobs["loops"]:
        raise NeedsNotMet(f"runner.hf.loops names assisted, but {reason}.")
    if reason:
        log.warning("hf_assisted is left out: %s", reason)
        loops.remove("assisted")
    entries = []
    for loop in loops:
        label = f"hf_{loop}"
        if label in job.labels:
            raise ConfigurationError(f"the label {label!r} is taken by runner=hf: rename yours.")
        node = {"_target_": "runners.hf.Peer", "name": f"hf:{loop}", "loop": loop}
        entries.append(Entry(label, node))
    return entries


def _no_assistant(job: Job) -> str:
    """Why the run's draft model cannot assist, or an empty text."""
    from specbench.models.draft_loading import ID_MAP_FILE

    node = draft_node(job.config["pair"]["draft"], job.config["model"])
    if node is None:
        return "no draft model is named: type pair.draft.path=FOLDER or pair=random_draft"
    if not node["shape"] and (Path(node["id"]) / ID_MAP_FILE).is_file():
        return (
            f"the draft {node['id']} has a reduced vocabulary ({ID_MAP_FILE}): transformers hands "
            "ids from one model to the other as they are, and refuses two vocabularies of unequal "
            "sizes. Type pair.draft.path=FOLDER or pair.draft.id=HUB_ID of a draft with the "
            "model's own vocabulary, or pair=random_draft"
        )
    try:
        loading.model_files_present(node)
    except WeightsNotFound as error:
        return str(error).rstrip(".")
    return ""


def _make_stage(job: Job, contenders: Sequence[MethodRun]) -> Session:
    from runners.session.transformers_session import (
        TransformersSession,  # torch and transformers, where something is measured
    )

    return TransformersSession(job, contenders)
