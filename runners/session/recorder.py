"""What a run keeps for replays of heads besides its records: hidden states."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from runners.job import Job
from runners.session.method_runs import MethodRun
from runners.session.session import Session
from specbench.config.schema import ModelConfig
from specbench.decoding.structs import AFTER_FINAL_NORM
from specbench.errors import ConfigurationError, NeedsNotMet, WeightsNotFound
from specbench.models.heads import eagle3
from specbench.models.heads import folder as head_folder
from specbench.replay import states
from specbench.results.manifest import BASELINE
from specbench.results.records import CaseRecord

log = logging.getLogger(__name__)


class Recorder:
    """Writes the hidden states along plain decoding, behind each block; untimed.

    Args:
        runs: the run's methods, whose hidden states are recorded, too.

    Raises:
        ConfigurationError: there is no plain greedy output to record along, or the model has no
            such hidden states.
    """

    def __init__(self, job: Job, session: Session, runs: Sequence[MethodRun]) -> None:
        config = job.config
        if job.baseline is None or not job.greedy:
            raise ConfigurationError(
                f"record={config.record} keeps the hidden states along {BASELINE}'s greedy output: "
                "type baseline=true and generation.temperature=0, or drop record."
            )
        self._job, self._session = job, session
        chosen = config.record_layers
        if chosen is None:
            asked = [layer for run in runs for layer in run.drafter.needs.hidden_layers]
            chosen = [*asked, *_of_heads(config.pair.heads, config.model, session.n_layers)]
        session.check_layers(chosen, "record_layers")
        n = session.n_layers
        self._layers = tuple(sorted({states.place(i, n) for i in [*chosen, AFTER_FINAL_NORM]}))
        log.info(
            "recording the hidden states %s: %.1f kB a token",
            ", ".join(map(str, self._layers)),
            session.state_bytes * len(self._layers) / 1e3,
        )

    def keep(self, made: Sequence[CaseRecord]) -> None:
        """Record each finished turn of the baseline; a block that is redone writes it again.

        Raises:
            DiskError: the disk is full or broken.
        """
        for record in made:
            if record.label != self._job.baseline or record.status == "failed" or record.repeat:
                continue
            prompt = np.asarray(record.prompt_ids, dtype=np.int64)
            output = np.asarray(record.output_ids, dtype=np.int64)
            states.write_states(
                states.path_of(self._job.folder, record.stream_index, record.turn),
                self._session.states_along(prompt, output, self._layers),
                n_layers=self._session.n_layers,
                prompt=prompt,
                output=output,
                tokenizer_hash=self._session.tokenizer_hash,
            )


def _of_heads(heads: Mapping[str, str], model: ModelConfig, n_layers: int) -> list[int]:
    """The states that trained heads read whose files are at hand."""
    found: list[int] = []
    for name in heads:
        try:
            folder = head_folder.find(name, heads, model)
        except (NeedsNotMet, WeightsNotFound):
            folder = None
        if folder is None:
            log.info("pair.heads.%s is not here: what it reads is recorded by record_layers", name)
        else:
            found += eagle3.ids_read_by(folder, n_layers)
    return found
