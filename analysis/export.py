"""A run's acceptance for other programs: ``python -m analysis.export RUN --to FORMAT``.

--to speculation_profile    NVIDIA Model-Optimizer's file, of one label (-o FILE)
--to aiperf                 AIPerf's acceptance record, a line per request, of one label (-o FILE)
--to spec_bench             Spec-Bench's answer files without text, a file per label (-o DIR);
                            with text: python scripts/spec_bench.py export RUN DIR

The acceptance length is the MAT of our tables: all steps count, also those without a draft. It is
one plus the sum of the marginal rates, and a file where it is not is not written. All files of an
export are written beside their places, read back and compared; then they are moved there.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.runs.acceptance import (
    marginal_rates,
    rates_by_position,
    rates_where_drafted,
    steps_with,
    total,
)
from analysis.runs.command import parser_of, reporting_errors
from analysis.runs.load import Run, usable_runs
from specbench.errors import ConfigurationError, ResultsError, field_error, unknown_name
from specbench.results.formats import aiperf
from specbench.results.formats.aiperf import AcceptanceRecord
from specbench.results.formats.spec_bench import (
    Source,
    from_answer,
    mean_accept_length,
    to_answers,
    usable_blocks,
)
from specbench.results.formats.speculation_profile import TOLERANCE, SpeculationProfile, profile_of
from specbench.results.lines import StepTrace, read_steps
from specbench.results.manifest import LabelInfo, ModelInfo
from specbench.results.records import STEPS, CaseRecord
from specbench.results.statistics.aggregate import counted_turns
from specbench.results.statistics.roofline import number_format
from specbench.results.wording import thinking
from specbench.storage import jsonl
from specbench.storage.jsonl import JsonObject

_Steps = Mapping[tuple[int, str, int, str], StepTrace]
_SAMPLING = ("temperature", "top_p", "top_k")
_CONDITIONS = "specbench"  # our key in the formats of others, whose readers let it pass


def speculation_profile(run: Run, label: str) -> SpeculationProfile:
    """A label's acceptance by position, over all steps and by category.

    Raises:
        ResultsError: the run's files do not tell it, or the identity does not hold.
    """
    records, traces = _turns(run, label)
    depths = {key: trace.depth for key, trace in traces.items()}
    deepest = max(
        max(max(traces[r.key].depth), max(r.committed_per_step) - 1)
        for r in records
        if r.committed_per_step
    )
    by_category: dict[str, list[CaseRecord]] = {}
    for record in records:
        by_category.setdefault(record.category, []).append(record)
    whole = rates_by_position(records, deepest)
    model, info = run.manifest.model or ModelInfo(), run.manifest.labels.get(label, LabelInfo())
    draft = model.drafts.get(label)
    blocks = any(record.verifier == "block" for record in records)
    values: JsonObject = {
        **whole,
        "measured": not run.synthetic,
        "method": info.method or label,
        "verification_method": "block" if blocks else "longest_prefix",
        "draft_checkpoint": None
        if draft is None
        else _known(id=_public(draft.id), revision=draft.revision, dtype=draft.dtype),
        "target_model": _known(
            id=_public(model.id or run.manifest.setting("model", "id")),
            name=run.model,
            revision=model.revision,
            dtype=run.dtype,
            weights_hash=model.weights_hash,
        ),
        "num_speculative_tokens": deepest,
        "max_supported_k": deepest,
        "accept_length_by_k": {str(deepest): whole["mean_accept_length"]},
        "per_category": {
            name: {**rates_by_position(own, deepest), "num_requests": len(own)}
            for name, own in sorted(by_category.items())
            if any(record.committed_per_step for record in own)
        },
        "measurement_conditions": {
            **_conditions(run, label),
            "num_requests": len(records),
            "num_steps": sum(record.n_target_passes for record in records),
            "steps_with_a_draft": total(records, steps_with(0, 1, depths)),
            "accept_rates_where_drafted": rates_where_drafted(records, deepest, depths),
        },
    }
    return profile_of(values, f"{label} of {run.path}")


def acceptance_records(run: Run, label: str) -> list[AcceptanceRecord]:
    """A label's turns, a record each.

    Raises:
        ResultsError: the run's files do not tell it, counts contradict each other, or the identity
            does not hold.
    """
    records, traces = _turns(run, label)
    conditions, found = _conditions(run, label), list[AcceptanceRecord]()
    for record in records:
        accepted = [n - 1 for n in record.committed_per_step]
        drafted = traces[record.key].drafted if accepted else []
        steps, sums = len(accepted), (sum(accepted), sum(drafted))
        values: JsonObject = {
            "engine": record.engine,
            "mean_acceptance_length": (record.n_new - 1) / steps if steps else 1.0,
            "draft_acceptance_rate": sums[0] / sums[1] if sums[1] else 0.0,
            "acceptance_histogram": dict(sorted(Counter(accepted).items())),
            "num_accepted_draft_tokens": sums[0],
            "num_draft_tokens": sums[1],
            "num_spec_steps": steps,
            "completion_tokens": record.n_new,
            "per_step_accepted": accepted,
            "per_step_drafted": drafted,
            _CONDITIONS: {**record.turn_id, "category": record.category, **conditions},
        }
        where = f"{run.path}, {label}, case {record.case_id}, turn {record.turn}"
        if record.n_new != 1 + sums[0] + steps:
            raise ResultsError(
                f"{where}: {record.n_new} new tokens are not the prompt's one, {steps} steps and "
                f"{sums[0]} accepted draft tokens. Nothing was written: measure anew, fresh=true."
            )
        try:
            found.append(AcceptanceRecord.model_validate(values))
        except ValueError as error:
            raise ResultsError(f"{where}: {field_error(error)}. Nothing was written.") from error
    all_steps = sum(made.num_spec_steps for made in found)
    mean = sum(made.mean_acceptance_length * made.num_spec_steps for made in found) / all_steps
    _check_identity(marginal_rates(records), mean, f"{label} of {run.path}")
    return found


def without_text(model: JsonObject) -> Callable[[Sequence[int]], str]:
    """A decoder for answer files that hold no text."""
    return lambda _: ""


def write_answers(
    run: Run,
    out: Path,
    labels: Sequence[str],
    decoder: Callable[[JsonObject], Callable[[Sequence[int]], str]],
) -> None:
    """Write labels of a run as Spec-Bench's answer files, and print their names.

    Args:
        out: folder of the files; with repeats it gets a folder for each.
        labels: which; none: all.
        decoder: from the run's model configuration to what decodes new tokens.

    Raises:
        ConfigurationError: the run cannot be told in their format.
        ResultsError: the identity does not hold for a label.
    """
    if run.manifest.imported is not None:
        raise ConfigurationError(f"{run.path} was made of answer files: it holds no tokens.")
    if run.timing == "none":
        raise ConfigurationError(
            f"{run.path} is a replay without times, and an answer file must have them. Give "
            "the replay a cost surface (runner.surface=FILE), or export the live run."
        )
    usable = usable_blocks(run.records, run.labels)
    model = run.manifest.config["model"]
    loaded = run.manifest.model or ModelInfo()
    dtype = number_format({"dtype": loaded.dtype or model["dtype"], "weights": loaded.weights})
    repeats, decode = sorted({record.repeat for record in run.records}), decoder(model)
    files: dict[Path, list[JsonObject]] = {}
    steps: dict[Path, list[list[int]]] = {}
    for label in labels or run.labels:
        own = [record for record in run.records if record.label == label]
        _check_steps_said(own, run.path)
        predicted = "-predicted" if own[0].timing == "predicted" else ""
        name = dtype.replace(" ", "-")
        model_id = f"{run.model}-{label}-{name}-temp-{run.temperature}{predicted}"
        conditions = {_CONDITIONS: _conditions(run, label)}
        for repeat in repeats:
            folder = out / f"run_{repeat + 1}" if len(repeats) > 1 else out
            blocks = [block for block in usable.blocks if block[0] == repeat]
            lines = to_answers(own, blocks, model_id, decode)
            kept = [record for record in own if (record.repeat, record.case_id) in {*blocks}]
            mean, where = mean_accept_length(lines), f"{label} of {run.path}"
            _check_identity(marginal_rates(kept), mean, where)
            path = folder / f"{model_id}.jsonl"
            files[path] = [{**line, **conditions} for line in lines]
            by_block = sorted(kept, key=lambda r: (blocks.index((r.repeat, r.case_id)), r.turn))
            steps[path] = [list(record.committed_per_step) for record in by_block]

    def read(path: Path) -> tuple[list[JsonObject], list[list[int]]]:
        lines, _ = jsonl.read_jsonl(path)
        source = Source("", "", "", "", "")
        turns = [turn for line in lines for turn in from_answer(line, source, 0)]
        return lines, [turn.committed_per_step for turn in turns]

    jsonl.write_together(
        {path: (lines, steps[path]) for path, lines in files.items()},
        lambda path, held: jsonl.rewrite_jsonl(path, held[0]),
        read,
    )
    for path, lines in files.items():
        print(f"{path}: {len(lines)} questions")
    for count, reason in ((usable.failed, "a label failed"), (usable.noisy, "disturbed")):
        if count:
            print(f"left out for all labels: {count} questions ({reason})")


def _turns(run: Run, label: str) -> tuple[list[CaseRecord], _Steps]:
    """The label's turns that MAT is about, and their steps, which must be the same ones."""
    records = [r for r in counted_turns(run.records, run.labels) if r.label == label]
    _check_steps_said(records, run.path)
    if label not in (drafting := _drafting(run)):
        raise ResultsError(
            f"{label} of {run.path} drafts nothing, so it has no acceptance. Name another: --label "
            f"{' or '.join(drafting) or 'LABEL'}."
        )
    path = run.path / STEPS
    if not path.is_file():
        raise ResultsError(
            f"{run.path} has no {STEPS}, which tells how deep drafts went. Name the folder that "
            "the run wrote, not a kept or imported one."
        )
    traces = {trace.key: trace for trace in read_steps(path) if trace.label == label}
    for record in records:
        trace = traces.get(record.key)
        if record.committed_per_step != (trace.committed if trace else []):
            raise ResultsError(
                f"{path} and the records disagree on what {label} committed in case "
                f"{record.case_id}, turn {record.turn}, repeat {record.repeat}. Put the run's "
                "files back, or measure anew: fresh=true."
            )
    if not any(record.committed_per_step for record in records):
        raise ResultsError(f"{label} of {run.path} has no step in a case that all labels finished.")
    return records, traces


