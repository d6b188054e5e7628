"""The conditions of a run's numbers in two columns, and warnings by their codes.

Runs write both to ``summary.json``; all tables take them from here. A warning that ``decides``
may change which method one chooses, so it is printed with every table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from specbench.config.schema import STORED_WEIGHTS
from specbench.paths import PROJECT
from specbench.results.cells import FEWEST
from specbench.results.headline_table import AGAINST_TEXT, cases_text, join_names, no_drafts_text
from specbench.results.manifest import ModelInfo, Passes, RunManifest
from specbench.results.metrics import METRICS
from specbench.results.records import (
    CASES,
    EAGER_DRAFT_PASSES,
    EAGER_PASSES,
    ERRORS,
    LAUNCHED_DRAFTS,
    OWN_ENGINE,
    CaseRecord,
)
from specbench.results.statistics.roofline import PLAIN_PASS, number_format, plain_engine
from specbench.results.statistics.summary import noisy_blocks, timed_turns
from specbench.results.summary_schema import ServedLabel, SummaryRow, WarningLine, n_of
from specbench.results.tasks import OVERALL

_NEAR_TIES_SHOWN_FROM = 0.02  # of the audited turns, in float32
_STEAL_SHOWN_FROM = 0.05  # of the CPU time while turns ran
_SLOW_BASELINE = 0.5  # share of the bandwidth below which a run warns
_HEADLINE_FROM = 0.7  # the share that a model of a GPU below must reach for a headline
_LARGE_BYTES = 2_000_000_000  # of its weights: a billion of 16 bits; smaller ones are launch-bound
_IMPOSSIBLE = 1 - 1e-9  # a share from which on plain decoding itself was the fastest read
_LISTED = 24  # labels in a sentence
_THINKING = "enable_thinking"  # the chat templates' word for it (Qwen 3 and others)
_CREDIT = ("accepted_from_", "found_by_")  # counts of a drafter's parts

SPEEDUPS = {
    "paired": "tokens/s over plain decoding's on the same cases of the same run",
    "end_to_end": "end to end: all new tokens over all time, the prompt's pass included",
    "specbench": "Spec-Bench's formula (mean of per-question speeds), the baseline's tokens "
    "counted like a method's",
    "specbench_exact": "as Spec-Bench's speed.py prints it (mean of per-question speeds, the "
    "baseline's text tokenized again and one token less a turn)",
}

# For readers who have not seen the documentation: the metrics by heading, then other words.
DEFINITIONS = {metric.heading: metric.help for metric in METRICS} | {
    "[low, high]": "95 % interval of a bootstrap over prompts. It covers other prompts like these, "
    "not other days and machines.",
    "Against the best": AGAINST_TEXT,
    "Outputs": "turns by what the audit found. equal: the tokens of plain decoding. near tie: "
    "other tokens, each within the number format's tolerance of the likeliest. BUG: anything else. "
    "differ: another engine's answer that is not the same server's plain answer.",
    "Case": "a question with all its turns. A case that failed for one method counts for none.",
}

KINDS = ("SYNTHETIC", "IMPORTED", "PREDICTED")  # of numbers that were not measured here

# A sentence of each warning, by its code.
_DECIDING = {
    "SYNTHETIC": "SYNTHETIC RECORDS, not a measurement.",
    "IMPORTED": "IMPORTED from {source}'s files: not run here, no tokens to audit.",
    "PREDICTED": "PREDICTED times (replay with a cost surface), not measured ones.",
    "LEFT_OUT": "LEFT OUT: {label}. {reason}",
    "CASES_DROPPED": "{dropped} of {cases} cases are dropped for all labels because one failed "
    "({labels}); reasons in {file}.",
    "AUDIT_FAILED": "The audit itself failed for {turns} turns; reasons in {file}.",
    "BUSY": "THE MACHINE WAS TOO BUSY in {disturbed} of {cases} cases. They count; take these "
    "speedups as rough.",
    "SLOW_BASELINE": "SLOW BASELINE: ar takes {share} of the read bandwidth, so each speedup is "
    "partly due to a slow baseline.",
    "NO_HEADLINE": "NO HEADLINE: ar takes {share} of the read bandwidth, where a large model on a "
    "GPU can take {least}, so part of each speedup is a slow baseline.",
    "SLOW_ROW": "SLOW BASELINE: passes of more rows take less time than ar's of one row "
    "({prices}), so each speedup is partly due to a slow baseline.",
    "BASELINE_LAUNCHED": "SLOW BASELINE: ar's passes are not CUDA graphs ({reason}), so it waits "
    "for launches at every token; over captured passes the speedups would be smaller.",
    "EAGER_FALLBACK": "EAGER FALLBACK: {share:.1%} of {label}'s {model} passes ran without a CUDA "
    "graph, so its speed is not the engine's (why: model.passes in manifest.json).",
    "ANOTHER_ENGINE": "ANOTHER ENGINE: {engines}. Outputs are compared with its own plain ones.",
    "LOSSY": "LOSSY: outputs of labels that draft do not follow the model's distribution.",
    "ROUNDINGS": "ROUNDINGS MOVE TOKENS: at load, the model's own passes of one row and of many "
    "over the same text chose different tokens at {moved} of {positions} positions.",
    "MIXED": "MIXED draft lengths: {kinds}.",
    "NO_DRAFT": "{label} drafted nothing in {steps} steps.",
    "FORCED": "Resumed with resume=force: not all records come from the same conditions.",
    "UNCOUNTED": "{label}: the server did not report its steps in {turns} turns, which do not "
    "count in MAT.",
    "TOGETHER": "{label}: all tokens came together in {turns} turns, which no decode speed "
    "includes.",
    "NOT_STREAMED": "NOT STREAMED: all tokens came together in each of {label}'s {turns} turns, so "
    "it has no decode speed. Have its server stream, or ask for longer answers.",
    "DIFFERS": "{label} differs first at {place}.",
    "REMARK": "{text}",
}
SENTENCES: Mapping[str, str] = _DECIDING | {
    "MEMORY": "MEMORY IS NOT THE LIMIT: ar takes {share} of the read bandwidth, because unpacking "
    "its weights' blocks in each pass takes longer than reading them.",
    "BANDWIDTH": "BANDWIDTH DISTURBED: ar read its weights faster than the measured read.",
    "DISTURBED": "{disturbed} of {cases} cases stayed disturbed (disturbed_by in the records says "
    "why); their times count for no label.",
    "STOLEN": "The hypervisor gave {share:.0%} of this machine's CPU time to others while turns "
    "were measured (cpu_steal in the records).",
    "NEAR_TIES": "{ties} of {audited} audited turns are near ties, more than {limit:.0%} in "
    "float32: look at their gaps in {file}.",
    "LAUNCHED": "{label}: {share:.1%} of its head's drafts were launched kernel by kernel, "
    "although the target's passes are replayed as CUDA graphs, so they took longer than needed (a "
    "path longer than the head's own, or no capture: see the log).",
}


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning: its code, and the values of its sentence."""

    code: str
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def text(self) -> str:
        return SENTENCES[self.code].format(**self.values)

    @property
    def decides(self) -> bool:
        """True if it may change which method one chooses."""
        return self.code in _DECIDING

    def to_json(self) -> WarningLine:
        return cast("WarningLine", asdict(self))


