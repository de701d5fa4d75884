"""A real browser for the tests of pages. A start costs two seconds: each shows as much as it can."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

# A headless window is never narrower than 500 px: a phone is a frame inside it.
FRAMES = """<!doctype html>{frames}
<script>onload = () => {{
  document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {{
    const d = frame.contentDocument.documentElement;
    const over = [...d.querySelectorAll("body *")].filter(e => !e.closest(".scroll") &&
      e.getBoundingClientRect().right > d.clientWidth + 0.5).map(e => e.tagName + "." + e.className);
    const scrolled = [...d.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth)
      .map(e => e.querySelector("table").id);
    return [d.clientWidth, d.scrollWidth, over, scrolled];
  }}));
}}</script>"""


def browse(path: Path, *options: str) -> tuple[str, str]:
    """Return a page's document as the browser made it, and what it said on its console."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed: apt-get install -y chromium")
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={path.parent / 'profile'}", "--window-size=1300,1200",
        "--enable-logging=stderr", "--dump-dom", *options, path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    return done.stdout, done.stderr


def check_widths(folder: Path, pages: dict[str, list[int]], fitting: tuple[str, ...] = ()) -> None:
    """Fail where a page of a folder, or its table whose id is in `fitting`, is wider than its frame.

    `pages` has the frames' widths. Other tables may scroll inside their boxes.
    """
    asked = [(name, width) for name, widths in pages.items() for width in widths]
    frames = "".join(
        f'<iframe src="{name}" width="{width}" height="900"></iframe>' for name, width in asked
    )
    page = folder / "frames.html"
    page.write_text(FRAMES.format(frames=frames), encoding="utf-8")
    dom, _ = browse(page, "--allow-file-access-from-files", "--virtual-time-budget=3000")
    measured = re.search(r"<title>(\[.*\])</title>", dom)
    assert measured is not None, dom[:500]
    found = json.loads(measured[1])
    for (name, width), (client, scroll, over, scrolled) in zip(asked, found, strict=True):
        assert width - 20 <= client <= width, name
        assert scroll <= client, (name, width)
        assert over == [], (name, width)
        assert not {*fitting} & {*scrolled}, (name, width)
