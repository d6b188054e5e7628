"""Names that went before 1.0, and what to type instead: one table, deleted at 1.0.

Whoever removes a key, a value, a verb, an option or a make target adds a row; the command that an
option went from says its name to `parser_of`. Nothing heavy is imported: ``make`` asks this file
with the system's own Python, which may have no environment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from specbench.errors import ConfigurationError


class Removed(NamedTuple):
    """A name that is answered with what to type instead.

    Attributes:
        kind: ``key`` of a configuration, with ``=VALUE`` where only that value or option of a
            group went; ``command``, the words that begin a command line or an option with its
            value (``run.py VERB``, ``analysis.tables --OPTION``); ``module``, as ``python -m`` has
            it; or ``target`` of make.
        name: what was typed.
        instead: the end of the sentence "NAME is gone: …", without its full stop.
    """

    kind: str
    name: str
    instead: str

    def __str__(self) -> str:
        shown = {"target": "make ", "module": "python -m "}.get(self.kind, "") + self.name
        return f"{shown} is gone: {self.instead}."


REMOVED = (
    Removed(
        "key",
        "pair.tuned",
        "it is called budgets now, one key for all labels; type budgets=published where it was "
        "false, and leave it out where it was true",
    ),
    Removed(
        "key",
        "record=true",
        "every greedy run can be replayed without it; leave it out, or type record=states to "
        "replay trained heads",
    ),
    Removed(
        "key",
        "pair.draft.vocabulary=text",
        "type pair.draft.vocabulary=intersection, which drafts the tokens that both tokenizers "
        "have (method=sps, opt_tree, card, pearl)",
    ),
    Removed(
        "key",
        "measure.disturbed.slowdown",
        "only counters disturb a case; leave it out (measure.disturbed.steal and .others stay)",
    ),
    Removed(
        "key",
        "engine.weights=bfloat16",
        "type engine.weights=stored for the bundled model's own blocks, or model.dtype=bfloat16",
    ),
    Removed(
        "key",
        "engine.packed.one_call",
        "packed models always run in one call; type engine.packed.enabled=false for "
        "transformers' layers",
    ),
    Removed("module", "scripts.draft_model.train", "type python -m scripts.training draft"),
    Removed("module", "scripts.draft_model.train_heads", "type python -m scripts.training heads"),
    Removed(
        "module",
        "scripts.verifier_conformance",
        "type pytest tests/decoding/test_enumerated_law.py",
    ),
    Removed(
        "module",
        "scripts.training.gguf_file",
        "llama.cpp drafts with a GGUF file of the model's own vocabulary; name one in "
        "server.draft_gguf",
    ),
    Removed("module", "scripts.gpu_check", "type make gpu-check"),
    Removed(
        "module",
        "analysis.rivals",
        "python -m analysis.tables RUN --pairs compares each method with the best of the others",
    ),
    Removed(
        "module",
        "analysis.export",
        "python scripts/spec_bench.py export RUN OUT writes Spec-Bench's files; for AIPerf's "
        "records and speculation profiles read steps.parquet, which has every step",
    ),
    Removed(
        "command",
        "scripts.bench predicted_pairs",
        "type python -m analysis.residuals LIVE REPLAY --keep, which states the error of a "
        "surface's predictions",
    ),
    Removed(
        "target",
        "check-verifiers",
        "it is a test now: python -m pytest tests/decoding/test_enumerated_law.py; verifiers of "
        "other programs are no longer checked",
    ),
    Removed(
        "target",
        "bench-engine",
        "type python -m scripts.bench passes, or python -m scripts.bench steps for the host's work",
    ),
    Removed("target", "bench-drafters", "type python run.py measure=phases 'compare=[...]'"),
    Removed("target", "bench-kernels", "type python -m scripts.bench gpu kernels on a GPU"),
    Removed("command", "scripts.bench engine", "type python -m scripts.bench passes or steps"),
    Removed("command", "scripts.bench drafters", "type python run.py measure=phases"),
    Removed("command", "scripts.bench undrafted", "type python -m scripts.bench steps"),
    Removed("command", "scripts.bench kernels", "type python -m scripts.bench gpu kernels"),
    Removed("command", "scripts.bench gpu products", "type python -m scripts.bench gpu kernels"),
    Removed("command", "scripts.bench start", "type time python run.py dataset.limit=1"),
    Removed("command", "scripts.spec_bench --flag", "take the refused question out of its file"),
    Removed("module", "scripts.weight_pieces", "type split -b 40M FILE PIECE- and cat PIECE-*"),
    Removed("command", "scripts.gpu_visit --archive", "type --out FOLDER, which has all results"),
    Removed("command", "scripts.gpu_visit --weights", "join pieces with cat PIECE-* > FILE"),
    Removed("command", "scripts.gpu_visit --quick", "type --visit 1 --seconds 560"),
    Removed("command", "scripts.gpu_visit --minutes", "type --seconds with sixty times as many"),
    Removed("command", "scripts.gpu_visit --only", "type --visit 1 or 2; what is done is skipped"),
    Removed("command", "scripts.gpu_visit --dry-run", "docs/gpu.md lists the parts"),
    Removed("command", "scripts.gpu_visit --models", "type python run.py runner=cost model=NAME"),
    Removed(
        "target",
        "gpu-lines",
        "type make test, which runs what a GPU runs on a pretended one, or make gpu-check on a GPU",
    ),
    Removed(
        "target",
        "gpu-steps",
        "make test refuses a second wait in a step; a profiler counts launches, in make gpu-check",
    ),
    *(
        Removed("command", f"scripts.training --{name}", "type --scale X, times as many texts")
        for name in ("groups", "asked", "read", "visits", "epochs")
    ),
    *(
        Removed(
            "command",
            f"scripts.training --{name}",
            "name a head instead (python -m scripts.training eagle), again where it was stopped",
        )
        for name in ("stage", "only", "minutes")
    ),
    Removed("command", "scripts.training --data", "leave it out; installed documentation is read"),
    Removed(
        "command", "scripts.training --evaluate", "type python run.py method=sps, which says MAT"
    ),
    *(
        Removed("command", f"analysis.figures {option}", why)
        for option, why in (
            ("--width", "every figure is 7.2 inches wide; the PDF scales"),
            ("--caption", "every figure has its title and caption; leave it out"),
        )
    ),
    Removed("command", "analysis.tables --tasks", "type --wide, or --csv with a row for each task"),
    Removed("command", "analysis.residuals --json", "leave it out; the numbers are printed"),
    Removed("command", "analysis.tables --columns", "type --csv, which has every column"),
    Removed(
        "command",
        "analysis.report --estimator",
        "type python -m analysis.tables RUNS --estimator NAME, or estimator=NAME with a run",
    ),
    Removed(
        "command",
        "analysis.dashboards --output",
        "W&B has the workspace and the report; type --push to save them there",
    ),
    Removed(
        "command",
        "analysis.dashboards -o",
        "W&B has the workspace and the report; type --push to save them there",
    ),
)


def removed_key(key: str, value: object = None) -> ConfigurationError | None:
    """The error for a key, or a key's value, that went; None where it did not."""
    typed = str(value).lower() if isinstance(value, bool) else value
    for row in REMOVED:
        if row.kind == "key" and row.name in (key, f"{key}={typed}"):
            return ConfigurationError(str(row))
    return None