def _warn(code: str, **values: object) -> Warned:
    return Warned(code, values)


# -- conditions ------------------------------------------------------------------------------------


def hardware_text(manifest: RunManifest) -> str:
    """Name the hardware that a run's times belong to: the cost surface's, if they are predicted."""
    if not all(s.get("this_machine", True) for s in (manifest.servers or {}).values()):
        return "hardware of the server not recorded"
    if names := gpu_names(manifest):
        return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    machine = manifest.timed_hardware
    if not machine.get("cpu"):
        return "hardware not recorded"
    count = machine.get("cpus_usable") or machine.get("cpus")
    cpus = f", {count} CPU{'s' if count > 1 else ''}" if count else ""
    pinned = ", a thread pinned to each" if manifest.setting("measure", "pin") else ""
    return f"{machine['cpu']}{cpus}{pinned}"


def gpu_names(manifest: RunManifest) -> list[str]:
    """Name the GPUs that the times belong to; none where a CPU computed."""
    device = manifest.timed_model.device or manifest.setting("model", "device")
    gpus = manifest.timed_hardware.get("gpus", [])
    return [gpu["name"] for gpu in gpus] if str(device).startswith("cuda") else []


def thinking(manifest: RunManifest) -> bool | None:
    """Tell whether the prompts ask the model to think first; None if the run does not record it."""
    value = (manifest.setting("model", "template_kwargs") or {}).get(_THINKING)
    return None if value is None else bool(value)


