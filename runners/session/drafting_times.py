"""What drafting takes per step, on made-up texts: a part of a cost surface."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runners.session.method_runs import MethodRun
from specbench.config.schema import RunConfig
from specbench.errors import SpecBenchError
from specbench.models import loading
from specbench.models.loading import LoadedModel
from specbench.replay.replayer import Replayer
from specbench.replay.traces import Traces, Turn
from specbench.results.manifest import BASELINE

_TEXTS, _TEXT_TOKENS = 5, 96  # made-up texts that drafting is timed on, and their new tokens
_PHRASES, _PHRASE_TOKENS = 24, 6  # they are made of recurring phrases


def drafting_times(
    config: RunConfig,
    contexts: Sequence[int],
    runs: Sequence[MethodRun],
    loaded: LoadedModel,
    vocab: int,
    rng: np.random.Generator,
) -> list[dict[str, Any]]:
    """Microseconds of propose and observe per step, or why they were not measured."""
    tokenizer = loaded.tokenizer
    facts = {
        "eos_ids": (),
        "vocab_size": vocab,
        "tokenizer_hash": "" if tokenizer is None else loading.tokenizer_hash(tokenizer),
    }
    rows: list[dict[str, Any]] = []
    for context in contexts:
        limit = max(loaded.context_length, context + _TEXT_TOKENS)
        replayer = Replayer(
            _made_up_traces({**facts, "context_length": limit}, context, rng),
            None,
            model=config.model,
            cache_dir=Path(config.cache_dir),
            seed=config.seed,
        )
        for run in runs:
            row = {"label": run.label, "method": run.entry.name, "context": context}
            try:
                step_s = replayer.step_s(replayer.prepare(run.drafter))
            except SpecBenchError as error:
                rows.append({**row, "skipped": f"not measured: {error}"})
            else:
                rows.append({**row, "step_us": 1e6 * step_s})
    return rows


def _made_up_traces(facts: dict[str, Any], context: int, rng: np.random.Generator) -> Traces:
    """Texts of phrases that recur, so that drafters have something to find."""
    turns = {}
    for i in range(_TEXTS):
        phrases = rng.integers(0, facts["vocab_size"], (_PHRASES, _PHRASE_TOKENS))
        length = context + _TEXT_TOKENS
        order = rng.integers(0, _PHRASES, -(-length // _PHRASE_TOKENS))
        text = phrases[order].reshape(-1)[:length]
        turns[BASELINE, str(i), 0] = Turn(
            label=BASELINE,
            method=BASELINE,
            task="made_up",
            category="made_up",
            case_id=str(i),
            turn=0,
            stream_index=i,
            seed=0,
            prompt_ids=text[:context],
            output_ids=text[context:],
        )
    config = {"generation": {"max_new_tokens": _TEXT_TOKENS}}
    return Traces(Path(), facts, config, "", "", turns, (), "")
