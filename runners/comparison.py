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

from runners.caller_input import call, read_input, use_project_cache
from specbench.config import compose
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.results import console, records
from specbench.results.conditions import Warned
from specbench.results.decision import verdict_words
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.summary_schema import Summary
from specbench.results.tasks import OVERALL
from specbench.storage import jsonl

_WIDTH = 100  # of the printed table
_ERROR_COLUMNS = ["label", "case_id", "turn", "repeat", "during", "type", "message"]


@dataclass(frozen=True)
class Comparison:
    """What `compare` measured. Printed, or shown by a notebook, it is the table of a run.

    Attributes:
        table: a row for each method, the baseline ``ar`` first: ``label``, ``mat``, ``speedup``
            with its 95 % interval (``speedup_low``, ``speedup_high``), ``tokens_per_s``, and
            ``outputs``, what the audit said of the turns.
        cases: a row for each prompt, method and repeat; columns as in ``cases.jsonl``, and
            ``prompt`` (its place in ``prompts``) and ``text`` (the answer).
        steps: a row for each step: nodes drafted, tokens committed, seconds.
        errors: a row for each turn that failed, with the reason.
        summary: all of ``summary.json``: conditions, warnings, rows with all numbers, pairs.
        folder: where the run's files are; None where they were not kept.
        lossless: no case failed, and every greedy output was plain decoding's.
    """

    table: pd.DataFrame
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
        """Draw the speedup of each method with its 95 % interval, the fastest at the top.

        A matplotlib figure: a notebook shows it, ``savefig("speedup.png")`` writes it.
        """
        rows = self.table[self.table["label"] != BASELINE].dropna(subset="speedup")
        rows = rows.sort_values("speedup")
        value, low, high = (rows[f"speedup{end}"].astype(float) for end in ("", "_low", "_high"))
        figure = Figure(figsize=(6.0, 1.0 + 0.26 * len(rows)), layout="constrained")
        axes = figure.subplots()
        axes.errorbar(value, rows["label"], xerr=[value - low, high - value], fmt="o")
        axes.axvline(1.0, color="#333333", linewidth=0.8, linestyle="--")
        axes.set_xlabel("speedup (ratio of tokens/s)")
        return figure


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Any],
    methods: Iterable[Any] = (),
    *,
    drafters: None = None,
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
        methods: each a method's name, a mapping (``{"method": "pld", "num_tokens": 5, "label":
            "short"}``), a `specbench.decoding.drafter.Drafter`, or one with a label
            (``{"drafter": drafter, "label": "mine"}``). Plain decoding, ``ar``, always runs too.
            ``drafters``, its earlier name, is refused.
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
    with call(output_dir) as path:
        if drafters is not None:
            raise ConfigurationError("drafters= is gone: type methods=[...].")
        given = read_input(model, tokenizer, prompts, name, arguments, overrides)
        given.measure(methods, path)
        return _read(path, None if output_dir is None else path, tokenizer)


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of ``conf/model/<name>.yaml``, loaded as a run loads them.

    ``smollm2_135m`` comes with the project and needs no network.

    Raises:
        ComparisonRefused: there is no such name, or the weights are not to be had.
    """
    with call():
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
    table = []
    for row in summary["rows"]:
        if row["task"] == OVERALL:
            low, high = row["speedup_ci"] or (None, None)
            columns = {key: row[key] for key in ("label", "mat", "speedup")}
            columns |= {"speedup_low": low, "speedup_high": high}
            columns |= {"tokens_per_s": row["tokens_per_s"]}
            table.append({**columns, "outputs": verdict_words(row["lossless"])})
    return Comparison(
        table=pd.DataFrame(table),
        cases=pd.DataFrame(cases),
        steps=pd.read_parquet(path / records.STEPS),
        errors=pd.DataFrame(errors, columns=None if errors else _ERROR_COLUMNS),
        summary=summary,
        folder=kept,
        lossless=manifest.exit_code == 0,
    )
