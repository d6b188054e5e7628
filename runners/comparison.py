"""Speculative-decoding methods compared on a model in memory, from a script or a notebook.

It measures as ``runner=offline`` does: the same engine, order, records and statistics. It
runs in the caller's process, and the model is given back as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, cast

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runners.caller_input import folder_of, own_hydra, read_input, use_project_cache
from specbench.config import compose
from specbench.models import loading
from specbench.results import console, records
from specbench.results.conditions import Warned
from specbench.results.decision import verdict_words
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.summary_schema import Summary
from specbench.results.tasks import OVERALL
from specbench.storage import jsonl

_WIDTH = 100  # of the printed table
_SHORT = ["label", "mat", "speedup", "speedup_low", "speedup_high", "tokens_per_s", "outputs"]
_ERROR_COLUMNS = ["label", "case_id", "turn", "repeat", "during", "type", "message"]


@dataclass(frozen=True)
class Comparison:
    """What `compare` measured. Printed, or shown by a notebook, it is the table of a run.

    Attributes:
        table: a row for each method, the baseline ``ar`` first: ``label``, ``mat``, ``speedup``
            with its 95 % interval (``speedup_low``, ``speedup_high``), ``tokens_per_s``, and
            ``outputs``, what the audit said of the turns.
        wide: the same rows with all columns of ``summary.json``, an interval in two.
        cases: a row for each prompt, method and repeat; columns as in ``cases.jsonl``, and
            ``prompt`` (its place in ``prompts``) and ``text`` (the answer).
        steps: a row for each step: nodes drafted, tokens committed, seconds.
        errors: a row for each turn that failed, with the reason.
        summary: all of ``summary.json``: conditions, warnings, pairs of methods.
        folder: where the run's files are; None where they were not kept.
        lossless: no case failed, and every greedy output was plain decoding's.
    """

    table: pd.DataFrame
    wide: pd.DataFrame
    cases: pd.DataFrame
    steps: pd.DataFrame
    errors: pd.DataFrame
    summary: Summary = field(repr=False)
    folder: Path | None
    lossless: bool

    def __str__(self) -> str:
        terminal = Console(width=_WIDTH, color_system=None)
        with terminal.capture() as printed:
            console.print_summary(self.summary, terminal)
        return str(printed.get()).rstrip()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """The same table in a notebook."""
        shown = console.render(self.summary)
        deciding = (Warned(**line) for line in self.summary["warnings"])
        notes = [*shown.caption.split("\n"), *(w.text for w in deciding if w.decides)]
        frame: str = pd.DataFrame(shown.columns).map(str).to_html(index=False)
        return frame + "".join(f"<p>{escape(note, quote=False)}</p>" for note in notes if note)

    def plot(self) -> Figure:
        """Speedup and MAT of each method with 95 % intervals, the fastest first.

        A matplotlib figure: a notebook shows it, ``savefig("speedup.png")`` writes it.
        """
        rows = self.wide[self.wide["speedup"].notna() & (self.wide["method"] != BASELINE)]
        rows = rows.sort_values("speedup")
        figure = Figure(figsize=(7.0, 1.0 + 0.26 * len(rows)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        units = {"speedup": "speedup (ratio of tokens/s)", "mat": "MAT (tokens per target pass)"}
        for axes, (key, unit) in zip(panels, units.items(), strict=True):
            low, value, high = (rows[f"{key}{end}"].astype(float) for end in ("_low", "", "_high"))
            reach = [(value - low).clip(lower=0), (high - value).clip(lower=0)]  # NaN: no interval
            axes.errorbar(value, rows["label"], xerr=reach, fmt="o")
            axes.set_xlabel(unit)
            axes.grid(axis="x", color="#DDDDDD")
        panels[0].axvline(1.0, color="#333333", linewidth=0.8, linestyle="--")
        return figure


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Any],
    drafters: Iterable[Any],
    *,
    name: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    repeats: int = 1,
    verifier: str = "auto",
    output_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> Comparison:
    """Compare drafting methods with plain decoding, on a model in memory.

    Args:
        model: a transformers model on one CUDA device or the CPU; given back as it was, whatever
            happens. tokenizer: its tokenizer.
        prompts: each a text (put into the tokenizer's chat template, where it has one), a list of
            messages (``role``, ``content``), or token ids, which are taken as they are.
        drafters: each a method's name, a mapping (``{"method": "pld", "num_tokens": 5, "label":
            "short"}``), a `specbench.decoding.drafter.Drafter`, or one with a label
            (``{"drafter": drafter, "label": "mine"}``). Plain decoding, ``ar``, always runs too.
        name: the model's name. One of ``conf/model`` says that these are its weights: draft models,
            heads and settings for it hold. None finds it by the model's hub id.
        max_new_tokens, temperature, seed, repeats, verifier: as on the command line.
        output_dir: keeps the run's files there; an interrupted call then goes on where it stopped,
            and a repeated one reads them. None keeps none.
        overrides: other keys as typed on the command line, e.g. ``["pair=random_draft"]``.

    Raises:
        ComparisonRefused: a ValueError; something cannot be used, the message says what to type.
    """
    arguments = [
        *(f"generation={'sampling' if temperature else 'greedy'}", f"verifier={verifier}"),
        f"generation.max_new_tokens={max_new_tokens}",
        *(f"generation.temperature={temperature}", f"seed={seed}", f"repeats={repeats}"),
    ]
    with folder_of(output_dir) as path:
        given = read_input(model, tokenizer, prompts, name, arguments, overrides)
        given.measure(drafters, path)
        return _read(path, None if output_dir is None else path, tokenizer)


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of ``conf/model/<name>.yaml``, loaded as a run loads them.

    ``smollm2_135m`` comes with the project and needs no network.

    Raises:
        ComparisonRefused: there is no such name, or the weights are not to be had.
    """
    with folder_of(None):
        with own_hydra():
            cfg = compose.compose([f"model={name}"])
        use_project_cache(cfg)
        node = compose.typed(cfg).model
        tokenizer = loading.load_tokenizer(node)
        model = loading.load_model(node, tokenizer).model
    model.name_or_path = node.id  # by which `compare` knows it, also where it was read from a cache
    return model, tokenizer