def _check_steps_said(records: Sequence[CaseRecord], folder: Path) -> None:
    if any(r.served and r.n_new > 1 and not r.committed_per_step for r in records):
        raise ResultsError(
            f"{folder} was answered by a server that says totals and no single steps, so there is "
            "no acceptance by position. Export a run of our engine (without runner=serve)."
        )


def _check_identity(marginals: Sequence[float], mean: float | None, where: str) -> None:
    implied = 1 + math.fsum(marginals)
    if mean is not None and abs(implied - mean) > TOLERANCE:
        raise ResultsError(
            f"{where}: 1 + the sum of the marginal rates is {implied:.6f}, and the acceptance "
            f"length is {mean:.6f}. Nothing was written: measure anew, fresh=true."
        )


def _conditions(run: Run, label: str) -> JsonObject:
    """What a label's acceptance holds for; None where the run did not record it."""
    manifest, first = run.manifest, next(r for r in run.records if r.label == label)
    info = manifest.labels.get(label, LabelInfo())
    return {
        "label": label,
        "method": info.method or label,
        "model": run.model,
        "dtype": run.dtype,
        "dataset": run.dataset,
        "template": manifest.setting("model", "template"),
        "template_sha": (manifest.model or ModelInfo()).template_sha,
        "thinking": thinking(manifest),
        "sampling": {key: manifest.setting("generation", key) for key in _SAMPLING},
        "verifier": first.verifier,
        "max_new_tokens": run.max_new_tokens,
        "budget": info.budget,
        "knobs": _public(run.knobs(label)),
        "state_scope": first.state_scope,
        "engine": first.engine,
        "timing": first.timing,
        "hardware": run.hardware,
        "code": run.code,
        **({"synthetic": True} if run.synthetic else {}),
    }


