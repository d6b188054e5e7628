"""Build REST's datastore for a model's tokenizer, from a corpus, in bounded memory.

    python scripts/build_datastore.py --model vicuna7b                       # ShareGPT
    python scripts/build_datastore.py --model vicuna7b --corpus ultrachat    # Spec-Bench's choice
    python scripts/build_datastore.py --model codellama7b --corpus stack_python
    python scripts/build_datastore.py --model smollm2_135m --corpus files --files notes/*.txt
    python scripts/build_datastore.py --model smollm2_135m --corpus outputs --cases results/RUN
    python scripts/build_datastore.py --model smollm2_135m --corpus documentation

Without --out the datastore goes where runs look for it. It takes eight bytes for each token, and as
much again beside it while it is being built. A datastore made of earlier outputs (prompts and
answers of a run) makes the next run on the same questions look better than it is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.artifacts import resolve
from specbench.artifacts.build import command, replacing
from specbench.artifacts.datastore import build_datastore, build_default, encode_texts
from specbench.artifacts.hub_corpora import HUB, hub_texts
from specbench.artifacts.recorded_text import recorded_turns
from specbench.artifacts.text_files import file_texts
from specbench.config.compose import compose
from specbench.decoding.structs import Artifact
from specbench.errors import ConfigurationError
from specbench.index.suffix import datastore
from specbench.models import loading

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a name in conf/model/")
    parser.add_argument(
        "--corpus",
        choices=("sharegpt", "ultrachat", "stack_python", "files", "outputs", "documentation"),
        default="sharegpt",
        help="documentation: what the bundled default is made from (default: %(default)s)",
    )
    parser.add_argument("--revision", help="of the hub's data set")
    parser.add_argument("--files", nargs="+", type=Path, default=[], help="UTF-8 texts")
    parser.add_argument("--cases", nargs="+", type=Path, default=[], help="run folders")
    parser.add_argument("--max-tokens", type=int, help="stop after about so many")
    parser.add_argument(
        "--chunk",
        type=int,
        default=datastore.CHUNK,
        help="tokens sorted at once; bounds the memory (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="default: where runs look for it")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    if options.chunk < 2:
        raise ConfigurationError(f"--chunk {options.chunk} must be at least 2.")
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ConfigurationError(f"--max-tokens {options.max_tokens} must be at least 1.")
    for corpus, key in (("files", "files"), ("outputs", "cases")):
        if (options.corpus == corpus) != bool(getattr(options, key)):
            raise ConfigurationError(f"--corpus {corpus} and --{key} belong together.")


def outputs(folders: list[Path], tokenizer_hash: str) -> Iterator[Any]:
    """Prompt and answer of every turn of some runs, each turn one document."""
    for folder in folders:
        for prompt, answer in recorded_turns(folder, tokenizer_hash):
            yield np.concatenate((prompt, answer))


def documents(
    options: argparse.Namespace, tokenizer: Any, tokenizer_hash: str
) -> tuple[Iterator[Any], dict[str, Any]]:
    """Token ids of the corpus, and what the header says about it."""
    facts: dict[str, Any] = {"name": options.corpus}
    if options.corpus == "outputs":
        facts["runs"] = [folder.name for folder in options.cases]
        return outputs(options.cases, tokenizer_hash), facts
    if options.corpus == "files":
        facts["files"] = [file.name for file in options.files]
        texts = file_texts(options.files)
    else:
        facts |= {"id": HUB[options.corpus].id, "revision": options.revision}
        texts = hub_texts(options.corpus, options.revision)
    return encode_texts(texts, tokenizer), facts


def build(options: argparse.Namespace) -> Path:
    check(options)
    cfg = compose([f"model={options.model}"])
    tokenizer = loading.load_tokenizer(cfg)
    tokenizer_hash = loading.tokenizer_hash(tokenizer)
    out: Path = options.out or resolve.default_path(
        Artifact("datastore", "specbench.artifacts.datastore:build_default", ""),
        tokenizer=tokenizer,
        cache_dir=cfg.cache_dir,
    )
    with replacing(out) as partial, resolve.shown_progress() as progress:
        if options.corpus == "documentation":
            build_default(tokenizer, partial, progress)
        else:
            ids, corpus = documents(options, tokenizer, tokenizer_hash)
            build_datastore(
                ids,
                partial,
                tokenizer_hash=tokenizer_hash,
                corpus=corpus,
                vocab_size=len(tokenizer),
                chunk=options.chunk,
                max_tokens=options.max_tokens,
                progress=progress,
            )
    return out


def what(header: Mapping[str, Any]) -> str:
    return (
        f"{header['n_tokens']:,} tokens in {header['n_documents']:,} documents of "
        f"{header['corpus']['name']}"
    )


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return command(lambda: build(options), what)


if __name__ == "__main__":
    sys.exit(main())
