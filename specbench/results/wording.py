"""Words that every table uses, whoever prints it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from specbench.paths import PROJECT
from specbench.results.estimate import ABSENT, FEWEST
from specbench.results.manifest import ModelInfo, RunManifest
from specbench.results.records import EAGER_DRAFT_PASSES, EAGER_PASSES, OWN_ENGINE, CaseRecord
from specbench.results.summary_schema import Pair, SummaryRow
from specbench.results.tasks import OVERALL

# What concerns a reader most comes first.
_VERDICTS = {
    "bug": "BUG",
    "near_tie": "near tie",
    "differs": "differ",
    "equal": "equal",
    "not_audited": "not audited",
    "lossy": "lossy",
}

LEADERS_NAMED = 4

# The chat templates' word for it (Qwen 3 and others).
_THINKING = "enable_thinking"

# What a caption of several runs says first about times that were not measured.
TIMES = {
    "measured": "",
    "predicted": "PREDICTED times (replay with a cost surface), not measured ones. ",
    "none": "Replay without times: steps only. ",
}


# Where a caption is parted, and which of its sentences warn.
_SHORT_CAPTION = 320
_SENTENCES = re.compile(r"(?<=\.) +(?=[A-Z])")
_WARNING = re.compile(r"[A-Z]{3,} ")

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


def case_words(row: SummaryRow) -> str:
    """``12``, or ``12 (9 timed)``: cases that MAT is about, and those that speeds are about."""
    # Summaries from before there was a second number lack it.
    n_cases, n_timed = row["n_cases"], row.get("n_timed", row["n_cases"])
    if row.get("timing") == "none" or n_timed == n_cases:
        return str(n_cases)
    return f"{n_cases} ({n_timed} timed)"


def cases_words(rows: Iterable[SummaryRow]) -> str:
    """``12 cases``; ``9 to 12 (11 timed) cases`` where the rows are not of as many."""
    by_number = sorted(rows, key=lambda row: row.get("n_timed", row["n_cases"]))
    counts = list(dict.fromkeys(map(case_words, by_number)))
    if counts == ["1"]:
        return "1 case"
    return f"{counts[0] if len(counts) == 1 else f'{counts[0]} to {counts[-1]}'} cases"


def pair_words(pair: Pair) -> str:
    """The verdict on a pair, and how many cases another one would take."""
    needed = pair.get("needed")
    if pair["verdict"] == "too few":
        return f"too few cases (at least {needed} needed)"
    if pair["verdict"] == "undecided" and needed:
        return f"undecided (about {needed:,} cases needed)"
    return pair["verdict"]


def p_words(p: float) -> str:
    """A p value as text; of the smallest only that they are small."""
    return "<0.0001" if p < 1e-4 else f"{p:.4f}"


def leader_words(leaders: Sequence[str]) -> str:
    """``sam``; ``sam or pld`` where the data cannot tell; many are counted."""
    if len(leaders) <= LEADERS_NAMED:
        return " or ".join(leaders) or ABSENT
    return f"{leaders[0]} or one of {len(leaders) - 1} others"


def batch_words(records: Iterable[CaseRecord]) -> str:
    """How many texts were decoded at once, and what the numbers then are; "" for one."""
    found = {(r.unit, r.turn, r.batch.size, r.batch.at_once) for r in records if r.batch}
    if not found:
        return ""
    size = max(size for _, _, size, _ in found)
    fewer = sum(at_once < size for *_, at_once in found)
    few = f" ({fewer} of {len(found)} groups' turns have fewer)" if fewer else ""
    return (
        f"BATCH {size}: so many texts are decoded in lock-step{few}; tokens/s are all texts' "
        "together, speedups over ar at the same batch, and a text that ended is not replaced."
    )


def interval_words(repeats: int, counts: Iterable[int], *, groups: bool = False) -> str:
    """What the intervals of a table cover, and what not; of how many cases its numbers are.

    ``groups``: whether cases were decoded at once.
    """
    if groups:
        more = "" if repeats == 1 else ", and the spread between repeats"
        return (
            f"Intervals: 95 %, bootstrap over groups of cases{more}; none of fewer than {FEWEST}. "
            "They do not cover what differs on other days and machines."
        )
    none = f" None for fewer than {FEWEST} timed cases." if min(counts) < FEWEST else ""
    if repeats == 1:
        return (
            "Intervals: 95 %, bootstrap over prompts within categories; they cover prompts, not "
            f"what differs from run to run.{none}"
        )
    return (
        "Intervals: 95 %, bootstrap over prompts within categories, and the spread between "
        f"repeats; they do not cover what differs on other days and machines.{none}"
    )


def prediction_words(records: Iterable[CaseRecord]) -> str:
    """What intervals of predicted speedups hold besides; "" where no record says it."""
    found = {record.prediction_error for record in records if record.prediction_error}
    if not found:
        return ""
    errors = " or ".join(f"{error:.1%}" for error in sorted(found))
    return f"Predicted speedups: their intervals also hold the predictions' own error, {errors}."


_AGAINST_TEXT = (
    "best: all others are shown slower; highest: the fastest here, which not all others are shown "
    "slower than; undecided: the data cannot part it from the fastest; p: corrected for the number "
    "of comparisons."
)
# Below the first table.
DECISION_TEXT = f"end-to-end: speedup with the prompt's pass in the time. {_AGAINST_TEXT}"

# For readers who have not seen the documentation, by word; `code` is marked as in Markdown.
DEFINITIONS = {
    "Speedup": "tokens per second of the method over those of plain decoding (ar), measured in the "
    "same process on the same prompts, case by case in turn. The prompt's pass is not in it.",
    "End-to-end": "the same ratio with the prompt's pass in the time.",
    "MAT": "mean accepted tokens: new tokens after the first, per target pass. Plain decoding has "
    "1.00. It is what a method gains before it costs anything.",
    "[low, high]": "95 % interval of a bootstrap over prompts. It covers other prompts like these, "
    "not other days and machines.",
    "Against the best": _AGAINST_TEXT,
    "Outputs": "turns by what the audit found. equal: the tokens of plain decoding. near tie: "
    "other tokens, each within the number format's tolerance of the likeliest. BUG: anything else. "
    "differ: another engine's answer that is not the same server's plain answer.",
    "Case": "a question with all its turns. A case that failed for one method counts for none.",
}

PAIRS_TEXT = (
    "Ratio of speeds, by the table's estimator; above 1 the first is faster. Intervals against ar "
    "hold all together with 95 %. Against the fastest method the interval is over whichever method "
    "is truly the best of the others, since the same data picked it (multiple comparisons with the "
    "best, Hsu 1984). faster, slower: the interval excludes 1; tie: it lies within {margin:.0%}. "
    "p: corrected for the number of comparisons. detectable: smallest ratio shown with a power of "
    "80 %; cases needed: those that would show the measured ratio so."
)


def parted(caption: str, also: tuple[str, ...] = ()) -> tuple[str, str]:
    """A long caption in two: what belongs beside the numbers, and the rest.

    The first are its opening sentence, warnings (which begin with a word in capitals) and
    sentences that begin with a word of ``also``. A short caption is not parted.
    """
    if len(caption) <= _SHORT_CAPTION:
        return caption, ""
    sentences = [said for line in caption.split("\n") for said in _SENTENCES.split(line) if said]
    kept = [
        i == 0 or _WARNING.match(said) is not None or said.startswith(also)
        for i, said in enumerate(sentences)
    ]
    first, rest = (
        " ".join(said for said, beside in zip(sentences, kept, strict=True) if beside == wanted)
        for wanted in (True, False)
    )
    return first, rest


def verdict_words(counts: Mapping[str, int], counted: bool = True) -> str:
    """``3 near tie, 45 equal``; kinds that did not occur are left out.

    Args:
        counts: of turns, by verdict.
        counted: also count what was not audited; over several labels that number says nothing.
    """
    found = {kind: f"{counts[kind]} {word}" for kind, word in _VERDICTS.items() if counts.get(kind)}
    if "not_audited" in found and not counted:
        found["not_audited"] = "not audited" if len(found) == 1 else "others not audited"
    return ", ".join(found.values()) or "nothing audited"


def fallback_words(records: Iterable[CaseRecord]) -> list[str]:
    """A sentence for each label with passes that ran eagerly although graphs were asked for."""
    totals: dict[str, Counter[str]] = {}
    for record in records:
        found = totals.setdefault(record.label, Counter())
        found["target"] += record.n_target_passes
        found["draft"] += int(record.drafter.get("draft_forwards", 0))
        for name in (EAGER_PASSES, EAGER_DRAFT_PASSES):
            found[name] += int(record.drafter.get(name, 0))
    words = []
    for label, found in totals.items():
        for model, name in (("target", EAGER_PASSES), ("draft", EAGER_DRAFT_PASSES)):
            if found[name]:
                # The draft's pass over a prompt may be such a one and is not among its passes.
                share = found[name] / max(found[model], found[name])
                words.append(
                    f"EAGER FALLBACK: {share:.1%} of {label}'s {model} passes ran without a CUDA "
                    "graph, so its speed is not the engine's (why: model.passes in manifest.json)."
                )
    return words


def thinking(manifest: RunManifest) -> bool | None:
    """Whether the prompts ask the model to think first; None where nobody said."""
    found = (manifest.setting("model", "template_kwargs") or {}).get(_THINKING)
    return None if found is None else bool(found)


def template_words(manifest: RunManifest) -> str:
    """``template vicuna_v1.1``, ``template auto, thinking off``; "" where it was not recorded.

    A server writes its prompts itself.
    """
    if manifest.servers:
        return ""
    template, thinks = manifest.setting("model", "template"), thinking(manifest)
    words = [f"template {template}"] if template else []
    if thinks is not None:
        words.append(f"thinking {'on' if thinks else 'off'}")
    return ", ".join(words)


def engine_words(records: Iterable[CaseRecord]) -> str:
    """Which other engines answered, and in which numbers; "" where ours decoded."""
    found = {(r.engine, r.numerics) for r in records if r.engine != OWN_ENGINE}
    if not found:
        return ""
    said = "; ".join(f"{engine}, weights in {numerics}" for engine, numerics in sorted(found))
    return f"ANOTHER ENGINE: {said}. Outputs are compared with its own plain ones."


def users_words(at_once: int) -> str:
    """``Asked at once: 4.``, and whose the speedups then are."""
    more = " Speedup and what stands against the best are one user's." if at_once > 1 else ""
    return f"Asked at once: {at_once}.{more}"


def build_words(manifest: RunManifest) -> str:
    """What the servers of a run were built for, where they told it: it decides their speed."""
    told = [
        f"{flags['wheel']} with {flags['simd']}" if flags.get("wheel") else str(flags["simd"])
        for server in (manifest.servers or {}).values()
        if (flags := server.get("flags") or {}).get("simd")
    ]
    return f"CPU build: {'; '.join(dict.fromkeys(told))}." if told else ""


def rounding_words(model: ModelInfo | None) -> list[str]:
    """A sentence where the check at load saw roundings choose other tokens."""
    check = (model and model.self_check) or {}
    if not check.get("moved"):
        return []
    return [
        "ROUNDINGS MOVE TOKENS: at load, the model's own passes of one row and of many over the "
        f"same text chose different tokens at {check['moved']} of {check['positions']} positions."
    ]


_LISTED = 24  # labels in a sentence


def budget_words(
    budgets: Mapping[str, str | None], records: Mapping[str, Iterable[CaseRecord]]
) -> str:
    """Where the labels' settings come from, and the tokens that each drafted in a step, measured.

    Args:
        budgets: by name in the table; None where that was not recorded. Older folders say nothing.
        records: by the same names.
    """
    by_kind: dict[str, list[str]] = {}
    drafted: list[str] = []
    for name, kind in [(name, kind) for name, kind in budgets.items() if kind is not None]:
        by_kind.setdefault("set by hand" if kind == "typed" else kind, []).append(name)
        done = [record for record in records[name] if record.status != "failed"]
        if steps := sum(record.n_target_passes for record in done):
            verified = f"{name} {sum(record.n_drafted for record in done) / steps:.1f}"
            offered = sum(sum(record.drafter.get("offered_per_step", ())) for record in done)
            drafted.append(f"{verified} (cut from {offered / steps:.1f})" if offered else verified)
    if not by_kind:
        return ""
    words = f"Budgets: {next(iter(by_kind))}"
    if len(by_kind) > 1:
        many = {k: f"{k}: {_listed(n)}" for k, n in by_kind.items()}
        many |= {k: f"{len(n)} {k}" for k, n in by_kind.items() if len(n) > _LISTED}
        words = f"MIXED budgets: {'; '.join(many.values())}"
    return f"{words}. Drafted tokens a step: {_listed(drafted)}." if drafted else f"{words}."


def _listed(words: Sequence[str]) -> str:
    more = len(words) - _LISTED
    return ", ".join(words[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def citation(file: Path = PROJECT / "CITATION.cff") -> str:
    """An entry for BibTeX; "" where the project's file is not there, as in an installed copy."""
    if not file.exists():
        return ""
    said = yaml.safe_load(file.read_text(encoding="utf-8"))
    authors = " and ".join(f"{{{author['name']}}}" for author in said["authors"])
    return (
        "@software{specbench,\n"
        f"  title = {{{said['title']}}},\n"
        f"  author = {authors},\n"
        f"  version = {{{said['version']}}},\n"
        f"  year = {{{str(said['date-released'])[:4]}}},\n"
        "}"
    )