def _public(value: Any) -> Any:
    """Without this machine's folders: of an absolute path the last two names."""
    if isinstance(value, dict):
        return {key: _public(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_public(each) for each in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return "/".join(Path(value).parts[1:][-2:])
    return value


def _known(**facts: object) -> JsonObject:
    return {name: fact for name, fact in facts.items() if fact is not None}


def _drafting(run: Run) -> list[str]:
    found = {
        r.label for r in run.records if r.n_drafted or max(r.committed_per_step, default=1) > 1
    }
    return [label for label in run.labels if label in found]


def _label(run: Run, typed: str | None) -> str:
    """The label to export: the one that was typed, else the only one that drafts."""
    if typed is not None:
        if typed not in run.labels:
            raise unknown_name("label", typed, run.labels)
        return typed
    drafting = _drafting(run)
    if len(drafting) != 1:
        several = f"{len(drafting)} labels that draft" if drafting else "no label that drafts"
        raise ResultsError(
            f"{run.path} has {several}. Name one: --label {' or '.join(drafting or run.labels)}."
        )
    return drafting[0]


def _write_profile(run: Run, label: str, out: Path) -> None:
    made = speculation_profile(run, label)
    jsonl.write_together({out: made}, lambda path, held: held.write(path), SpeculationProfile.read)
    print(f"{out}: {label}, acceptance length {made.mean_accept_length:.3f}")


def _write_records(run: Run, label: str, out: Path) -> None:
    made = acceptance_records(run, label)
    jsonl.write_together({out: made}, aiperf.write, aiperf.read)
    print(f"{out}: {label}, {len(made)} requests")


_FORMATS = {"speculation_profile": _write_profile, "aiperf": _write_records}
_NAMES = {
    "speculation_profile": "speculation_profile.json",
    "aiperf": "spec_decode_acceptance.jsonl",
    "spec_bench": "spec_bench",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--to", required=True, metavar="FORMAT", help=" | ".join(_NAMES))
    parser.add_argument("--label", help="default: the only one that drafts; spec_bench: all")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: by format")
    parser.add_argument("--incomplete", action="store_true", help="also of a run not yet done")
    options = parser.parse_args(arguments)
    return reporting_errors(lambda: _export(options))


def _export(options: argparse.Namespace) -> int:
    if options.to not in _NAMES:
        raise unknown_name("format", options.to, _NAMES)
    run, out = one_run(options.run, options.incomplete), options.output or Path(_NAMES[options.to])
    if options.to == "spec_bench":
        labels = [_label(run, options.label)] if options.label else []
        write_answers(run, out, labels, without_text)
        return 0
    _FORMATS[options.to](run, _label(run, options.label), out)
    return 0


def one_run(path: Path, incomplete: bool) -> Run:
    """The run of a folder; ``incomplete``: also one that is not done."""
    runs, _ = usable_runs([path], incomplete)
    if len(runs) != 1:
        raise ResultsError(f"{path} holds {len(runs)} runs; name the folder of one.")
    return runs[0]


if __name__ == "__main__":
    sys.exit(main())
