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
from types import CodeType

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("specbench", "runners", "methods", "scripts/bench")
NAMES_ALONE = ("specbench/config", "specbench/results")  # they read a device's name, and ask none
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
    files = [path for path in files if not any(each in path.as_posix() for each in NAMES_ALONE)]
    return {str(path): found for path in files if (found := lines_of(path))}


WANTED: dict[str, set[int]] = {}
EXECUTED: set[tuple[str, int]] = set()


_TO_SEE: dict[CodeType, set[int]] = {}  # wanted lines of a function that were not executed yet


def _trace(frame, event, argument):
    code = frame.f_code
    if code.co_filename not in WANTED:
        return None
    if code not in _TO_SEE:
        _TO_SEE[code] = WANTED[code.co_filename] & {line for *_, line in code.co_lines()}
    return _line if _TO_SEE[code] else None


def _line(frame, event, argument):
    if event == "line" and frame.f_lineno in (left := _TO_SEE[frame.f_code]):
        left.discard(frame.f_lineno)
        EXECUTED.add((frame.f_code.co_filename, frame.f_lineno))
    return _line


def pytest_configure(config) -> None:
    WANTED.update(all_lines())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Only tests of this folder are watched: it costs each call a little."""
    watched = Path(__file__).parent in item.path.parents
    if watched:
        threading.settrace(_trace)
        sys.settrace(_trace)
    try:
        return (yield)
    finally:
        if watched:
            sys.settrace(None)
            threading.settrace(None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """A process of tests has ended, of several: what it executed."""
    EXECUTED.update(map(tuple, getattr(node, "workeroutput", {}).get("cuda_lines", ())))


def _missing() -> list[tuple[str, int, str]]:
    """File, number and text of each line that was not executed."""
    found = []
    for path, lines in WANTED.items():
        text = Path(path).read_text(encoding="utf-8").splitlines()
        name = str(Path(path).relative_to(ROOT))
        left = sorted(line for line in lines if (path, line) not in EXECUTED)
        found += [(name, line, text[line - 1].strip()) for line in left]
    return found


def pytest_terminal_summary(terminalreporter) -> None:
    """One line; where these tests alone were run, each line that is missing, too."""
    total, missing = sum(map(len, WANTED.values())), _missing()
    done = total - len(missing)
    write = terminalreporter.write_line
    write(f"lines that only CUDA reaches: {done} of {total} executed ({done / total:.1%})")
    for name, line, text in missing if _alone(terminalreporter.config) else ():
        write(f"  {name}:{line}  {text}    {LEFT.get((name, text), '<- no reason is listed')}")


def pytest_sessionfinish(session) -> None:
    """Exit code 1 where a line is left out that `LEFT` does not list, or more than 5 %."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cuda_lines"] = sorted(EXECUTED)
    elif _alone(session.config):
        missing = _missing()
        few = len(missing) <= 0.05 * sum(map(len, WANTED.values()))
        if not few or any((name, text) not in LEFT for name, _, text in missing):
            session.exitstatus = session.exitstatus or 1


def _alone(config) -> bool:
    """Whether these tests alone are run, in this process, as `make gpu-lines` has it."""
    folder = Path(__file__).parent.name
    here = all(folder in argument for argument in config.args)
    return here and not getattr(config.option, "numprocesses", None)
