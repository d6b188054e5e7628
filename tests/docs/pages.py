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
    """Anchors of a page: its headings, as GitHub writes them after ``#``."""
    titles = re.findall(r"^#+ (.+)$", text(page), re.M)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def commands(page: str) -> list[list[str]]:
    """Split each command of a page's shell blocks into words, without a leading ``A=b``."""
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```$", text(page), re.S | re.M))
    lines = re.sub(r" *\\\n *", " ", re.sub(r" #.*", "", blocks)).splitlines()
    parts = [shlex.split(part) for line in lines for part in line.split(" ; ")]
    parts = [part[1:] if part and re.match(r"[A-Z_]+=", part[0]) else part for part in parts]
    return [part for part in parts if part]
