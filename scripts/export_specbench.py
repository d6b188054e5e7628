"""Write a run as Spec-Bench's answer files, so that its own ``speed.py`` can be run on them.

    python scripts/export_specbench.py RUN OUT

Its ``evaluation/speed.py`` takes two of them as ``--file-path`` and ``--base-path``, once one line
of it has been edited: in its ``parser.add_argument("--mean-report", ...)`` near the end, the line
``default=True,`` must become ``default=False,``. As it stands the option is on whatever is typed,
and the files that are named are not read.

One file per label; with repeats, one folder ``run_1``, ``run_2``, … each. Its MAT is ours. Its
speed of a method is ours by its formula (``python -m analysis.tables RUN --estimator specbench``).
Its speed of the baseline is not: it counts that one's tokens by tokenizing the text again and
subtracting one, so the EOS is lost there and nowhere else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.errors import ConfigurationError, SpecBenchError
from specbench.results.records import MANIFEST, read_records
from specbench.results.spec_bench_format import to_answers, usable_blocks
from specbench.storage import jsonl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    manifest = jsonl.read_json(options.run / MANIFEST)
    records, _ = read_records(options.run)
    if "imported" in manifest:
        raise ConfigurationError(f"{options.run} was made of answer files: it holds no tokens.")
    if not records:
        raise ConfigurationError(f"{options.run} has no records. Make some: python run.py")
    if any(record.timing == "none" for record in records):
        raise ConfigurationError(
            f"{options.run} is a replay without times, and an answer file must have them. Give "
            "the replay a cost surface (runner.surface=FILE), or export the live run."
        )
    labels = list(dict.fromkeys(record.label for record in records))
    usable = usable_blocks(records, labels)
    decode = _no_text if options.no_text else _decoder(manifest["config"]["model"])
    config = manifest.get("config") or {}
    dtype = str((manifest.get("model") or {}).get("dtype") or config["model"]["dtype"])
    temperature = float((config.get("generation") or {}).get("temperature") or 0.0)
    repeats = sorted({record.repeat for record in records})
    for label in labels:
        own = [record for record in records if record.label == label]
        predicted = "-predicted" if own[0].timing == "predicted" else ""
        model_id = (
            f"{own[0].model}-{label}-{dtype.removeprefix('torch.')}-temp-{temperature}{predicted}"
        )
        for repeat in repeats:
            folder = options.out / f"run_{repeat + 1}" if len(repeats) > 1 else options.out
            blocks = [block for block in usable.blocks if block[0] == repeat]
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{model_id}.jsonl"
            jsonl.rewrite_jsonl(path, to_answers(own, blocks, model_id, decode))
            print(f"{path}: {len(blocks)} questions")
    for count, reason in ((usable.failed, "a label failed"), (usable.disturbed, "disturbed")):
        if count:
            print(f"left out for all labels: {count} questions ({reason})")
    if options.no_text:
        print("without text: their speed.py cannot count the tokens of a baseline in these files")
    return 0


def _no_text(tokens: Sequence[int]) -> str:
    del tokens
    return ""


def _decoder(model: object) -> Callable[[Sequence[int]], str]:
    from specbench.models.loading import load_tokenizer  # brings torch

    try:
        tokenizer = load_tokenizer(model)
    except SpecBenchError as error:
        raise ConfigurationError(
            f"{error} Without its tokenizer the answers' text cannot be written; --no-text leaves "
            "it out, which is enough for the methods' files, not for the baseline's."
        ) from error

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    return decode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("out", type=Path, help="folder of the answer files")
    parser.add_argument("--no-text", action="store_true", help="needs no tokenizer; see above")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpecBenchError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
