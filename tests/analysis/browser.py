"""Lay out a page in headless Chromium at given widths and evaluate a script in it."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The page itself may hold no script, so an outer page reads a frame of each width.
_FRAMES = """<!DOCTYPE html><body><script>
const found = {}, sizes = %s, page = %s;
for (const width of sizes) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 900; frame.style.border = 0; frame.srcdoc = page;
  frame.onload = () => {
    const view = frame.contentWindow, document = frame.contentDocument;
    found[width] = %s;
    if (Object.keys(found).length === sizes.length) {
      const out = window.document.createElement("pre");
      out.textContent = JSON.stringify(found);
      window.document.body.replaceChildren(out);
    }
  };
  document.body.append(frame);
}
</script></body>"""


def executable() -> str | None:
    """Return the browser's path, None without one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def look(
    page: str, expression: str, widths: list[int], folder: Path, scheme: str = "light"
) -> tuple[dict, list[str]]:
    """Evaluate an expression over ``view`` and ``document`` by width in CSS pixels.

    Returns:
        The values, and the console's messages.
    """
    frames = folder / "frames.html"
    text = json.dumps(page).replace("</", "<\\/")
    frames.write_text(_FRAMES % (json.dumps(widths), text, expression), encoding="utf-8")
    command = [
        executable(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        "--dump-dom", frames.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    match = re.search(r"<pre>(.*)</pre>", done.stdout, re.DOTALL)
    assert match is not None, done.stderr
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(match[1])), complaints
