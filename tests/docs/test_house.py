"""What the documents promise exists, and the house rules that no linter checks."""

import ast
import os
import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from scripts import check_env

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *("README.md", "CONTRIBUTING.md", "surfaces/README.md", "assets/draft_smollm2_135m/README.md"),
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
]
PAGES = [page for page in PAGES if not (ROOT / page).with_suffix(".csv").is_file()]  # its words
# What readers write themselves: their machine's settings, and the examples of how to add a method.
READERS_OWN = re.compile(
    r"conf/local/default\.yaml"
    r"|docs/measurements/(gpu|h100|NAME)/.*"  # of a GPU
    r"|(methods|conf/method)/(my_method|successor_walk|likeliest_chain)\.\w+"
)
PACKAGES = ("specbench", "methods", "runners", "analysis")
TOP_LEVEL = {
    *PACKAGES,
    *("conf", "scripts", "tests", "docs", "surfaces", "assets"),
    *("pyproject.toml", "constraints.txt", "Makefile", "run.py", "CITATION.cff", "Dockerfile"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"),
}
# A module of ours by one of these names would hide a package that we import.
HIDING = {"datasets", "hydra", "numba", "optuna", "torch", "transformers", "types", "wandb"}
MAX_LINES = 400


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def code_blocks(name: str) -> str:
    """The shell blocks of a document, comments removed."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", text(name), re.S | re.M)
    return "\n".join(line.split(" #")[0] for block in blocks for line in block.splitlines())


def make_targets() -> dict[str, str]:
    return dict(re.findall(r"^([a-z-]+):.*?## (.+)$", text("Makefile"), re.M))


def make(*words: str, cwd: Path) -> str:
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def config_groups() -> set[str]:
    """Folders of conf/ that hold a choice a user makes, as they are named on a command line."""
    files = [path for path in (ROOT / "conf").rglob("*") if path.is_file()]
    folders = {str(path.parent.relative_to(ROOT / "conf")) for path in files} - {"."}
    return {name for name in folders if not name.endswith("_logging")}


@pytest.mark.parametrize("page", PAGES)
def test_links_paths_modules_and_targets_that_a_page_names_exist(page):
    links = re.findall(r"\]\(([^)#:]+)\)", text(page))
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    # Not `conf/pair/draft_<model>.yaml` and not `tests/decoding/test_*.py`: those name a pattern.
    folders = "specbench|methods|runners|analysis|scripts|tests|conf|docs"
    paths = re.findall(rf"(?<![\w./-])((?:{folders})/[\w/.-]*+)(?![<*])", text(page))
    missing += [
        path
        for path in paths
        if not READERS_OWN.fullmatch(path) and not (ROOT / path.rstrip(".")).exists()
    ]
    for name in re.findall(
        r"python -m ((?:specbench|runners|analysis|scripts)\.[\w.]+)", text(page)
    ):
        place = ROOT / name.replace(".", "/")
        if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists():
            missing.append(name)
    assert not missing
    assert set(re.findall(r"`make ([a-z-]+)", text(page))) <= set(make_targets())


def test_measurements_say_machine_command_and_date():
    for page in PAGES:
        if "/measurements/" in page:
            sections = re.split(r"^## ", text(page), flags=re.M)[1:]
            assert sections
            for section in sections:
                for word in ("Machine", "Command", "Date"):
                    found = re.search(rf"^\W*\*\*{word}:\*\* \S", section, re.M)
                    assert found, f"{section.splitlines()[0]}: no {word}"


@pytest.mark.parametrize(
    ("made", "python"), [([], "python3"), ([".venv/.stamp-setup"], ".venv/bin/python")]
)
def test_the_gpu_check_installs_nothing(tmp_path, made, python):
    """A machine with a GPU may have no network, and a torch of its own."""
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    shown = make("-n", "-f", str(ROOT / "Makefile"), "gpu-check", cwd=tmp_path)
    assert shown == f"{python} -m scripts.gpu_check --out docs/measurements/gpu \n"


def test_ci_runs_the_readmes_test_command_before_the_rest():
    assert re.findall(r"^make (.+)$", text(".ci/run"), re.M) == ["test", "lint type"]
    assert "make test" in code_blocks("README.md")


def test_ci_tries_every_python_that_is_declared():
    project = tomllib.loads(text("pyproject.toml"))["project"]
    allowed = SpecifierSet(project["requires-python"])
    versions = {f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed}
    named = (re.search(r":: Python :: (3\.\d+)$", line) for line in project["classifiers"])
    assert {match[1] for match in named if match} == versions
    (job,) = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"].values()
    assert set(job["strategy"]["matrix"]["python-version"]) == versions
    assert all(version in text("README.md") for version in versions)


def choices(group: str) -> set[str]:
    files = (ROOT / "conf" / group).glob("*.yaml")
    return {path.stem for path in files if not path.stem.startswith("_")}


def test_the_page_on_configuration_names_every_group_model_and_data_set():
    page = text("docs/config.md")
    assert not {group for group in config_groups() if f"`{group}`" not in page}
    for group in ("model", "dataset"):
        heading = rf"\*\*{group.title()}s\*\* \(.*?(?=\n\n)"
        paragraph = re.search(heading, page, re.S).group()
        listed = set(re.findall(r"`([a-z][a-z0-9_]*)`", paragraph)) - {"data_dir"}
        assert listed == choices(group)


def test_readme_promises_no_method_that_does_not_exist():
    """The reverse is not asked: a new method is two files and no edit elsewhere."""
    table = text("README.md").split("## Methods")[1].split("\n## ")[0]
    cells = [line.split(" | ")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    named = set(re.findall(r"`([a-z][a-z0-9_]*)`", " ".join(cells)))
    assert {"ar", "cacheback", "eagle3"} <= named <= choices("method")


def test_rooms_are_small_and_the_house_page_names_each():
    """Tests mirror them."""
    files = Counter(path.parent for path in (ROOT / "specbench").rglob("*.py"))
    assert files.pop(ROOT / "specbench") <= 4
    assert max(files.values()) <= 13
    rooms = {path.parent.name for path in (ROOT / "specbench").glob("*/*.py")}
    modules = {path.name for path in (ROOT / "specbench").glob("[!_]*.py")}
    listed = re.findall(r"^\| \d \| `([^`]+)` \|", text("docs/house.md"), re.M)
    assert set(listed) == {f"{room}/" for room in rooms} | modules
    tested = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert tested == rooms | {*PACKAGES, "scripts", "contract", "docs", "golden", "gpu_rules"} - {
        "specbench"
    }


def test_a_class_name_names_one_class():
    names = Counter(
        node.name
        for package in (*PACKAGES, "scripts")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def tracked() -> list[Path]:
    """Files that git tracks or would: paths relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def test_top_level_names_are_the_fixed_ones():
    names = {path.parts[0] for path in tracked()}
    assert not {name for name in names if not name.startswith(".")} - TOP_LEVEL


def test_no_forbidden_file_names():
    stems = {path.stem: path for path in sources(*PACKAGES, "scripts")}
    assert not HIDING.intersection(stems)
    assert not {"utils", "util", "misc", "helpers", "common"}.intersection(stems)


def test_no_pickles_and_no_binary_weights_outside_assets():
    suffixes = {".pkl", ".pickle", ".pt", ".bin", ".safetensors", ".gguf", ".npy", ".npz"}
    assert not [p for p in tracked() if p.suffix in suffixes and p.parts[0] != "assets"]


def test_modules_are_short_enough_to_read():
    for path in sources(*PACKAGES):
        source = path.read_text(encoding="utf-8")
        if path.stem.endswith("kernels"):  # see the next test
            assert "One file" in source, path
        else:
            assert len(source.splitlines()) <= MAX_LINES, path


def test_compiled_code_calls_none_of_another_file():
    """Numba's cache on disk does not notice a change there, and runs the old code (numba 0.68)."""
    compiled = {}
    for path in sources("specbench", "methods"):
        body = ast.parse(path.read_text("utf-8")).body
        functions = [node for node in body if isinstance(node, ast.FunctionDef)]
        names = {f.name for f in functions if any("njit" in ast.dump(d) for d in f.decorator_list)}
        if names:
            compiled[".".join(path.relative_to(ROOT).with_suffix("").parts)] = (path, names)
    assert len(compiled) > 10
    for path, _ in compiled.values():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in compiled:
                taken = {alias.name for alias in node.names} & compiled[node.module][1]
                assert not taken, f"{path.name}: compiled code needs a copy of its own of {taken}"


def printing(path: Path) -> list[int]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


def test_the_core_and_the_methods_log_instead_of_printing():
    assert not [f"{p}:{line}" for p in sources("specbench", "methods") for line in printing(p)]


def test_unpickling_and_foreign_code_stay_off():
    for path in sources(*PACKAGES, "scripts"):
        source = path.read_text(encoding="utf-8")
        pickles = r"\bpickle\.(loads?|Unpickler)\b|^\s*import (dill|joblib)"
        assert not re.search(pickles, source, re.M), path
        assert not re.search(r"trust_remote_code\s*=\s*True|weights_only\s*=\s*False", source), path
        assert not re.search(r"torch\.load\((?!.*weights_only=True)", source), path


def test_top_packages_import_nothing():
    """Importing one must cost nothing: reading records needs no torch, composing no method."""
    for package in PACKAGES:
        body = ast.parse(text(f"{package}/__init__.py")).body
        if package == "runners":  # compare() is imported when it is asked for
            named = {node.module for node in body if isinstance(node, ast.ImportFrom)}
            assert named <= {"__future__", "typing"}
        else:
            assert all(isinstance(node, ast.Expr) for node in body), package


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


def test_names_in_docstrings_and_configuration_exist():
    """No tool follows ``:mod:`a.b``` and ``_target_`` strings when a file moves."""
    ours = rf"(?:{'|'.join([*PACKAGES, 'scripts'])})(?:\.\w+)+"
    named = rf":\w+:`~?({ours})`|_target_['\"]?: ['\"]?({ours})"
    for path in [*sources(*PACKAGES, "scripts"), *(ROOT / "conf").rglob("*.yaml")]:
        for role, target in re.findall(named, path.read_text(encoding="utf-8")):
            assert exists(role or target), f"{path}: {role or target}"


def test_checked_versions_fit_the_declared_bounds():
    project = tomllib.loads(text("pyproject.toml"))["project"]
    extras = project["optional-dependencies"].values()
    declared = [*project["dependencies"], *(line for extra in extras for line in extra)]
    versions = check_env.checked_versions(ROOT / "constraints.txt")
    checked = {canonicalize_name(name): version for name, version in versions.items()}
    for line in declared:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name == "nvidia-ml-py":  # no GPU in the environment that was checked
            continue
        assert requirement.specifier.contains(checked[name]), line


def test_one_torch_and_one_ruff_version_everywhere():
    torch = re.search(r"^torch==(\S+)", text("constraints.txt"), re.M).group(1)
    assert re.search(rf"^TORCH_VERSION := {re.escape(torch)}$", text("Makefile"), re.M)
    ruff = re.search(r"^ruff==(\S+)", text("constraints.txt"), re.M).group(1)
    hooks = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    packages = [d for hook in hooks for d in hook.get("additional_dependencies", ())]
    used = {package for package in packages if package.startswith("ruff==")}
    assert used == {f"ruff=={ruff}"}


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ("580.65.06", None),
        ("", None),  # no such GPU
        (
            "550.54.15",
            r"550\.54\.15 is too old .* CUDA 13; .* make setup TORCH_INDEX=URL .* CUDA 12",
        ),
        ("470.82", r"470\.82 is too old .* update the driver to 580"),
    ],
)
def test_setup_says_what_to_type_before_a_torch_that_the_driver_is_too_old_for(
    driver, said, monkeypatch, capsys, tmp_path
):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho {driver}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert check_env.main(["--driver"]) == (2 if said else 0)
    assert re.search(said or "^$", capsys.readouterr().err)


def test_check_env_tells_a_wrong_version(tmp_path, capsys):
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("numpy==0.0.1  # never\nnot-installed-here==1.0\n", encoding="utf-8")
    assert check_env.main(["--constraints", str(constraints)]) == 1
    printed = capsys.readouterr().out
    assert "0.0.1 was checked" in printed
    assert "not-installed-here" not in printed
