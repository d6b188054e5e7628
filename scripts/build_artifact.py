"""Build a file that a method drafts from, for one model's tokenizer, in bounded memory.

    python scripts/build_artifact.py frozen_table --model vicuna7b        # 1 % of OpenWebText
    python scripts/build_artifact.py datastore --model vicuna7b           # UltraChat
    python scripts/build_artifact.py static_automaton --model vicuna7b --outputs results/RUN ...
    python scripts/build_artifact.py bigram_table --model mistral7b
    python scripts/build_artifact.py NAME --help                          # options and examples

Without --out the file goes where runs look for it.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from analysis.runs.command import add_command, parser_of, reporting_errors
from methods.cacheback import builder as frozen_table
from methods.ngrammys import builder as bigram_table
from methods.ngrammys.bigram_table import TOP, digest
from methods.rest import builder as datastore
from methods.rest.datastore import CHUNK
from methods.sam import builder as static_automaton
from specbench.artifacts import resolve
from specbench.artifacts.corpora import HUB, documentation, file_texts, hub_texts
from specbench.artifacts.recorded_text import recorded_turns
from specbench.config.compose import compose, typed
from specbench.decoding.structs import Artifact
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.models.checkpoints import weights
from specbench.storage import jsonl

# Linux counts in KiB, macOS in bytes.
_MEMORY_UNIT = 1 if sys.platform == "darwin" else 1024
# The smallest values of options.
_AT_LEAST = {"chunk": 2, "max_tokens": 1, "store_tokens": 1, "top": 1, "batch": 1}
_SHAPE = {"leader_len": 1, "follower_len": 3, "leader_capacity": 2**20, "follower_capacity": 128}


class Job(NamedTuple):
    """One file to build: the command line, and what follows from it."""

    options: argparse.Namespace
    cfg: Any
    tokenizer: Any
    out: Path
    partial: Path  # takes the place of ``out`` when it is whole
    progress: Callable[[str, int, int], None]

    @property
    def tokenizer_hash(self) -> str:
        return loading.tokenizer_hash(self.tokenizer)


class Kind(NamedTuple):
    about: str
    builder: ModuleType
    add_options: Callable[[argparse.ArgumentParser], None]
    build: Callable[[Job], None]  # writes Job.partial
    contents: str  # what is in the file, a format of its header
    params: tuple[str, ...] = ()  # options that the default place depends on
    per_model: bool = False  # belongs to weights, not to a tokenizer


_FROZEN_TABLE = """Cacheback's frozen table: the most frequent followers of each leader in a corpus.

    build_artifact.py frozen_table --model vicuna7b                  # 1 % of OpenWebText
    build_artifact.py frozen_table --model vicuna7b --by window      # the authors' sampling
    build_artifact.py frozen_table --model vicuna7b --corpus alpaca --sample 1
    build_artifact.py frozen_table --model smollm2_135m --corpus files --files notes/*.txt
    build_artifact.py frozen_table --model smollm2_135m --corpus documentation

OpenWebText is streamed whole even for a small sample (some 13 GB); --max-tokens stops early, and is
then a sample of its first part. Alpaca may only be used non-commercially: keep a table made from it
to yourself.
"""


def _frozen_table_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_corpus(parser, ("openwebtext", "alpaca", "files", "documentation"))
    add("--sample", type=float, default=0.01, help="share of the corpus (default: %(default)s)")
    by = "what is sampled; by window everything is tokenized (default: %(default)s)"
    add("--by", choices=("document", "window"), default="document", help=by)
    add("--seed", type=int, default=0)
    for key, value in _SHAPE.items():
        add(f"--{key.replace('_', '-')}", type=int, default=value, help="default: %(default)s")


def _frozen_table(job: Job) -> None:
    options = job.options
    if not 0 < options.sample <= 1:
        raise ConfigurationError(f"--sample must be above 0 and at most 1, got {options.sample}.")
    shape = {key: getattr(options, key) for key in _SHAPE}
    if options.corpus == "documentation":
        cache = Path(job.cfg.cache_dir)
        frozen_table.build_default(
            job.tokenizer, job.partial, job.progress, **shape, cache_dir=cache
        )
        return
    texts, facts = _texts(job)
    by_document = options.by == "document"
    table, header = frozen_table.build_from_texts(
        frozen_table.sample_documents(texts, options.sample if by_document else 1.0, options.seed),
        job.tokenizer,
        **shape,
        corpus={**facts, "sample": options.sample, "by": options.by},
        keep_windows=1.0 if by_document else options.sample,
        max_tokens=options.max_tokens,
        seed=options.seed,
        progress=job.progress,
    )
    table.write(job.partial, tokenizer_hash=job.tokenizer_hash, header=header)


_DATASTORE = """REST's datastore: a corpus with its suffix array.

    build_artifact.py datastore --model vicuna7b                       # UltraChat: the paper's
    build_artifact.py datastore --model vicuna7b --corpus sharegpt     # the authors' small store
    build_artifact.py datastore --model codellama7b --corpus stack_python
    build_artifact.py datastore --model smollm2_135m --corpus files --files notes/*.txt
    build_artifact.py datastore --model smollm2_135m --corpus outputs --cases results/RUN
    build_artifact.py datastore --model smollm2_135m --corpus documentation

It takes eight bytes for each token, and as much again beside it while it is being built (the
authors' UltraChat, at six bytes a token: 12 GB). A
datastore made of earlier outputs (prompts and answers of a run) makes the next run on the same
questions look better than it is.
"""


def _datastore_options(parser: argparse.ArgumentParser) -> None:
    hub = ("ultrachat", "sharegpt", "stack_python")
    _add_corpus(parser, (*hub, "files", "outputs", "documentation"))
    add = parser.add_argument
    add("--cases", nargs="+", type=Path, default=[], help="run folders")
    add("--chunk", type=int, default=CHUNK, help="tokens sorted at once; bounds the memory")
    add("--store-tokens", type=int, help="stop after about so many: for method.store_tokens")


def _datastore(job: Job) -> None:
    options = job.options
    if (options.corpus == "outputs") != bool(options.cases):
        raise ConfigurationError("--corpus outputs and --cases belong together.")
    if options.corpus == "outputs":
        ids: Any = _recorded_documents(options.cases, job.tokenizer_hash)
        facts = {"name": "outputs", "runs": [folder.name for folder in options.cases]}
    else:
        texts, facts = _texts(job)
        ids = datastore.encode_texts(texts, job.tokenizer)
    datastore.build_datastore(
        ids,
        job.partial,
        tokenizer_hash=job.tokenizer_hash,
        corpus=facts,
        vocab_size=len(job.tokenizer),
        chunk=options.chunk,
        max_tokens=options.store_tokens or options.max_tokens,
        progress=job.progress,
    )


_STATIC_AUTOMATON = """SAM-Decoding's static suffix automaton.

    build_artifact.py static_automaton --model vicuna7b --outputs results/adhoc/ar-1a2b3c4d ...
    build_artifact.py static_automaton --model vicuna7b --texts corpus/*.txt
    build_artifact.py static_automaton --model smollm2_135m --documentation

--outputs takes run folders (or their cases.jsonl): every recorded prompt with the target's own
answer is a document, which is what the paper does. Measure on other prompts than these. --texts
takes UTF-8 files, whose documents are separated by blank lines; --documentation is what the
bundled default is made from. Building takes about 130 bytes of memory a token.
"""


def _static_automaton_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--outputs", nargs="+", type=Path, help="run folders or cases.jsonl files")
    source.add_argument("--texts", nargs="+", type=Path, help="UTF-8 texts")
    source.add_argument("--documentation", action="store_true", help="installed documentation")
    parser.add_argument("--max-tokens", type=int, help="stop after about so many")


def _static_automaton(job: Job) -> None:
    options = job.options
    build: Any = static_automaton.build_from_texts
    documents: Iterator[Any]
    if options.documentation:
        documents, corpus = documentation(job.progress)
    elif options.texts:
        documents = file_texts(options.texts)
        corpus = {"name": "texts", "files": [file.name for file in options.texts]}
    else:
        build = static_automaton.build_from_ids
        documents = _once(_recorded_documents(options.outputs, job.tokenizer_hash))
        corpus = {"name": "outputs", "runs": [str(run) for run in options.outputs]}
    limits = {"max_tokens": options.max_tokens, "progress": job.progress}
    automaton, header = build(documents, job.tokenizer, corpus=corpus, **limits)
    automaton.write(job.partial, tokenizer_hash=job.tokenizer_hash, header=header)


_BIGRAM_TABLE = """N-Grammys' table of a model's own n-grams, by running it on every token it knows.

    build_artifact.py bigram_table --model mistral7b
    build_artifact.py bigram_table --model vicuna7b --out v7.bin model.dtype=float16

A killed build goes on where it was. Words at the end are overrides of the configuration, as for
run.py.
"""


def _bigram_table_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--top", type=int, default=TOP, help="next tokens kept (default: %(default)s)")
    add("--bos", action="store_true", help="put the begin token before each token")
    add("--batch", type=int, default=256, help="tokens of a pass")
    add("overrides", nargs="*", help="e.g. model.dtype=float16")


def _bigram_table(job: Job) -> None:
    options = job.options
    loaded = loading.load_model(job.cfg, job.tokenizer)
    table = bigram_table.build_table(
        loaded.model,
        top=options.top,
        bos_id=bigram_table.begin_token(job.tokenizer) if options.bos else None,
        unfinished=job.out,
        batch=options.batch,
        progress=job.progress,
    )
    header = {
        "weights": digest(table.sample),
        "builder_version": bigram_table.BUILDER_VERSION,
        "model": loaded.id,
        "revision": loaded.revision,
        "dtype": loaded.dtype,
    }
    table.write(job.partial, tokenizer_hash=job.tokenizer_hash, header=header)


_TOKENS = "{n_tokens:,} tokens in {n_documents:,} documents of {corpus[name]}"
KINDS = {
    "frozen_table": Kind(
        _FROZEN_TABLE,
        frozen_table,
        _frozen_table_options,
        _frozen_table,
        "{n_leaders:,} leaders, {n_followers:,} followers from {n_tokens:,} tokens of "
        "{corpus[name]}",
        params=tuple(_SHAPE),
    ),
    "datastore": Kind(
        _DATASTORE, datastore, _datastore_options, _datastore, _TOKENS, params=("store_tokens",)
    ),
    "static_automaton": Kind(
        _STATIC_AUTOMATON,
        static_automaton,
        _static_automaton_options,
        _static_automaton,
        "{n_states:,} states, {n_edges:,} transitions from " + _TOKENS,
    ),
    "bigram_table": Kind(
        _BIGRAM_TABLE,
        bigram_table,
        _bigram_table_options,
        _bigram_table,
        "next tokens of the model with weights {weights}",
        params=("top", "bos"),
        per_model=True,
    ),
}


def _add_corpus(parser: argparse.ArgumentParser, corpora: tuple[str, ...]) -> None:
    add = parser.add_argument
    about = "documentation: what the bundled default is made from (default: %(default)s)"
    add("--corpus", choices=corpora, default=corpora[0], help=about)
    add("--files", nargs="+", type=Path, default=[], help="UTF-8 texts")
    add("--revision", help="of the hub's data set")
    add("--max-tokens", type=int, help="stop after about so many")


def _texts(job: Job) -> tuple[Iterator[str], dict[str, Any]]:
    """Documents of the corpus, and what the header says about it."""
    options = job.options
    if options.corpus == "documentation":
        return documentation(job.progress)
    if options.corpus == "files":
        files = [file.name for file in options.files]
        return file_texts(options.files), {"name": "files", "files": files}
    facts = {"name": options.corpus, "id": HUB[options.corpus].id, "revision": options.revision}
    return hub_texts(options.corpus, options.revision), facts


def _recorded_documents(paths: list[Path], tokenizer_hash: str) -> Iterator[np.ndarray]:
    """Prompt and answer of every turn of some runs, each turn one document."""
    for path in paths:
        for prompt, answer in recorded_turns(path, tokenizer_hash):
            yield np.concatenate((prompt, answer))


def _once(documents: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Runs that share a turn give it once: what was measured more often is not more frequent."""
    seen: set[bytes] = set()
    for document in documents:
        if document.tobytes() not in seen:
            seen.add(document.tobytes())
            yield document


def check(options: argparse.Namespace) -> None:
    for key, least in (_AT_LEAST | dict.fromkeys(_SHAPE, 1)).items():
        value = getattr(options, key, None)
        if value is not None and value < least:
            option = key.replace("_", "-")
            raise ConfigurationError(f"--{option} must be at least {least}, got {value}.")
    if hasattr(options, "corpus") and (options.corpus == "files") != bool(options.files):
        raise ConfigurationError("--corpus files and --files belong together.")


def build(options: argparse.Namespace) -> Path:
    check(options)
    kind = KINDS[options.name]
    own = Path(options.model).is_dir()
    model = ["model=local", f"model.path='{options.model}'"] if own else [f"model={options.model}"]
    cfg = typed(compose([*model, *getattr(options, "overrides", ())]))
    tokenizer = loading.load_tokenizer(cfg)
    artifact = Artifact(
        options.name,
        f"{kind.builder.__name__}:build_default",
        "",
        params={key: value for key in kind.params if (value := getattr(options, key)) is not None},
        per_model=kind.per_model,
    )
    out: Path = options.out or resolve.default_path(
        artifact,
        tokenizer=tokenizer,
        cache_dir=cfg.cache_dir,
        model_key=weights.model_key(cfg) if kind.per_model else None,
    )
    with jsonl.replacing(out) as partial, resolve.shown_progress() as progress:
        kind.build(Job(options, cfg, tokenizer, out, partial, progress))
    return out


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, kind in KINDS.items():
        command = add_command(commands, name, kind.about)
        command.add_argument("--model", required=True, help="a name in conf/model/, or a folder")
        command.add_argument("--out", type=Path, help="default: where runs look for it")
        kind.add_options(command)
    return parser.parse_args(argv)


def build_and_say(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    path = build(options)
    facts = resolve.describe(path)
    contents = KINDS[options.name].contents.format_map(facts["header"])
    taken = f"{time.perf_counter() - start:.1f} s"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MEMORY_UNIT / 2**30
    size = f"{facts['bytes'] / 2**20:.1f} MiB"
    print(f"{path}: {contents} ({size}, {taken}, peak memory {peak:.2f} GiB)")
    return 0


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return reporting_errors(lambda: build_and_say(options))


if __name__ == "__main__":
    sys.exit(main())
