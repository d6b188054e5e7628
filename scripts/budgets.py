"""Compare the lines of each room with ``budgets.toml``: ``python -m scripts.budgets [--lower]``.

A room is a folder of ``specbench/``, or one of the other packages; its tests lie in the folder of
``tests/`` with its name. source: lines of its Python, and of the tables that its code interprets
(yaml, jinja, json). code: of these Python lines the ones that are neither blank nor comment nor
docstring. tests: lines of its tests. Exit code 1: a number is above its budget.
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.cli import parser_of
from specbench.paths import PROJECT

FILE = "budgets.toml"
KINDS = ("source", "code", "tests")
SLACK = 1.05
TABLES = (".yaml", ".jinja", ".json", ".jsonl")
OTHER_TESTS = "tests"  # of no room: contract, documents, golden tables, shared parts

Lines: TypeAlias = Mapping[str, Mapping[str, int]]  # by room and kind

_LAYOUT = {
    tokenize.COMMENT,
    *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(source: str) -> int:
    """Lines of Python that hold more than a comment or a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            first = node.body[0]
            lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def rooms(root: Path) -> dict[str, dict[str, int]]:
    """Lines of each room by kind, as they are."""
    inner = (p for p in sorted((root / "specbench").iterdir()) if (p / "__init__.py").is_file())
    names = ["specbench", *(f"specbench/{p.name}" for p in inner)]
    names += ["methods", "runners", "analysis", "scripts"]
    counts = {name: dict.fromkeys(KINDS, 0) for name in (*names, OTHER_TESTS)}
    for name in names:
        every = (root / name).glob("*.py") if name == "specbench" else (root / name).rglob("*")
        _add(counts[name], every, "source", "code")
    by_folder = {name.rpartition("/")[2]: name for name in names}
    for path in (root / "tests").iterdir():
        room = by_folder.get(path.name, OTHER_TESTS)
        _add(counts[room], path.rglob("*.py") if path.is_dir() else [path], "tests")
    return counts


def _add(counts: dict[str, int], files: Iterable[Path], lines: str, code: str = "") -> None:
    for path in files:
        if path.suffix == ".py" or (code and path.suffix in TABLES):
            text = path.read_text(encoding="utf-8")
            counts[lines] += len(text.splitlines())
            if code and path.suffix == ".py":
                counts[code] += code_lines(text)


def over_budget(lines: Lines, budgets: Lines) -> list[str]:
    """List the numbers above their budget; a room without a budget may have nothing.

    A room may exceed its number by `SLACK`, so that a method of your own fits.
    """
    limits = {
        (name, kind): int(SLACK * n) for name, kinds in budgets.items() for kind, n in kinds.items()
    }
    return [
        f"{name}: {kind} must be at most {limits.get((name, kind), 0)} lines, got {n}"
        for name, kinds in lines.items()
        for kind, n in kinds.items()
        if n > limits.get((name, kind), 0)
    ]


def to_toml(budgets: Lines) -> str:
    """Format ``budgets.toml``."""
    lines = ["# Lines by room, see scripts/budgets.py. A commit that raises one says why."]
    for name, kinds in budgets.items():
        values = ", ".join(f"{kind} = {n}" for kind, n in kinds.items())
        lines.append(f'"{name}" = {{ {values} }}')
    return "\n".join(lines) + "\n"


def show(lines: Lines, budgets: Lines) -> None:
    """Print lines and budgets by room."""
    print(f"{'lines (budget)':22}" + "".join(f"{kind:>18}" for kind in KINDS))
    total = {kind: sum(kinds[kind] for kinds in lines.values()) for kind in KINDS}
    allowed = {kind: sum(kinds[kind] for kinds in budgets.values()) for kind in KINDS}
    for name, kinds in [*lines.items(), ("together", total)]:
        limits = allowed if kinds is total else budgets.get(name, {})
        cells = (f"{kinds[kind]:,} ({limits.get(kind, 0):,})" for kind in KINDS)
        print(f"{name:22}" + "".join(f"{cell:>18}" for cell in cells))


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--lower", action="store_true", help="lower budgets to the lines there are")
    options = parser.parse_args(argv)
    lines, path = rooms(PROJECT), PROJECT / FILE
    budgets = tomllib.loads(path.read_text(encoding="utf-8"))
    if options.lower:
        budgets = {
            name: {kind: min(kinds[kind], n) for kind, n in budgets[name].items()}
            for name, kinds in lines.items()
            if name in budgets
        }
        path.write_text(to_toml(budgets), encoding="utf-8")
    show(lines, budgets)
    messages = over_budget(lines, budgets)
    sys.stderr.write("".join(f"{line}\n" for line in messages))
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main())