def code_text(manifest: RunManifest) -> str:
    """``commit 0123456789 with changes (code abcdef)``."""
    git = manifest.git
    if git is None or not (commit := git.get("commit")):
        return "commit not recorded"
    code = f" (code {manifest.code})" if manifest.code else ""
    return f"commit {commit[:10]}{' with changes' if git.get('dirty') else ''}{code}"


def conditions(
    records: Sequence[CaseRecord], manifest: RunManifest, rows: Sequence[SummaryRow]
) -> dict[str, str]:
    """List the conditions of a run's numbers, a line each; unknown ones are left out.

    Args:
        records: of the labels that count.
        manifest: of the run.
        rows: of these records, from ``summarize``.
    """
    repeats = 1 + max((record.repeat for record in records), default=0)
    limit = manifest.setting("generation", "max_new_tokens")
    overall = [row for row in rows if row["task"] == OVERALL]
    engine, threads = plain_engine(manifest.timed_model), (manifest.model or ModelInfo()).threads
    own_engine = [engine, f"{threads} thread{'s' * (threads > 1)}" if threads else None]
    lines = {
        "model": _model(manifest),
        "data": str(manifest.setting("dataset", "name")),
        "cases": cases_text(overall) if overall else "",
        "new tokens a turn": f"at most {limit}" if limit else "",
        "repeats": str(repeats) if repeats > 1 else "",
        "sampling": _sampling(records, manifest),
        "hardware": hardware_text(manifest),
        "engine": _engines(records) or ", ".join(filter(None, own_engine)),
        "exact rows": (manifest.timed_model.passes or Passes()).get("exact", ""),
        "server build": _builds(manifest),
        "sequences at once": _batch(records),
        "users at once": str(manifest.setting("server", "concurrency") or ""),
        "state kept per": _by_value({r.label: r.state_scope for r in records}),
        "draft lengths": _by_value(_draft_sources(manifest, overall)),
        "drafted tokens a step": _drafted(records),
        "accepted drafts": "; ".join(accepted_by_part(records)),
        "time by phase": "; ".join(
            f"{r['label']} {_shares(r['phase_share'])}" for r in overall if r["phase_share"]
        ),
        "drafts read in": _draft_weights(manifest),
        "code": code_text(manifest),
    }
    if any(record.timing != "none" for record in records):
        lines |= {
            "speedup": SPEEDUPS[manifest.config.get("estimator") or "paired"],
            "intervals": _interval(records, repeats, overall),
            "cost of rows": _row_cost_text(manifest),
            "weights read": _share_text(manifest, overall),
        }
    return {name: line for name, line in lines.items() if line}


