"""Say on the pages which numbers the code has moved on from.

    python scripts/mark_pages.py

Tables between ``<!-- made of RUN -->`` and ``<!-- end -->`` are written anew first. Below each
table, paragraph and picture of README.md and docs/ that was measured with other kernels, engine,
methods or settings than this checkout has, the page says so; once the record was made again the
sentence goes. A record that does not say its code counts as older. The pre-commit hook and
`make fmt` run this.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.command import parser_of, reporting_errors
from scripts.method_table import remade
from scripts.shown_numbers import words_beside
from specbench.paths import PROJECT
from specbench.results.records import MANIFEST, SUMMARY
from specbench.storage.jsonl import read_json
from specbench.system.environment import code_sha256

SENTENCE = "*Measured with older code.*"
# A table below the comment that names its records, or the line below a picture that does.
_TABLE = re.compile(
    r"(?P<shown><!-- from: (?P<records>.+)\n(?:.+\n)*\n(?:\|.*\n)+)(?P<marked>\n\*Measured.*\*\n)?"
)
_TEXT = re.compile(  # a paragraph
    r"(?P<shown><!-- from: (?P<records>.+)\nnumbers: .+ -->\n(?:.+\n)*?.+?)"
    r"(?P<marked> \*Measured.*\*)?(?=\n\n|\n?\Z)"
)
_PICTURE = re.compile(r"(?P<shown>^Record: (?P<records>`.+`\.))(?P<marked> \*Measured.*\*)?$", re.M)


def marked(page: str, code: str, root: Path = PROJECT) -> str:
    """A page with the sentence where a record's code is not ``code``, and nowhere else."""

    def table(found: re.Match[str]) -> str:
        older = _is_older(found["records"].split(), code, root)
        return found["shown"] + (f"\n{SENTENCE}\n" if older else "")

    def picture(found: re.Match[str]) -> str:
        records = re.findall("`([^`]+)`", found["records"]) or found["records"].split()
        older = _is_older(records, code, root)
        return found["shown"] + (f" {SENTENCE}" if older else "")

    return _PICTURE.sub(picture, _TEXT.sub(picture, _TABLE.sub(table, page)))


def _is_older(records: list[str], code: str, root: Path) -> bool:
    return any(_codes_of(root / record) != {code} for record in records)


def _codes_of(record: Path) -> set[str]:
    """The code that a run's folder or a file was measured with; none where it does not say so."""
    if record.suffix in (".csv", ".md"):
        said = record.read_text(encoding="utf-8") + words_beside(record)
        return set(re.findall(r"\(code ([0-9a-f]{16})\)", said))
    if record.name == SUMMARY:
        record = record.parent
    if record.is_dir():
        record /= MANIFEST if (record / MANIFEST).is_file() else SUMMARY  # several runs' together
    noted = read_json(record)
    code = noted.get("code") or (noted.get("environment") or {}).get("code")
    return {str(code)} if code else set()


def pages() -> list[Path]:
    return [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]


def main() -> int:
    parser_of(__doc__).parse_args()
    code = code_sha256()
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (now := marked(remade(text), code)) != text:
            path.write_text(now, encoding="utf-8")
            print(f"{path.relative_to(PROJECT)}: marks of older code, tables of runs made anew")
    return 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
