"""Which lines only a CUDA device reaches, and which of them tests execute.

    pytest -p tests.gpu_rules.cuda_lines FILES

A line counts if it stands where a condition asks for CUDA, calls ``torch.cuda`` for more than
whether there is a device, or belongs to what `WHOLE` names. `LEFT` are lines that no pretended
device can reach, with the reasons; the run fails where another one is not executed.
"""

from __future__ import annotations

import ast
import re
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("specbench", "runners", "methods", "scripts/bench")
CONFIGURATION = "specbench/config"  # reads names of devices and asks for none
WHOLE = {
    "specbench/kernels/cuda_graphs.py": {"capture", "capture_stream", "record", "_no_memory"},
    "specbench/decoding/engine.py": {"_pass_beside_stream"},
    "specbench/system/clock.py": {"CudaClock", "TorchEvents"},
    "specbench/system/bandwidth.py": {"_measure_cuda", "_quarter_of_free", "_by_events"},
}
# By file and the line's text: why it is not executed without a GPU.
LEFT: dict[tuple[str, str], str] = {}
_CUDA = re.compile(
    r"== 'cuda'|startswith\('cuda'\)|\bon_gpu\b|\bon_cuda\b|cuda\.is_available\(\)"
    r"|self\.captures|self\._done is not None|self\.overlap == 'stream'"
)
_ELSEWHERE = re.compile(
    r"!= 'cuda'|not on_gpu|not self\.captures|self\._graph is None|not torch\.cuda"
)
_CALL = re.compile(r"\b(torch\.cuda|self\._cuda)\.(?!is_available|device_count)\w+")


def lines_of(path: Path) -> set[int]:
    """First lines of the statements of a file that only CUDA reaches."""
    found: set[int] = set()
    whole = WHOLE.get(str(path.relative_to(ROOT)), set())

    def walk(body: list[ast.stmt], inside: bool, owner: ast.AST) -> None:
        for statement in body:
            nested = isinstance(statement, ast.FunctionDef | ast.ClassDef)
            in_class = isinstance(owner, ast.ClassDef)  # runs when the file is imported
            here = inside or (nested and statement.name in whole)
            docstring = isinstance(statement, ast.Expr) and isinstance(
                statement.value, ast.Constant
            )
            if not nested and not in_class and not docstring and (here or _calls(statement)):
                found.add(statement.lineno)
            test = ast.unparse(statement.test) if isinstance(statement, ast.If) else ""
            other = bool(_ELSEWHERE.search(test))
            asks = bool(_CUDA.search(test)) and not other
            for name in ("body", "orelse", "finalbody"):
                part = getattr(statement, name, [])
                walk(part, here or (asks if name == "body" else other), statement)
            for handler in getattr(statement, "handlers", []):
                walk(handler.body, here, handler)
            if other and isinstance(statement, ast.If):
                last = statement.body[-1]
                inside = inside or isinstance(last, ast.Return | ast.Continue | ast.Raise)

    tree = ast.parse(path.read_text(encoding="utf-8"))
    walk(tree.body, False, tree)
    return found


def _calls(statement: ast.stmt) -> bool:
    """Whether it calls ``torch.cuda`` itself, not in a block below it or an annotation."""
    if isinstance(statement, ast.AnnAssign):
        return statement.value is not None and bool(_CALL.search(ast.unparse(statement.value)))
    parts = [
        ast.unparse(node)
        for name, value in ast.iter_fields(statement)
        if name not in ("body", "orelse", "finalbody", "handlers")
        for node in (value if isinstance(value, list) else [value])
        if isinstance(node, ast.AST)
    ]
    return any(_CALL.search(part) for part in parts)


def all_lines() -> dict[str, set[int]]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    files = [path for path in files if CONFIGURATION not in path.as_posix()]
    return {str(path): found for path in files if (found := lines_of(path))}


WANTED: dict[str, set[int]] = {}
EXECUTED: dict[str, set[int]] = {}


def _trace(frame, event, argument):
    path = frame.f_code.co_filename
    return _line if path in WANTED else None


def _line(frame, event, argument):
    if event == "line":
        EXECUTED.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
    return _line


def pytest_configure(config) -> None:
    WANTED.update(all_lines())
    threading.settrace(_trace)
    sys.settrace(_trace)


def pytest_terminal_summary(terminalreporter) -> None:
    sys.settrace(None)
    total = done = 0
    missing = []
    for path, lines in WANTED.items():
        text = Path(path).read_text(encoding="utf-8").splitlines()
        name = str(Path(path).relative_to(ROOT))
        executed = lines & EXECUTED.get(path, set())
        total, done = total + len(lines), done + len(executed)
        for line in sorted(lines - executed):
            missing.append((name, line, text[line - 1].strip()))
    write = terminalreporter.write_line
    write(f"lines that only CUDA reaches: {done} of {total} executed ({done / total:.1%})")
    for name, line, text in missing:
        write(f"  {name}:{line}  {text}    {LEFT.get((name, text), '<- no reason is listed')}")


def pytest_sessionfinish(session) -> None:
    """Exit code 1 where a line is left out that `LEFT` does not list, or more than 5 %."""
    left = [
        (str(Path(path).relative_to(ROOT)), Path(path).read_text().splitlines()[line - 1].strip())
        for path, lines in WANTED.items()
        for line in lines - EXECUTED.get(path, set())
    ]
    few = len(left) <= 0.05 * sum(map(len, WANTED.values()))
    if not few or any(each not in LEFT for each in left):
        session.exitstatus = session.exitstatus or 1
