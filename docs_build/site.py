"""Builds the documentation site with zensical: `python -m docs_build.site FOLDER`, which `make docs` calls.

Enters: the pages of `pages.py`, the files of `docs/`, and `mkdocs.yml`, which zensical reads. Leaves: a folder of
HTML, or zensical's warnings and its exit code. Costs about ten seconds. zensical calls no hooks, so all pages
are written to a temporary folder first; nothing is written into `docs/`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from docs_build.pages import (
    LANGUAGES,
    ROOT,
    filled_nav,
    generated_pages,
    published_files,
    relinked,
    written_pages,
)


def write_sources(folder: Path) -> None:
    """Write everything that zensical reads: pages, files they link to, and the config with its navigation filled."""
    written = {path: relinked(text, f"docs/{path}") for path, text in written_pages().items()}
    pages = written | generated_pages()
    shutil.copytree(ROOT / "docs", folder / "docs")
    files = published_files() | {path: text.encode() for path, text in pages.items()}
    for path, content in files.items():
        target = folder / "docs" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    # As text: the part before the navigation has tags that only zensical's own YAML reader knows.
    head, mark, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    filled = filled_nav(yaml.safe_load(nav), pages)
    config = head + mark + yaml.safe_dump(filled, allow_unicode=True)
    (folder / "mkdocs.yml").write_text(config, encoding="utf-8")


def build(site: Path) -> int:
    """Build the site into a folder that does not exist yet; return zensical's exit code."""
    with tempfile.TemporaryDirectory(prefix="stoker-docs-") as name:
        folder = Path(name)
        write_sources(folder)
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        done = subprocess.run(command, cwd=folder, check=False)
        if done.returncode == 0:
            _set_languages(folder / "site")
            shutil.copytree(folder / "site", site)
        return done.returncode


def _set_languages(site: Path) -> None:
    """Say in which language a translated page is: browsers choose their glyphs by it."""
    for code in LANGUAGES:
        for path in (site / code).rglob("*.html"):
            text = path.read_text(encoding="utf-8")
            text = text.replace('<html lang="en"', f'<html lang="{code}"', 1)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])))
