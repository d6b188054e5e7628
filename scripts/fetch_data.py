"""Bring a data set into a folder, for runs without network.

    python scripts/fetch_data.py specbench            # into ./data; then: data_dir=data
    python scripts/fetch_data.py all --out DIR

Spec-Bench comes from its repository, the others from the hub as their yaml in ``conf/dataset``
pins them. A file appears whole or not at all; an existing one is kept unless ``--force``.
"""

import hashlib
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from analysis.runs.command import parser_of, reporting_errors
from specbench.config.compose import compose, option_names
from specbench.data.cases import hub_rows, load_cases
from specbench.errors import DatasetError, unknown_name
from specbench.storage import jsonl

# Spec-Bench has no hub id.
_URLS = {
    "specbench": "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/"
    "data/spec_bench/question.jsonl",
}
_SHA256 = {"specbench": "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"}
_TIMEOUT_S = 30


def fetch(name: str, folder: Path, *, force: bool = False) -> Path:
    dataset = compose([f"dataset={name}"]).dataset
    target = folder / str(dataset.file)
    if target.is_file() and not force:
        print(f"{name}: {target} is there already (--force fetches it again)")
        return target
    content = _download(name) if name in _URLS else _from_hub(dataset)
    with jsonl.replacing(target) as partial:
        partial.write_bytes(content)
        cases = load_cases(compose([f"dataset={name}", f"dataset.path={partial}"]).dataset)
    print(f"{name}: {len(cases)} cases in {target}")
    return target


def _download(name: str) -> bytes:
    url = _URLS[name]
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            content: bytes = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise DatasetError(
            f"{name}: {url} cannot be reached ({error}). Bring the file by other means, name it "
            f"{compose([f'dataset={name}']).dataset.file} and type data_dir=FOLDER."
        ) from error
    found = hashlib.sha256(content).hexdigest()
    # Another file than the one that the yaml was written for is taken, but said so.
    if found != _SHA256[name]:
        print(f"{name}: note: the file has changed upstream (sha256 {found})", file=sys.stderr)
    return content


def _from_hub(dataset: Any) -> bytes:
    """The rows as one JSON object a line, under the column names that a local file has."""
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
    names = [n for n in option_names("dataset") if compose([f"dataset={n}"]).dataset.fetch]
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
