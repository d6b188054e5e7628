"""Build N-Grammys' table of a model's own n-grams, by running it on every token of its vocabulary.

    python scripts/build_bigram_table.py --model mistral7b
    python scripts/build_bigram_table.py --model vicuna7b --out v7.bin model.dtype=float16

Without --out the table goes where runs of these weights look for it. A killed build goes on where
it was. Words at the end are overrides of the configuration, as for run.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.artifacts import resolve
from specbench.artifacts.bigram_table import BUILDER_VERSION, begin_token, build_table
from specbench.artifacts.build import command, replacing
from specbench.config.compose import compose
from specbench.decoding.structs import Artifact
from specbench.errors import ConfigurationError
from specbench.index.ngram.bigram_table import TOP, digest
from specbench.models import loading, weights

if TYPE_CHECKING:
    from collections.abc import Mapping


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


def build(options: argparse.Namespace) -> Path:
    for key in ("top", "batch"):
        if getattr(options, key) < 1:
            raise ConfigurationError(f"--{key} {getattr(options, key)} must be at least 1.")
    cfg = compose([f"model={options.model}", *options.overrides])
    tokenizer = loading.load_tokenizer(cfg)
    params = {"top": options.top, "bos": options.bos}
    builder = "specbench.artifacts.bigram_table:build_default"
    out: Path = options.out or resolve.default_path(
        Artifact("bigram_table", builder, "", None, params, per_model=True),
        tokenizer=tokenizer,
        cache_dir=cfg.cache_dir,
        model_key=weights.identity(cfg),
    )
    bos_id = begin_token(tokenizer) if options.bos else None
    loaded = loading.load_model(cfg, tokenizer)
    with replacing(out) as partial:
        with resolve.shown_progress() as progress:
            table = build_table(
                loaded.model,
                top=options.top,
                bos_id=bos_id,
                unfinished=out,
                batch=options.batch,
                progress=progress,
            )
        table.write(
            partial,
            tokenizer_hash=loading.tokenizer_hash(tokenizer),
            header={
                "weights": digest(table.sample),
                "builder_version": BUILDER_VERSION,
                "model": loaded.id,
                "revision": loaded.revision,
                "dtype": loaded.dtype,
            },
        )
    return out


def what(header: Mapping[str, Any]) -> str:
    return f"next tokens of the model with weights {header['weights']}"


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return command(lambda: build(options), what)


if __name__ == "__main__":
    sys.exit(main())