def join_conditions(conditions_of: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Join the conditions of several runs: differing values are listed in one line."""
    by_name: dict[str, dict[str, None]] = {}
    for lines in conditions_of:
        for name, line in lines.items():
            by_name.setdefault(name, {})[line] = None
    return {name: "; ".join(lines) for name, lines in by_name.items()}


def _temperature(manifest: RunManifest) -> float:
    return float(manifest.setting("generation", "temperature") or 0.0)


def _model(manifest: RunManifest) -> str:
    """``smollm2_135m (float32, greedy, template auto)``."""
    model, temperature = manifest.model or ModelInfo(), _temperature(manifest)
    dtype = model.dtype or manifest.setting("model", "dtype")
    parts = [number_format({"dtype": dtype, "weights": model.weights})] if dtype else []
    parts.append("greedy" if temperature == 0 else f"temperature {temperature:g}")
    if not manifest.servers:  # a server writes its prompts itself
        template, thinks = manifest.setting("model", "template"), thinking(manifest)
        parts += [f"template {template}"] if template else []
        parts += [] if thinks is None else [f"thinking {'on' if thinks else 'off'}"]
    return f"{manifest.setting('model', 'name')} ({', '.join(parts)})"


def _sampling(records: Sequence[CaseRecord], manifest: RunManifest) -> str:
    if not (temperature := _temperature(manifest)):
        return ""
    filters = "".join(
        f", {key}={value}"
        for key, off in (("top_p", 1), ("top_k", 0))
        if (value := manifest.setting("generation", key)) != off
    )
    verifiers = " and ".join(sorted({record.verifier for record in records}))
    return f"temperature {temperature:g}{filters}; verifier {verifiers}; outputs not audited"


def _engines(records: Iterable[CaseRecord]) -> str:
    """Name other engines and their number formats; empty where ours decoded."""
    answered = {(r.engine, r.numerics) for r in records if r.engine != OWN_ENGINE}
    return "; ".join(f"{engine}, weights in {numerics}" for engine, numerics in sorted(answered))


def _builds(manifest: RunManifest) -> str:
    """Name what the servers were built for, which decides their speed."""
    flags = [server.get("flags") or {} for server in (manifest.servers or {}).values()]
    builds = [(f.get("wheel"), str(f["simd"])) for f in flags if f.get("simd")]
    return "; ".join(dict.fromkeys(" with ".join(filter(None, build)) for build in builds))


def _batch(records: Iterable[CaseRecord]) -> str:
    groups = {(r.unit, r.turn, r.batch.size, r.batch.at_once) for r in records if r.batch}
    if not groups:
        return ""
    size = max(size for _, _, size, _ in groups)
    fewer = sum(at_once < size for *_, at_once in groups)
    few = f" ({fewer} of {len(groups)} groups' turns have fewer)" if fewer else ""
    return (
        f"BATCH {size}{few}: tokens/s are all sequences' together, speedups over ar at the same "
        "batch, and a finished slot stays empty"
    )


def _by_value(values: Mapping[str, str]) -> str:
    """Format the one value that all labels share, or the labels by value."""
    by_value: dict[str, list[str]] = {}
    for label, value in values.items():
        by_value.setdefault(value, []).append(label)
    if len(by_value) < 2:
        return "".join(by_value)
    return "; ".join(
        f"{value} ({join_names(labels, _LISTED)})" for value, labels in by_value.items()
    )


def _draft_sources(manifest: RunManifest, rows: Sequence[SummaryRow]) -> dict[str, str]:
    """Name where each label's settings come from: ``tuned``, ``published``, ``set by hand``."""
    sources = {row["label"]: manifest.labels[row["label"]].budget for row in rows}
    names = {"typed": "set by hand"}
    return {label: names.get(source, source) for label, source in sources.items() if source}


def _totals(records: Iterable[CaseRecord], count: Callable[[CaseRecord], int]) -> Counter[str]:
    """Add up a count over turns that did not fail, by label."""
    totals = Counter[str]()
    for record in records:
        if record.status != "failed":
            totals[record.label] += count(record)
    return totals


def _drafted(records: Sequence[CaseRecord]) -> str:
    steps = _totals(records, lambda r: r.n_target_passes)
    drafted = _totals(records, lambda r: r.n_drafted)
    offered = _totals(records, lambda r: sum(r.drafter.get("offered_per_step", ())))
    texts = [
        f"{label} {drafted[label] / n:.1f}"
        + (f" (cut from {offered[label] / n:.1f})" if offered[label] else "")
        for label, n in steps.items()
        if n and drafted[label]
    ]
    return join_names(texts, _LISTED)


def _interval(records: Sequence[CaseRecord], repeats: int, rows: Sequence[SummaryRow]) -> str:
    unit = "groups of cases" if any(r.batch for r in records) else "prompts within categories"
    more = ", and the spread between repeats" if repeats > 1 else ""
    errors = sorted({r.prediction_error for r in records if r.prediction_error})
    predicted = "".join(f", and the predictions' own error of {error:.1%}" for error in errors)
    few = any(n_of(row, "speedup") < FEWEST for row in rows)
    none = f"; none of fewer than {FEWEST} timed cases" if few else ""
    return (
        f"95 %, bootstrap over {unit}{more}{predicted}; they do not cover other days and machines"
        f"{none}"
    )


def accepted_by_part(records: Sequence[CaseRecord]) -> list[str]:
    """Tell for each label made of several drafters whose draft tokens were accepted."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        credit = {k: n for k, n in record.drafter.items() if k.startswith(_CREDIT)}
        if record.status != "failed" and credit:
            counts.setdefault(record.label, Counter()).update(credit)
    lines = []
    for label, count in counts.items():
        parts = [k.removeprefix(_CREDIT[0]) for k in count if k.startswith(_CREDIT[0])]
        if total := sum(count[_CREDIT[0] + part] for part in parts):
            shares = ", ".join(
                f"{part} {count[_CREDIT[0] + part] / total:.0%} "
                f"(had {count[_CREDIT[1] + part] / total:.0%})"
                for part in parts
            )
            lines.append(f"{total:,} of {label}: {shares}")
    return lines


def _shares(shares: Mapping[str, float]) -> str:
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.1%}" for name, share in ordered)


def _draft_weights(manifest: RunManifest) -> str:
    """Name the format of drafts' weights where it is shorter than the target's, on a CPU."""
    model, form = manifest.model or ModelInfo(), manifest.setting("engine", "draft_weights")
    if form in (None, "float32") or (model.device, model.dtype) != ("cpu", "float32"):
        return ""
    files = (model.artefacts or {}).items()
    heads = {label for label, names in files if any(name.startswith("head ") for name in names)}
    labels = sorted({*model.drafts} | heads)
    return f"{form} ({', '.join(labels)}); the model is not rounded" if labels else ""


def _share_text(manifest: RunManifest, rows: Sequence[SummaryRow]) -> str:
    """Say what share of the read bandwidth AR decoding reaches."""
    speed = manifest.timed_model.read_bytes_per_s
    shares = [row["bandwidth_share"] for row in rows if row["label"] == manifest.baseline]
    if not shares or shares[0] is None or speed is None:
        return ""
    return f"by ar at {shares[0]:.0%} of this machine's read bandwidth ({speed / 1e9:.0f} GB/s)"


def _row_costs(manifest: RunManifest) -> dict[int, Sequence[float]]:
    """Give by rows above 1 a pass's time over one row's: alone, or with its interval."""
    times = manifest.timed_model.row_times
    if not times or "1" not in times["seconds"] or manifest.batch_size > 1:
        return {}
    first = times["seconds"]["1"]
    costs: dict[str, Sequence[float]] = {
        rows: (seconds / first,) for rows, seconds in times["seconds"].items()
    }
    costs |= times.get("prices", {})
    return {int(rows): costs[rows] for rows in sorted(costs, key=int) if int(rows) > 1}


def _row_cost_text(manifest: RunManifest) -> str:
    times, costs = manifest.timed_model.row_times, _row_costs(manifest)
    if not costs or times is None:
        return ""
    return (
        f"{_format_costs(costs)}, in passes of one row after {times['context']} tokens; speedup "
        "is MAT / this, less what drafting takes"
    )


def _format_costs(costs: Mapping[int, Sequence[float]]) -> str:
    return ", ".join(
        f"{rows} rows {cost:.2f}" + (" ({:.2f} to {:.2f})".format(*bounds) if bounds else "")
        for rows, (cost, *bounds) in costs.items()
    )


# -- warnings --------------------------------------------------------------------------------------


def warnings(
    records: Sequence[CaseRecord],
    manifest: RunManifest,
    rows: Sequence[SummaryRow],
    errors: Sequence[Mapping[str, object]] = (),
    left_out: Mapping[str, str] | None = None,
    served: Sequence[ServedLabel] = (),
) -> list[Warned]:
    """Warn of what may mislead a reader of a run's numbers, the weightiest first.

    Args:
        records: of the labels that count, in their order.
        manifest: of the run.
        rows: of these records, from ``summarize``.
        errors: the lines of ``errors.jsonl``.
        left_out: labels that do not count, with their reasons.
        served: of these records, from ``served_labels``.
    """
    labels = [row["label"] for row in rows if row["task"] == OVERALL]
    busy, slow = [*_machine(records)], [*roofline_warnings(manifest, rows)]
    if any(warned.code == "BUSY" for warned in busy):
        # Other programs took the CPU, and may be why plain decoding was slow.
        slow = [
            warned
            for warned in slow
            if warned.code not in ("SLOW_BASELINE", "MEMORY", "NO_HEADLINE")
        ]
    return [
        *_kinds(records, manifest),
        *_left_out(left_out or {}),
        *_failures(records, errors, labels),
        *busy,
        *slow,
        *_passes(records),
        *_outputs(records, manifest),
        *_drafts(records, manifest, rows),
        *(_warn("REMARK", text=note) for note in manifest.notes or ()),
        *_served(served),
    ]


def _left_out(reasons: Mapping[str, str]) -> Iterator[Warned]:
    """Name labels together whose reasons differ in nothing but the label."""
    alike: dict[str, list[str]] = {}
    for label, reason in reasons.items():
        alike.setdefault(reason.replace(repr(label), "\0"), []).append(label)
    for reason, labels in alike.items():
        named = reason.replace("\0", " or ".join(map(repr, labels)))
        yield _warn("LEFT_OUT", label=", ".join(labels), reason=named)


def _kinds(records: Sequence[CaseRecord], manifest: RunManifest) -> Iterator[Warned]:
    if manifest.synthetic:
        yield _warn("SYNTHETIC")
    if manifest.imported:
        yield _warn("IMPORTED", source=manifest.imported.get("from"))
    if any(record.timing == "predicted" for record in records):
        yield _warn("PREDICTED")


def _failures(
    records: Sequence[CaseRecord], errors: Sequence[Mapping[str, object]], labels: Sequence[str]
) -> Iterator[Warned]:
    if failed := {(r.case_id, r.label) for r in records if r.status == "failed"}:
        counts = Counter(label for _, label in failed)
        yield _warn(
            "CASES_DROPPED",
            dropped=len({case for case, _ in failed}),
            cases=len({r.case_id for r in records}),
            labels=", ".join(f"{label} {counts[label]}" for label in labels if counts[label]),
            file=ERRORS,
        )
    if turns := sum(error["during"] == "audit" for error in errors):
        yield _warn("AUDIT_FAILED", turns=turns, file=ERRORS)


def _machine(records: Sequence[CaseRecord]) -> Iterator[Warned]:
    """Warn of CPU time that other programs took, and of the cases that it disturbed."""
    noisy = noisy_blocks(records)
    blocks = {(r.repeat, r.case_id): r.block for r in records}
    if disturbed := sum(block in noisy for block in blocks.values()):
        labels = list(dict.fromkeys(record.label for record in records))
        counted = bool(noisy_blocks(timed_turns(records, labels)))
        yield _warn("BUSY" if counted else "DISTURBED", disturbed=disturbed, cases=len(blocks))
    steal = [record.cpu_steal for record in records if record.cpu_steal is not None]
    if steal and sum(steal) > _STEAL_SHOWN_FROM * len(steal):
        yield _warn("STOLEN", share=sum(steal) / len(steal))


def roofline_warnings(manifest: RunManifest, rows: Sequence[SummaryRow]) -> Iterator[Warned]:
    """Warn of a baseline that is slower than it could be, or than any read of memory allows."""
    # Below 1 as they are shown.
    below = {n: p for n, p in _row_costs(manifest).items() if len(p) == 3 and round(p[2], 2) < 1}
    if below:
        yield _warn("SLOW_ROW", prices=_format_costs(below))
    if reason := _not_captured(manifest.timed_model):
        yield _warn("BASELINE_LAUNCHED", reason=reason)
    shares = {r["task"]: r["bandwidth_share"] for r in rows if r["label"] == manifest.baseline}
    share = shares.get(OVERALL)
    if headline := no_headline(manifest, share):
        yield headline
    elif share is not None and share < _SLOW_BASELINE:
        stored = manifest.timed_model.weights == STORED_WEIGHTS
        yield _warn("MEMORY" if stored else "SLOW_BASELINE", share=f"{share:.0%}")
    if max((s for s in shares.values() if s), default=0.0) >= _IMPOSSIBLE:
        yield _warn("BANDWIDTH")


def no_headline(manifest: RunManifest, share: float | None) -> Warned | None:
    """Warn where no speedup may be a headline; ``share``: of the bandwidth, AR decoding's."""
    model = manifest.timed_model
    large = (model.device or "").startswith("cuda") and (model.weight_bytes or 0) >= _LARGE_BYTES
    if not large or share is None or share >= _HEADLINE_FROM:
        return None
    return _warn("NO_HEADLINE", share=f"{share:.0%}", least=f"{_HEADLINE_FROM:.0%}")


def _not_captured(model: ModelInfo) -> str:
    """Say why AR decoding's passes are not CUDA graphs on a GPU; empty where they are."""
    passes = model.passes or Passes()
    eager = passes.get("eager") or {}
    failed = [f"{shape}: {why}" for shape, why in eager.items() if shape.startswith(PLAIN_PASS)]
    if failed:
        return "; ".join(failed)
    if passes.get("engine") == "graph" and plain_engine(model) == "eager":
        return "none of a pass with one row was captured"
    return passes.get("reason", "") if (model.device or "").startswith("cuda") else ""


def _passes(records: Sequence[CaseRecord]) -> Iterator[Warned]:
    """Warn of labels whose passes should have been CUDA graphs and were not."""
    passes = _totals(records, lambda r: r.n_target_passes)
    # The draft's pass over a prompt may be such a one and is not among its passes.
    drafts = _totals(records, lambda r: int(r.drafter.get("draft_forwards", 0)))
    for code, name, counts, values in (
        ("EAGER_FALLBACK", EAGER_PASSES, passes, {"model": "target"}),
        ("EAGER_FALLBACK", EAGER_DRAFT_PASSES, drafts, {"model": "draft"}),
        ("LAUNCHED", LAUNCHED_DRAFTS, passes, {}),
    ):
        for label, n in _totals(records, _counter(name)).items():
            if n:
                yield _warn(code, label=label, share=n / max(counts[label], n), **values)


def _counter(name: str) -> Callable[[CaseRecord], int]:
    """Make a function that adds up what a drafter and its parts counted under a name."""
    return lambda r: sum(int(n) for k, n in r.drafter.items() if k.rpartition(".")[2] == name)


def _outputs(records: Sequence[CaseRecord], manifest: RunManifest) -> Iterator[Warned]:
    if engines := _engines(records):
        yield _warn("ANOTHER_ENGINE", engines=engines)
    if any(record.lossy for record in records):
        yield _warn("LOSSY")
    model = manifest.model or ModelInfo()
    if (check := model.self_check or {}).get("moved"):
        yield _warn("ROUNDINGS", moved=check["moved"], positions=check["positions"])
    if any(record.forced_resume for record in records):
        yield _warn("FORCED")
    verdicts = Counter(r.lossless.verdict for r in records if r.label != manifest.baseline)
    ties, audited = verdicts["near_tie"], verdicts.total() - verdicts["not_audited"]
    if "float32" in (model.dtype or "") and ties > _NEAR_TIES_SHOWN_FROM * audited:
        limit = _NEAR_TIES_SHOWN_FROM
        yield _warn("NEAR_TIES", ties=ties, audited=audited, limit=limit, file=CASES)


def _drafts(
    records: Sequence[CaseRecord], manifest: RunManifest, rows: Sequence[SummaryRow]
) -> Iterator[Warned]:
    sources = _draft_sources(manifest, [row for row in rows if row["task"] == OVERALL])
    if {"tuned", "published"} <= set(sources.values()):
        yield _warn("MIXED", kinds=_by_value(sources))
    for label, steps in steps_without_drafts(records, manifest).items():
        why = no_drafts_text(manifest.labels[label].budget)
        yield _warn("NO_DRAFT", label=label, steps=steps, why=why)


def steps_without_drafts(records: Iterable[CaseRecord], manifest: RunManifest) -> Mapping[str, int]:
    """Count the steps of each label that drafted nothing; imported runs have no draft counts."""
    if manifest.imported is not None:
        return {}
    plain = {"ar", manifest.baseline}
    ours = [r for r in records if r.engine == OWN_ENGINE and not {r.method, r.label} & plain]
    drafted = _totals(ours, lambda r: r.n_drafted)
    steps = _totals(ours, lambda r: r.n_target_passes)
    return {label: count for label, count in steps.items() if count and not drafted[label]}


def _served(rows: Iterable[ServedLabel]) -> Iterator[Warned]:
    """Warn of outputs that differ, and of step counts that servers did not report."""
    for row in rows:
        if row["first_difference"]:
            yield _warn("DIFFERS", label=row["label"], place=row["first_difference"])
        if row["uncounted"]:
            yield _warn("UNCOUNTED", label=row["label"], turns=row["uncounted"])
        if row["together"]:
            code = "TOGETHER" if row["user_tokens_per_s"] else "NOT_STREAMED"
            yield _warn(code, label=row["label"], turns=row["together"])


def citation(file: Path = PROJECT / "CITATION.cff") -> str:
    """Make an entry for BibTeX; "" without the project's file, as in an installed copy."""
    if not file.exists():
        return ""
    about = yaml.safe_load(file.read_text(encoding="utf-8"))
    fields = {
        "title": about["title"],
        "author": "} and {".join(author["name"] for author in about["authors"]),
        "version": about["version"],
        "year": str(about["date-released"])[:4],
    }
    lines = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items())
    return f"@software{{specbench,\n{lines}}}"
