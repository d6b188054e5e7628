"""Build N-Grammys' table of a model's own n-grams, by running it on every token of its vocabulary.

    python scripts/build_bigram_table.py --model mistral7b
    python scripts/build_bigram_table.py --model vicuna7b --out v7.bin model.dtype=float16

Without --out the table goes where runs look for it; models that share a tokenizer need an --out
each, since a run refuses a table of other weights. A killed build goes on where it was. Words at
the end are overrides of the configuration, as for run.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from specbench import artefacts, models
from specbench.config import compose
from specbench.errors import ConfigurationError, SpecBenchError
from specbench.index.bigram_table import TOP, begin_token, build_table, digest
from specbench.structs import Artefact


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a name in conf/model/")
    parser.add_argument(
        "--top", type=int, default=TOP, help="next tokens kept (default: %(default)s)"
    )
    parser.add_argument("--bos", action="store_true", help="put the begin token before each token")
    parser.add_argument("--batch", type=int, default=256, help="tokens of a pass")
    parser.add_argument("--out", type=Path, help="default: where runs look for it")
    parser.add_argument("overrides", nargs="*", help="e.g. model.dtype=float16")
    return parser.parse_args(argv)


def build(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    for key in ("top", "batch"):
        if getattr(options, key) < 1:
            raise ConfigurationError(f"--{key} {getattr(options, key)} must be at least 1.")
    cfg = compose([f"model={options.model}", *options.overrides])
    tokenizer = models.load_tokenizer(cfg)
    params = {"top": options.top, "bos": options.bos}
    out = options.out or artefacts.default_path(
        Artefact("bigram_table", "specbench.index.bigram_table:build_default", "", None, params),
        tokenizer=tokenizer,
        cache_dir=cfg.cache_dir,
    )
    bos_id = begin_token(tokenizer) if options.bos else None
    loaded = models.load_model(cfg, tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    with artefacts.shown_progress() as progress:
        table = build_table(
            loaded.model,
            top=options.top,
            bos_id=bos_id,
            unfinished=out,
            batch=options.batch,
            progress=progress,
        )
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        table.write(
            partial,
            tokenizer_hash=models.tokenizer_hash(tokenizer),
            header={
                "weights": digest(table.sample),
                "model": loaded.id,
                "revision": loaded.revision,
                "dtype": loaded.dtype,
            },
        )
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return out, artefacts.describe(out)


def main(argv: list[str] | None = None) -> int:
    start = time.perf_counter()
    try:
        path, facts = build(parse(argv))
    except SpecBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"{path}: next tokens of the model with weights {facts['header']['weights']} "
        f"({facts['bytes'] / 2**20:.1f} MiB, {time.perf_counter() - start:.1f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
