"""Build SAM-Decoding's static automaton for a model's tokenizer.

    python scripts/build_static_sam.py --model vicuna7b --outputs results/adhoc/ar-1a2b3c4d ...
    python scripts/build_static_sam.py --model vicuna7b --texts corpus/*.txt
    python scripts/build_static_sam.py --model smollm2_135m --documentation

--outputs takes run folders (or their cases.jsonl): every recorded prompt with the target's own
answer is a document, which is what the paper does. Measure on other prompts than these. --texts
takes UTF-8 files, whose documents are separated by blank lines; --documentation is what the
bundled default is made from. Without --out the automaton goes where runs look for it. Building
takes about 130 bytes of memory a token.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.artifacts import resolve
from specbench.artifacts.build import command, replacing
from specbench.artifacts.recorded_text import recorded_turns
from specbench.artifacts.static_automaton import build_default, build_from_ids, build_from_texts
from specbench.artifacts.text_files import file_texts
from specbench.config.compose import compose
from specbench.decoding.structs import Artifact
from specbench.models import loading

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a name in conf/model/")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--outputs", nargs="+", type=Path, help="run folders or cases.jsonl files")
    source.add_argument("--texts", nargs="+", type=Path, help="UTF-8 texts")
    source.add_argument("--documentation", action="store_true", help="installed documentation")
    parser.add_argument("--max-tokens", type=int, help="stop after about so many")
    parser.add_argument("--out", type=Path, help="default: where runs look for it")
    return parser.parse_args(argv)


def recorded_documents(paths: list[Path], tokenizer_hash: str) -> Iterator[np.ndarray]:
    """Prompt and answer of every turn; runs that share a turn give it once."""
    seen: set[bytes] = set()
    for path in paths:
        for prompt, answer in recorded_turns(path, tokenizer_hash):
            document = np.concatenate([prompt, answer])
            if document.tobytes() not in seen:
                seen.add(document.tobytes())
                yield document


def build(options: argparse.Namespace) -> Path:
    cfg = compose([f"model={options.model}"])
    tokenizer = loading.load_tokenizer(cfg)
    out: Path = options.out or resolve.default_path(
        Artifact("static_automaton", "specbench.artifacts.static_automaton:build_default", ""),
        tokenizer=tokenizer,
        cache_dir=cfg.cache_dir,
    )
    with replacing(out) as partial, resolve.shown_progress() as progress:
        if options.documentation:
            build_default(tokenizer, partial, progress)
        else:
            write(options, tokenizer, partial, progress)
    return out


def write(options: argparse.Namespace, tokenizer: Any, path: Path, progress: Any) -> None:
    tokenizer_hash = loading.tokenizer_hash(tokenizer)
    limits = {"max_tokens": options.max_tokens, "progress": progress}
    if options.outputs:
        documents = recorded_documents(options.outputs, tokenizer_hash)
        corpus = {"name": "outputs", "runs": [str(run) for run in options.outputs]}
        automaton, header = build_from_ids(documents, tokenizer, corpus=corpus, **limits)
    else:
        corpus = {"name": "texts", "files": [file.name for file in options.texts]}
        texts = file_texts(options.texts)
        automaton, header = build_from_texts(texts, tokenizer, corpus=corpus, **limits)
    automaton.write(path, tokenizer_hash=tokenizer_hash, header=header)


def what(header: Mapping[str, Any]) -> str:
    return (
        f"{header['n_states']:,} states, {header['n_edges']:,} transitions from "
        f"{header['n_tokens']:,} tokens in {header['n_documents']:,} documents of "
        f"{header['corpus']['name']}"
    )


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return command(lambda: build(options), what)


if __name__ == "__main__":
    sys.exit(main())