def _read(path: Path, kept: Path | None, tokenizer: PreTrainedTokenizerBase) -> Comparison:
    summary = cast("Summary", jsonl.read_json(path / records.SUMMARY))
    made, _ = records.read_records(path)
    errors, _ = jsonl.read_jsonl(path / records.ERRORS)
    cases = [
        {
            "prompt": int(record.case_id),
            **record.to_json(),
            "text": tokenizer.decode(list(record.output_ids), skip_special_tokens=True),
        }
        for record in made
    ]
    manifest = RunManifest.read(path)
    rows = [row for row in summary["rows"] if row["task"] == OVERALL]
    wide = pd.DataFrame([_flat(row) for row in rows])
    outputs = [verdict_words(row["lossless"]) for row in rows]
    return Comparison(
        table=wide.assign(outputs=outputs)[_SHORT],
        wide=wide,
        cases=pd.DataFrame(cases),
        steps=pd.read_parquet(path / records.STEPS),
        errors=pd.DataFrame(errors, columns=None if errors else _ERROR_COLUMNS),
        summary=summary,
        folder=kept,
        lossless=manifest.exit_code == 0,
    )


def _flat(row: Any) -> dict[str, Any]:
    """A row of ``summary.json`` without lists and mappings: intervals and verdicts in columns."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if key.endswith("_ci"):
            low, high = value or (None, None)
            found |= {f"{key[:-3]}_low": low, f"{key[:-3]}_high": high}
        elif key == "lossless":
            found |= value
        elif key != "phase_share":
            found[key] = value
    return found
