"""Names removed before 1.0, and what to type instead: one table, deleted at 1.0.

Whoever removes a key, a value, a verb, an option or a make target adds a row; the command that
lost an option passes its name to `parser_of`. Nothing heavy is imported: ``make`` asks this file
with the system's own Python, which may have no environment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from specbench.errors import ConfigurationError


class Removed(NamedTuple):
    """A removed name, answered by "NAME is gone: INSTEAD.".

    Attributes:
        kind: ``key`` of a configuration, with ``=VALUE`` if only that value was removed; ``module``
            of ``python -m``; ``target`` of make; or ``command``: the words that begin a
            command line, or an option with its value (``analysis.tables --OPTION``).
    """

    kind: str
    name: str
    instead: str

    def __str__(self) -> str:
        full_name = {"target": "make ", "module": "python -m "}.get(self.kind, "") + self.name
        return f"{full_name} is gone: {self.instead}."


_KEYS = {
    "pair.tuned": "type budgets=published where it was false, and leave it out where it was true",
    "record=true": "every greedy run can be replayed without it; for trained heads record=states",
    "pair.draft.vocabulary=text": "type pair.draft.vocabulary=intersection",
    "measure.disturbed.slowdown": "only counters disturb a case; leave it out",
    "engine.weights=bfloat16": "type engine.weights=stored, or model.dtype=bfloat16",
    "engine.packed.one_call": "type engine.packed.enabled=false for transformers' layers",
}
_MODULES = {
    "scripts.draft_model.train": "type python -m scripts.training draft",
    "scripts.draft_model.train_heads": "type python -m scripts.training heads",
    "scripts.verifier_conformance": "type pytest tests/decoding/test_enumerated_law.py",
    "scripts.training.gguf_file": "name a GGUF file of the model's vocabulary in server.draft_gguf",
    "scripts.gpu_check": "type make gpu-check",
    "analysis.rivals": "type python -m analysis.tables RUN --pairs",
    "analysis.export": "type python scripts/spec_bench.py export RUN OUT, or read steps.parquet",
    "scripts.weight_pieces": "type split -b 40M FILE PIECE- and cat PIECE-*",
}
_TARGETS = {
    "check-verifiers": "type python -m pytest tests/decoding/test_enumerated_law.py",
    "bench-engine": "type python -m scripts.bench passes, or steps for the host's work",
    "bench-drafters": "type python run.py measure=phases 'compare=[...]'",
    "bench-kernels": "type python -m scripts.bench gpu kernels on a GPU",
    "gpu-lines": "type make test, or make gpu-check on a GPU",
    "gpu-steps": "type make test, or make gpu-check, where a profiler counts launches",
}
_HEAD = "name a head instead (python -m scripts.training eagle), again where it was stopped"
_COMMANDS = {
    "scripts.bench predicted_pairs": "type python -m analysis.residuals LIVE REPLAY --keep",
    "scripts.bench engine": "type python -m scripts.bench passes or steps",
    "scripts.bench drafters": "type python run.py measure=phases",
    "scripts.bench undrafted": "type python -m scripts.bench steps",
    "scripts.bench kernels": "type python -m scripts.bench gpu kernels",
    "scripts.bench gpu products": "type python -m scripts.bench gpu kernels",
    "scripts.bench start": "type time python run.py dataset.limit=1",
    "scripts.spec_bench --flag": "take the refused question out of its file",
    "scripts.gpu_visit --archive": "type --out FOLDER, which has all results",
    "scripts.gpu_visit --weights": "join pieces with cat PIECE-* > FILE",
    "scripts.gpu_visit --quick": "type --visit 1 --seconds 560",
    "scripts.gpu_visit --minutes": "type --seconds with sixty times as many",
    "scripts.gpu_visit --only": "type --visit 1 or 2; what is done is skipped",
    "scripts.gpu_visit --dry-run": "docs/gpu.md lists the parts",
    "scripts.gpu_visit --models": "type python run.py runner=cost model=NAME",
    "scripts.training --groups": "type --scale X, times as many texts",
    "scripts.training --asked": "type --scale X, times as many texts",
    "scripts.training --read": "type --scale X, times as many texts",
    "scripts.training --visits": "type --scale X, times as many texts",
    "scripts.training --epochs": "type --scale X, times as many texts",
    "scripts.training --stage": _HEAD,
    "scripts.training --only": _HEAD,
    "scripts.training --minutes": _HEAD,
    "scripts.training --data": "leave it out; installed documentation is read",
    "scripts.training --evaluate": "type python run.py method=sps, which says MAT",
    "analysis.figures --width": "every figure is 7.2 inches wide; the PDF scales",
    "analysis.figures --caption": "every figure has its title and caption; leave it out",
    "analysis.tables --tasks": "type --wide, or --csv with a row for each task",
    "analysis.residuals --json": "leave it out; the numbers are printed",
    "analysis.tables --columns": "type --csv, which has every column",
    "analysis.report --estimator": "type python -m analysis.tables RUNS --estimator NAME",
    "analysis.dashboards --output": "type --push, which saves the workspace and report in W&B",
    "analysis.dashboards -o": "type --push, which saves the workspace and report in W&B",
}
REMOVED = tuple(
    Removed(kind, name, instead)
    for kind, rows in (
        ("key", _KEYS),
        ("module", _MODULES),
        ("target", _TARGETS),
        ("command", _COMMANDS),
    )
    for name, instead in rows.items()
)


def removed_key(key: str, value: object = None) -> ConfigurationError | None:
    """Return the error for a removed key, or value of a key; None where it was not removed."""
    typed = str(value).lower() if isinstance(value, bool) else value
    for row in REMOVED:
        if row.kind == "key" and row.name in (key, f"{key}={typed}"):
            return ConfigurationError(str(row))
    return None


def refuse_removed(command: str, arguments: Sequence[str]) -> None:
    """Refuse a verb or an option that ``command`` (``run.py``, ``analysis.tables``) had.

    Raises:
        ConfigurationError: an argument was removed; the message says what to type.
    """
    tokens = [t for text in arguments for t in (text.split("=", 1) if text[:2] == "--" else [text])]
    for row in REMOVED:
        name, *removed = row.name.split()
        if row.kind != "command" or name != command:
            continue
        starts = range(len(tokens)) if removed[0][0] == "-" else [0]  # a verb begins the line
        if any(tokens[start : start + len(removed)] == removed for start in starts):
            raise ConfigurationError(str(row))


def refuse_module(arguments: Sequence[str]) -> None:
    """End ``python -m MODULE`` of a removed module with exit code 2; its package calls this.

    ``arguments``: the interpreter's.
    """
    for row in REMOVED:
        if row.kind == "module" and row.name in arguments:
            sys.stderr.write(f"error: {row}\n")
            sys.exit(2)


def refuse_overrides(arguments: Sequence[str]) -> None:
    """Refuse a key or a value among overrides as they are typed (``+a.b=c``, ``~a``, ``a=b``).

    Raises:
        ConfigurationError: one was removed; the message says what to type.
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


def main(arguments: Sequence[str]) -> int:
    """Print what to type instead of a missing target of ``make TARGET``; return 2."""
    target = arguments[-1]
    rows = [str(row) for row in REMOVED if (row.kind, row.name) == ("target", target)]
    sys.stderr.write(f"{rows[0] if rows else f'no target {target!r}: `make` lists them.'}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
