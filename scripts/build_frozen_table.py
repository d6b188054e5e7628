"""Build Cacheback's frozen table for a model's tokenizer, from a corpus, in bounded memory.

    python scripts/build_frozen_table.py --model vicuna7b                  # 1 % of OpenWebText
    python scripts/build_frozen_table.py --model vicuna7b --by window      # the authors' sampling
    python scripts/build_frozen_table.py --model vicuna7b --corpus alpaca --sample 1
    python scripts/build_frozen_table.py --model smollm2_135m --corpus files --files notes/*.txt
    python scripts/build_frozen_table.py --model smollm2_135m --corpus documentation

Without --out the table goes where runs look for it. OpenWebText is streamed whole even for a small
sample (some 13 GB); --max-tokens stops early, and is then a sample of its first part. Alpaca may
only be used non-commercially: keep a table made from it to yourself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.artifacts import resolve
from specbench.artifacts.build import command, replacing
from specbench.artifacts.frozen_table import build_default, build_from_texts, sample_documents
from specbench.artifacts.hub_corpora import HUB, hub_texts
from specbench.artifacts.text_files import file_texts
from specbench.config.compose import compose
from specbench.decoding.structs import Artifact
from specbench.errors import ConfigurationError
from specbench.models import loading

if TYPE_CHECKING:
    from collections.abc import Mapping


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a name in conf/model/")
    parser.add_argument(
        "--corpus",
        choices=("openwebtext", "alpaca", "files", "documentation"),
        default="openwebtext",
        help="documentation: what the bundled default is made from (default: %(default)s)",
    )
    parser.add_argument("--files", nargs="+", type=Path, default=[], help="UTF-8 texts")
    parser.add_argument("--revision", help="of the hub's data set")
    parser.add_argument(
        "--sample", type=float, default=0.01, help="share of the corpus (default: %(default)s)"
    )
    parser.add_argument(
        "--by",
        choices=("document", "window"),
        default="document",
        help="what is sampled; by window everything is tokenised (default: %(default)s)",
    )
    parser.add_argument("--max-tokens", type=int, help="stop after about so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leader-len", type=int, default=1)
    parser.add_argument("--follower-len", type=int, default=3)
    parser.add_argument("--leader-capacity", type=int, default=2**20)
    parser.add_argument("--follower-capacity", type=int, default=128)
    parser.add_argument("--out", type=Path, help="default: where runs look for it")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    if not 0 < options.sample <= 1:
        raise ConfigurationError(f"--sample {options.sample} must be above 0 and at most 1.")
    for key in ("leader_len", "follower_len", "leader_capacity", "follower_capacity"):
        if getattr(options, key) < 1:
            raise ConfigurationError(f"--{key.replace('_', '-')} must be at least 1.")
    if (options.corpus == "files") != bool(options.files):
        raise ConfigurationError("--corpus files and --files belong together.")


def build(options: argparse.Namespace) -> Path:
    check(options)
    cfg = compose([f"model={options.model}"])
    tokenizer = loading.load_tokenizer(cfg)
    shape = {
        "leader_len": options.leader_len,
        "follower_len": options.follower_len,
        "leader_capacity": options.leader_capacity,
        "follower_capacity": options.follower_capacity,
    }
    out: Path = options.out or resolve.default_path(
        Artifact("frozen_table", "specbench.artifacts.frozen_table:build_default", "", None, shape),
        tokenizer=tokenizer,
        cache_dir=cfg.cache_dir,
    )
    with replacing(out) as partial, resolve.shown_progress() as progress:
        if options.corpus == "documentation":
            build_default(tokenizer, partial, progress, **shape)
        else:
            write(options, tokenizer, partial, shape, progress)
    return out


def write(
    options: argparse.Namespace, tokenizer: Any, path: Path, shape: dict[str, int], progress: Any
) -> None:
    corpus: dict[str, Any] = {"name": options.corpus, "sample": options.sample, "by": options.by}
    if options.corpus == "files":
        texts = file_texts(options.files)
        corpus["files"] = [file.name for file in options.files]
    else:
        texts = hub_texts(options.corpus, options.revision)
        corpus |= {"id": HUB[options.corpus].id, "revision": options.revision}
    by_document = options.by == "document"
    table, header = build_from_texts(
        sample_documents(texts, options.sample if by_document else 1.0, options.seed),
        tokenizer,
        **shape,
        corpus=corpus,
        keep_windows=1.0 if by_document else options.sample,
        max_tokens=options.max_tokens,
        seed=options.seed,
        progress=progress,
    )
    table.write(path, tokenizer_hash=loading.tokenizer_hash(tokenizer), header=header)


def what(header: Mapping[str, Any]) -> str:
    return (
        f"{header['n_leaders']:,} leaders, {header['n_followers']:,} followers from "
        f"{header['n_tokens']:,} tokens of {header['corpus']['name']}"
    )


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return command(lambda: build(options), what)


if __name__ == "__main__":
    sys.exit(main())
