"""Build a file that a method drafts from, for one model's tokenizer, in bounded memory.

    python scripts/build_artifact.py frozen_table --model vicuna7b        # 1 % of OpenWebText
    python scripts/build_artifact.py datastore --model vicuna7b           # UltraChat
    python scripts/build_artifact.py static_automaton --model vicuna7b --outputs results/RUN ...
    python scripts/build_artifact.py bigram_table --model mistral7b
    python scripts/build_artifact.py NAME --help                          # options and examples

Without --out the file goes where runs look for it. A build that is stopped leaves nothing.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.cli import add_command, parser_of, reporting_errors
from methods.cacheback import frozen_table
from methods.ngrammys import bigram_table
from methods.ngrammys.bigram_table import TOP, digest
from methods.rest import datastore
from methods.rest.datastore import CHUNK
from methods.sam import static_automaton
from specbench.artifacts import resolve
from specbench.artifacts.corpora import (
    HUB,
    Corpus,
    file_texts,
    hub_texts,
    recorded_documents,
    sample_documents,
    tokenized,
)
from specbench.artifacts.documentation import documentation
from specbench.config.compose import compose, to_config
from specbench.decoding.structs import Artifact
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.models.checkpoints import weights
from specbench.storage.jsonl import replacing

# The smallest values of options.
_AT_LEAST = {"chunk": 2, "max_tokens": 1, "store_tokens": 1, "top": 1, "batch": 1}
_SHAPE = {"leader_len": 1, "follower_len": 3, "leader_capacity": 2**20, "follower_capacity": 128}


class Build(NamedTuple):
    """One file to build: the command line, and what follows from it."""

    options: argparse.Namespace
    cfg: Any
    tokenizer: Any
    path: Path


class Kind(NamedTuple):
    about: str
    builder: ModuleType
    add_options: Callable[[argparse.ArgumentParser], None]
    build: Callable[[Build], None]  # writes Build.path
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


def _frozen_table(job: Build) -> None:
    options = job.options
    if not 0 < options.sample <= 1:
        raise ConfigurationError(f"--sample must be above 0 and at most 1, got {options.sample}.")
    shape = {key: getattr(options, key) for key in _SHAPE}
    sampling: dict[str, Any] = {}
    # Documentation is small, and tables of it share one tokenized copy of the whole.
    if options.corpus != "documentation":
        keep = options.sample if options.by == "window" else 1.0
        sampling = {"keep_windows": keep, "seed": options.seed}
    frozen_table.build(job.tokenizer, job.path, **shape, **sampling, corpus=_corpus(job))


_DATASTORE = """REST's datastore: a corpus with its suffix array.

    build_artifact.py datastore --model vicuna7b                       # UltraChat: the paper's
    build_artifact.py datastore --model vicuna7b --corpus sharegpt     # the authors' small store
    build_artifact.py datastore --model codellama7b --corpus stack_python
    build_artifact.py datastore --model smollm2_135m --corpus files --files notes/*.txt
    build_artifact.py datastore --model smollm2_135m --corpus outputs --cases results/RUN
    build_artifact.py datastore --model smollm2_135m --corpus documentation

It takes eight bytes for each token, and twelve more while it is being built (the
authors' UltraChat, at six bytes a token: 12 GB). A datastore made of earlier outputs (prompts and
answers of a run) makes the next run on the same questions look better than it is.
"""


def _datastore_options(parser: argparse.ArgumentParser) -> None:
    hub = ("ultrachat", "sharegpt", "stack_python")
    _add_corpus(parser, (*hub, "files", "outputs", "documentation"))
    add = parser.add_argument
    add("--chunk", type=int, default=CHUNK, help="tokens sorted at once; bounds the memory")
    add("--store-tokens", type=int, help="stop after about so many: for method.store_tokens")


def _datastore(job: Build) -> None:
    corpus = _corpus(job, job.options.store_tokens)
    datastore.build(job.tokenizer, job.path, corpus=corpus, chunk=job.options.chunk)


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
    _add_corpus(parser, ("outputs", "files", "documentation"))


def _static_automaton(job: Build) -> None:
    static_automaton.build(job.tokenizer, job.path, corpus=_corpus(job))


_BIGRAM_TABLE = """N-Grammys' table of a model's own n-grams, by running it on every token it knows.

    build_artifact.py bigram_table --model mistral7b
    build_artifact.py bigram_table --model vicuna7b --out v7.bin model.dtype=float16

Words at the end are overrides of the configuration, as for run.py.
"""


def _bigram_table_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--top", type=int, default=TOP, help="next tokens kept (default: %(default)s)")
    add("--bos", action="store_true", help="put the begin token before each token")
    add("--batch", type=int, default=256, help="tokens of a pass")
    add("overrides", nargs="*", help="e.g. model.dtype=float16")


def _bigram_table(job: Build) -> None:
    options = job.options
    loaded = loading.load_model(job.cfg, job.tokenizer)
    table = bigram_table.build_table(
        loaded.model,
        top=options.top,
        bos_id=bigram_table.begin_token(job.tokenizer) if options.bos else None,
        batch=options.batch,
    )
    header = {
        "weights": digest(table.sample),
        "builder_version": bigram_table.BUILDER_VERSION,
        "model": loaded.id,
        "revision": loaded.revision,
        "dtype": loaded.dtype,
    }
    sha = loading.tokenizer_hash(job.tokenizer)
    table.write(job.path, tokenizer_hash=sha, header=header)


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
    parser.set_defaults(corpora=corpora)
    add = parser.add_argument
    about = (
        "documentation: what the bundled default is made from (default: what --files or --cases "
        f"says, else {corpora[0]})"
    )
    add("--corpus", choices=corpora, help=about)
    short = "short for --corpus documentation"
    add("--documentation", dest="corpus", action="store_const", const="documentation", help=short)
    add("--files", "--texts", nargs="+", type=Path, default=[], help="UTF-8 texts")
    if "outputs" in corpora:
        about = "run folders or cases.jsonl files"
        add("--cases", "--outputs", nargs="+", type=Path, default=[], help=about)
    add("--revision", help="of the hub's data set")
    add("--max-tokens", type=int, help="stop after about so many")


def _corpus(job: Build, max_tokens: int | None = None) -> Corpus:
    options = job.options
    max_tokens = max_tokens or options.max_tokens
    if options.corpus == "documentation":
        return documentation(job.tokenizer, Path(job.cfg.cache_dir), max_tokens)
    facts: dict[str, Any] = {"name": options.corpus}
    if options.corpus == "outputs":
        facts["runs"] = [run.name for run in options.cases]
        turns = recorded_documents(options.cases, loading.tokenizer_hash(job.tokenizer))
        return Corpus(facts, turns, max_tokens)
    if options.corpus == "files":
        texts = file_texts(options.files)
        facts["files"] = [file.name for file in options.files]
    else:
        texts = hub_texts(options.corpus, options.revision)
        facts |= {"id": HUB[options.corpus].id, "revision": options.revision}
    if hasattr(options, "sample"):
        share = options.sample if options.by == "document" else 1.0
        texts = sample_documents(texts, share, options.seed)
        facts |= {"sample": options.sample, "by": options.by}
    return Corpus(facts, tokenized(texts, job.tokenizer), max_tokens)


def check(options: argparse.Namespace) -> None:
    for key, least in (_AT_LEAST | dict.fromkeys(_SHAPE, 1)).items():
        value = getattr(options, key, None)
        if value is not None and value < least:
            option = key.replace("_", "-")
            raise ConfigurationError(f"--{option} must be at least {least}, got {value}.")
    if not hasattr(options, "corpora"):
        return
    given = {"files": bool(options.files), "outputs": bool(getattr(options, "cases", []))}
    if options.corpus is None:
        named = [name for name, there in given.items() if there]
        options.corpus = named[0] if named else options.corpora[0]
    for (name, there), key in zip(given.items(), ("files", "cases"), strict=True):
        if (options.corpus == name) != there:
            raise ConfigurationError(f"--corpus {name} and --{key} belong together.")


def build(options: argparse.Namespace) -> Path:
    check(options)
    kind = KINDS[options.name]
    model = [f"model={options.model}"]
    if Path(options.model).is_dir():
        model = ["model=local", f"model.path='{options.model}'"]
    cfg = to_config(compose([*model, *getattr(options, "overrides", ())]))
    tokenizer = loading.load_tokenizer(cfg)
    artifact = Artifact(
        options.name,
        f"{kind.builder.__name__}:build",
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
    with resolve.build_lock(out), replacing(out) as partial:
        kind.build(Build(options, cfg, tokenizer, partial))
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
    size = f"{facts['bytes'] / 2**20:.1f} MiB"
    print(f"{path}: {contents} ({size}, {taken})")
    return 0


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        return reporting_errors(lambda: build_and_say(options))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