def refuse_words(command: str, arguments: Sequence[str]) -> None:
    """Refuse a verb or an option that ``command`` (``run.py``, ``analysis.tables``) had.

    Raises:
        ConfigurationError: one of the arguments went, which says what to type.
    """
    words = [word for text in arguments for word in _words(text)]
    for row in REMOVED:
        name, *gone = row.name.split()
        if row.kind == "command" and name == command and _holds(words, gone):
            raise ConfigurationError(str(row))


def refuse_module(arguments: Sequence[str]) -> None:
    """End ``python -m MODULE`` of a module that went, with exit code 2; for its package to call.

    ``arguments``: as the interpreter got them.
    """
    for row in REMOVED:
        if row.kind == "module" and row.name in arguments:
            sys.stderr.write(f"error: {row}\n")
            sys.exit(2)


def refuse_overrides(arguments: Sequence[str]) -> None:
    """Refuse a key or a value among overrides as they are typed (``+a.b=c``, ``~a``, ``a=b``).

    Raises:
        ConfigurationError: one of them went, which says what to type.
    """
    for text in arguments:
        key, _, value = text.lstrip("+~").partition("=")
        if key == "hydra.sweep.subdir":
            raise ConfigurationError(
                f"`{key}` must be left out: a job's folder is output_dir/<label>-<key>; type "
                "output_dir=FOLDER for another one."
            )
        if error := removed_key(key, value):
            raise error


def _words(text: str) -> list[str]:
    return text.split("=", 1) if text.startswith("--") else [text]


def _holds(words: list[str], gone: list[str]) -> bool:
    """Whether ``gone`` stands in ``words``, a verb at their beginning."""
    places = range(len(words)) if gone[0].startswith("-") else range(1)
    return any(words[at : at + len(gone)] == gone for at in places)


def main(arguments: Sequence[str]) -> int:
    """``make TARGET``: say what to type instead of a target that is not there; returns 2."""
    target = arguments[-1]
    rows = [str(row) for row in REMOVED if (row.kind, row.name) == ("target", target)]
    sys.stderr.write(f"{rows[0] if rows else f'no target {target!r}: `make` lists them.'}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
