"""Bring a data set into a folder, for runs without network.

    python scripts/fetch_data.py specbench            # into ./data; then: data_dir=data
    python scripts/fetch_data.py all --out DIR

Spec-Bench comes from its repository, the others from the hub as their yaml in ``conf/dataset``
pins them, and with GSM8K the worked examples of ``dataset.prompt_form=card``. A file appears whole
or not at all; an existing one is kept unless ``--force``.
"""

import hashlib
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.cli import parser_of, reporting_errors
from specbench.config.compose import compose, option_names
from specbench.data.cases import hub_rows, load_cases
from specbench.errors import DatasetError, unknown_name
from specbench.paths import CONF_DIR
from specbench.storage import jsonl

# Spec-Bench has no hub id.
_URLS = {
    "specbench": "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/"
    "data/spec_bench/question.jsonl",
    # The eight examples of the chain-of-thought paper, as an MIT-licensed repository has them.
    "gsm8k_shots": "https://raw.githubusercontent.com/EleutherAI/lm-evaluation-harness/"
    "4e7e0d47f33bc71070c1d38394bafbb52b117163/lm_eval/tasks/gsm8k/gsm8k-cot.yaml",
}
_SHA256 = {
    "specbench": "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    "gsm8k_shots": "7c9dd2561fe334a55f62bdc6a876f045e6dc7f53714c7a9db506b89c6de6bc96",
}
# CARD shuffles them with its seed, 1234; this is what Python's shuffle makes of it.
_SHOTS_ORDER = (1, 3, 2, 4, 5, 6, 0, 7)
_TIMEOUT_S = 30


def fetch(name: str, folder: Path, *, force: bool = False) -> Path:
    dataset = compose([f"dataset={name}"]).dataset
    target = folder / str(dataset.file)
    if _needs_fetch(name, target, force):
        content = _download(name, target.name) if name in _URLS else _from_hub(dataset)
        with jsonl.replacing(target) as partial:
            partial.write_bytes(content)
            cases = load_cases(compose([f"dataset={name}", f"dataset.path={partial}"]).dataset)
        print(f"{name}: {len(cases)} cases in {target}")
    if dataset.shots and _needs_fetch(name, folder / dataset.shots, force):
        with jsonl.replacing(folder / dataset.shots) as partial:
            partial.write_bytes(_worked_examples(dataset.shots))
        print(f"{name}: worked examples in {folder / dataset.shots}")
    return target


def _needs_fetch(name: str, target: Path, force: bool) -> bool:
    if target.is_file() and not force:
        print(f"{name}: {target} is there already (--force fetches it again)")
        return False
    return True


def _worked_examples(file: str) -> bytes:
    samples = yaml.safe_load(_download("gsm8k_shots", file))["fewshot_config"]["samples"]
    shots = [{"question": s["question"], "answer": s["target"]} for s in samples]
    return "".join(json.dumps(shots[i]) + "\n" for i in _SHOTS_ORDER).encode()


def _download(name: str, file: str) -> bytes:
    url = _URLS[name]
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            content: bytes = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise DatasetError(
            f"{name}: {url} cannot be reached ({error}). Bring what it holds by other means into a "
            f"file {file} and type data_dir=FOLDER."
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    # Another file than the one that the yaml was written for is taken, but said so.
    if digest != _SHA256[name]:
        print(f"{name}: note: the file has changed upstream (sha256 {digest})", file=sys.stderr)
    return content


def _from_hub(dataset: Any) -> bytes:
    """Format the rows as JSON lines, under the column names that a local file has."""
    columns = dict(dataset.columns)
    renamed = {there: columns.get(role) for role, there in dataset.hub.columns.items()}
    lines = []
    for row in hub_rows(dataset, columns):
        values = {renamed.get(key) or key: value for key, value in row.values.items()}
        # Where the hub has no such column, a local file gets what stands for it.
        if columns["id"] is not None:
            values.setdefault(columns["id"], row.number - 1)
        if columns["category"] is not None:
            values.setdefault(columns["category"], dataset.category or dataset.name)
        lines.append(json.dumps(values, ensure_ascii=False) + "\n")
    return "".join(lines).encode()


def main(argv: list[str] | None = None) -> int:
    files = {name: CONF_DIR / "dataset" / f"{name}.yaml" for name in option_names("dataset")}
    hub = [name for name, file in files.items() if "hub" in yaml.safe_load(file.read_text())]
    names = sorted({*hub, *_URLS} & {*files})
    parser = parser_of(__doc__)
    parser.add_argument("name", help=f"{', '.join(names)} or all")
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder (default: data)")
    parser.add_argument("--force", action="store_true", help="fetch again what is there")
    args = parser.parse_args(argv)

    def fetch_them() -> int:
        if args.name not in [*names, "all"]:
            raise unknown_name("data set", args.name, [*names, "all"])
        for name in names if args.name == "all" else [args.name]:
            fetch(name, args.out, force=args.force)
        print(f"Type: python run.py dataset={args.name} data_dir={args.out}")
        return 0

    return reporting_errors(fetch_them)


if __name__ == "__main__":
    sys.exit(main())
