"""What a run keeps for replays besides its records: likeliest ids, and hidden states."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from runners.job import Job
from runners.session.session import Session
from specbench.config.schema import RECORD_STATES, ModelConfig
from specbench.decoding.structs import AFTER_FINAL_NORM
from specbench.errors import ConfigurationError, NeedsNotMet, WeightsNotFound
from specbench.models.heads import eagle3
from specbench.models.heads import folder as head_folder
from specbench.replay import states
from specbench.results import records
from specbench.results.lines import candidates_line
from specbench.results.manifest import BASELINE
from specbench.results.records import CaseRecord
from specbench.storage import jsonl

log = logging.getLogger(__name__)

_CANDIDATES = 16  # ids kept at each position under record=true; Token Recycling takes 8


class Recorder:
    """Writes what ``record`` asks for, into the job's folder, behind each block; untimed.

    Args:
        asked: hidden states that the run's methods read.

    Raises:
        ConfigurationError: there is no plain greedy output to record along, or the model has no
            such hidden states.
    """

    def __init__(self, job: Job, session: Session, asked: Iterable[int]) -> None:
        config = job.config
        if job.baseline is None or not job.greedy:
            raise ConfigurationError(
                f"record={str(config.record).lower()} keeps what the model says along {BASELINE}'s "
                "greedy output: type baseline=true and generation.temperature=0, or drop record."
            )
        self._job, self._session = job, session
        self._file = job.folder / records.CANDIDATES
        jsonl.mend_jsonl(self._file, candidates_line)
        self._layers: tuple[int, ...] = ()
        self._bytes = 0
        if config.record == RECORD_STATES:
            chosen = config.record_layers
            if chosen is None:
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
        lines = []
        for record in made:
            if record.label != self._job.baseline or record.status == "failed" or record.repeat:
                continue
            prompt = np.asarray(record.prompt_ids, dtype=np.int64)
            output = np.asarray(record.output_ids, dtype=np.int64)
            found = self._session.record(prompt, output, _CANDIDATES, self._layers)
            lines.append({**record.turn_id, "top": found.candidates.tolist()})
            if self._layers:
                path = states.path_of(self._job.folder, record.stream_index, record.turn)
                self._bytes += states.write_states(
                    path,
                    found.states,
                    n_layers=self._session.n_layers,
                    prompt=prompt,
                    output=output,
                    tokenizer_hash=self._session.tokenizer_hash,
                )
        jsonl.append_jsonl(self._file, lines)

    def close(self) -> None:
        """Say what the hidden states take."""
        if self._layers:
            log.info("hidden states: %.1f MB in %s", self._bytes / 1e6, states.FOLDER)


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
