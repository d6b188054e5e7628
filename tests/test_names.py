"""Names that say nothing of what they hold stay away: the ceiling may only fall."""

import ast
from collections import Counter

from specbench.paths import PROJECT

VAGUE = {
    *("found", "own", "place", "made", "said", "kept", "told"),
    *("asked", "words", "known", "wanted", "one", "each", "what"),
}
CEILING = 3  # of bound names: two keys of files, one of a yaml
PACKAGES = ("specbench", "methods", "runners", "analysis", "scripts", "tests")


def bound_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def test_vague_names_are_no_more_than_the_ceiling():
    vague = Counter()
    for package in PACKAGES:
        for path in (PROJECT / package).rglob("*.py"):
            names = bound_names(ast.parse(path.read_text(encoding="utf-8")))
            vague.update(f"{path.name}: {n}" for n in names if n.lstrip("_") in VAGUE)
    assert vague.total() <= CEILING, vague
