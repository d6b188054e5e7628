"""The pages of the documentation and their shell lines."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *("README.md", "CONTRIBUTING.md", "assets/README.md", "surfaces/README.md"),
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(page: str) -> set[str]:
    """What a link may name behind ``#``: the page's headings, as GitHub writes them."""
    titles = re.findall(r"^#+ (.+)$", text(page), re.M)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def commands(page: str) -> list[list[str]]:
    """The words of each command in a page's shell blocks, without a leading ``A=b``."""
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```$", text(page), re.S | re.M))
    lines = re.sub(r" *\\\n *", " ", re.sub(r" #.*", "", blocks)).splitlines()
    parts = [shlex.split(part) for line in lines for part in line.split(" ; ")]
    parts = [words[1:] if words and re.match(r"[A-Z_]+=", words[0]) else words for words in parts]
    return [words for words in parts if words]
