"""Words that every table uses, whoever prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench.results.manifest import RunManifest
from specbench.results.records import CaseRecord

# What concerns a reader most comes first.
_VERDICTS = {
    "bug": "BUG",
    "near_tie": "near tie",
    "equal": "equal",
    "not_audited": "not audited",
    "lossy": "lossy",
}

# What a caption of several runs says first about times that were not measured.
TIMES = {
    "measured": "",
    "predicted": "PREDICTED times (replay with a cost surface), not measured ones. ",
    "none": "Replay without times: steps only. ",
}


# What a speedup is, by estimator.
SPEEDUPS = {
    "paired": "Speedup: tokens/s over that of ar on the same cases of the same run",
    "end_to_end": "Speedup and tokens/s end to end: all new tokens over all time, the prompt's "
    "pass included",
    "specbench": "Speedup and tokens/s by Spec-Bench's formula (mean of per-question speeds), "
    "the baseline's tokens counted like a method's",
    "specbench_exact": "Speedup and tokens/s as Spec-Bench's speed.py prints them (mean of "
    "per-question speeds, the baseline's text tokenized again and one token less a turn)",
}


def verdict_words(counts: Mapping[str, int]) -> str:
    """``3 near tie, 45 equal``; kinds that did not occur are left out."""
    parts = [f"{counts[kind]} {word}" for kind, word in _VERDICTS.items() if counts.get(kind)]
    return ", ".join(parts) or "nothing audited"


def run_caption(records: Sequence[CaseRecord], manifest: RunManifest) -> str:
    """What belongs below a run's own table: model, data, state kept, sampling."""
    scopes = {record.label: record.state_scope for record in records}
    kept = ", ".join(f"{label}: {scope}" for label, scope in scopes.items())
    predicted = any(record.timing == "predicted" for record in records)
    model, dataset = manifest.setting("model", "name"), manifest.setting("dataset", "name")
    parts = [
        ("PREDICTED times, not measured ones. " if predicted else "")
        + f"{model} on {dataset}, repeats={manifest.config['repeats']}. State kept per {kept}."
    ]
    if (estimator := manifest.config["estimator"]) != "paired":
        parts.append(f"{SPEEDUPS[estimator]}.")
    if temperature := manifest.setting("generation", "temperature"):
        filters = "".join(
            f", {key}={value}"
            for key, off in (("top_p", 1), ("top_k", 0))
            if (value := manifest.setting("generation", key)) != off
        )
        verifiers = " and ".join(sorted({record.verifier for record in records}))
        parts.append(
            f"Sampled at temperature {temperature:g}{filters}; verifier {verifiers}; "
            "speedup over ar sampling with the same seeds; outputs not audited."
        )
    if any(record.lossy for record in records):
        parts.append("LOSSY: outputs of labels that draft do not follow the model's distribution.")
    return " ".join(parts)