def run_caption(
    records: Sequence[CaseRecord], manifest: RunManifest, rows: Sequence[SummaryRow]
) -> str:
    """What belongs below a run's own table: model, data, cases, state kept, sampling."""
    scopes = {record.label: record.state_scope for record in records}
    kept = ", ".join(f"{label}: {scope}" for label, scope in scopes.items())
    answered = engine_words(records)
    predicted = any(record.timing == "predicted" for record in records)
    model, dataset = manifest.setting("model", "name"), manifest.setting("dataset", "name")
    cases = cases_words(row for row in rows if row["task"] == OVERALL)
    parts = [
        ("PREDICTED times, not measured ones. " if predicted else "")
        + f"{model} on {dataset}{f' ({said})' if (said := template_words(manifest)) else ''}: "
        + f"{cases}, repeats={manifest.config['repeats']}. "
        + (" ".join(filter(None, [answered, build_words(manifest)])) or f"State kept per {kept}.")
    ]
    batched = batch_words(records)
    parts += filter(None, [batched])
    by_label: dict[str, list[CaseRecord]] = {row["label"]: [] for row in rows}
    for record in records:
        by_label.setdefault(record.label, []).append(record)
    budgets = {label: manifest.labels[label].budget for label in by_label}
    if said := budget_words(budgets, by_label):
        parts.append(said)
    if answered:
        parts.append(users_words(int(manifest.setting("server", "concurrency") or 1)))
    if (estimator := manifest.config["estimator"]) != "paired":
        parts.append(f"{SPEEDUPS[estimator]}.")
    if manifest.setting("measure", "pin"):
        parts.append("Threads pinned to one CPU each.")
    if any(record.timing != "none" for record in records):
        repeats = 1 + max(record.repeat for record in records)
        counts = (row["n_timed"] for row in rows)
        parts.append(interval_words(repeats, counts, groups=bool(batched)))
    parts += filter(None, [prediction_words(records)])
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
    elif not any(record.lossless.verdict != "not_audited" for record in records):
        parts.append("Outputs not audited.")
    parts += fallback_words(records)
    parts += rounding_words(manifest.model)
    if any(record.lossy for record in records):
        parts.append("LOSSY: outputs of labels that draft do not follow the model's distribution.")
    return " ".join(parts)
