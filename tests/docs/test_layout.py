"""The layout that docs/house.md promises: few files a folder, one meaning per name."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("specbench", "methods", "runners", "analysis", "scripts")
# Names that were replaced by the field's own words; what they meant is in CHANGELOG.md.
OLD_CLASSES = {
    *("Stage", "PeerStage", "Contender", "Player", "Played", "Sheet", "Surroundings", "Footing"),
    *("PlainAnswers", "Watch", "Guess"),
}
OLD_FILES = {
    *("stage", "contenders", "player", "sheets", "surroundings", "footing", "canvas", "stacks"),
    *("anatomy", "groups", "durable", "differences", "copies", "answers", "interchange"),
    *("embedded", "isolate", "published"),
}


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def folders(package: str) -> set[str]:
    """Folders of a package that have a Python file of their own."""
    return {path.parent.name for path in (ROOT / package).glob("*/*.py")}


def test_specbench_is_rooms_and_not_a_corridor():
    files = Counter(path.parent for path in (ROOT / "specbench").rglob("*.py"))
    assert files.pop(ROOT / "specbench") <= 4
    assert max(files.values()) <= 13


def test_house_page_names_every_room():
    page = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    rooms = {f"{name}/" for name in folders("specbench")}
    rooms |= {path.name for path in (ROOT / "specbench").glob("[!_]*.py")}
    assert rooms == set(re.findall(r"^\| \d \| `([^`]+)` \|", page, re.M))


def test_tests_mirror_the_rooms():
    packages = set(PACKAGES) - {"specbench"}
    assert folders("tests") == folders("specbench") | packages | {"contract", "docs", "golden"}


def test_no_old_name_is_left():
    for path in sources():
        assert path.stem not in OLD_FILES, path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {getattr(node, field, None) for field in ("id", "attr", "name")}
            assert not OLD_CLASSES.intersection(names), path


def test_a_class_of_one_name_is_not_defined_twice():
    """`Lossless` was two classes of the same fields, copied from one into the other."""
    found = [path for path in sources() if "class Lossless" in path.read_text(encoding="utf-8")]
    assert len(found) == 1


def test_names_in_docstrings_and_targets_exist():
    """No tool follows ``:mod:`a.b``` and ``_target_`` strings when a file moves."""
    ours = rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+"
    for path in sources():
        source = path.read_text(encoding="utf-8")
        named = re.findall(rf":\w+:`~?({ours})`|_target_['\"]?: ['\"]({ours})", source)
        for name in (role or target for role, target in named):
            assert exists(name), f"{path}: {name}"


def test_targets_of_the_configuration_exist():
    for path in (ROOT / "conf").rglob("*.yaml"):
        for name in re.findall(r"_target_: ([\w.]+)", path.read_text(encoding="utf-8")):
            assert name.split(".")[0] not in PACKAGES or exists(name), name


def exists(name: str) -> bool:
    """Whether a dotted name is a module of ours, or a word in one."""
    place, *parts = (ROOT / name.split(".")[0], *name.split(".")[1:])
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if not parts:
        return True
    module = place / f"{parts[0]}.py"
    if module.exists():
        parts.pop(0)
    else:
        module = place / "__init__.py"
    return not parts or bool(re.search(rf"\b{parts[0]}\b", module.read_text(encoding="utf-8")))
