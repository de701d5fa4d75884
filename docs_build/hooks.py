"""What mkdocs calls while it builds the site: it gets the pages of `pages.py`.

Enters: mkdocs' own objects. Leaves: the same, with more pages in them. Nothing is written into `docs/`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# mkdocs loads this file by its path; the package around it is found from the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docs_build.pages import (
    LANGUAGES,
    filled_nav,
    generated_pages,
    published_files,
    relinked,
    written_pages,
)

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_PAGES: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the pages, and give them their places in the navigation."""
    _PAGES.clear()
    _PAGES.update(generated_pages())
    config.nav = filled_nav(config.nav or [], written_pages() | _PAGES)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and the files that they link to."""
    from mkdocs.structure.files import File

    for path, text in _PAGES.items():
        files.append(File.generated(config, path, content=text))
    for path, content in published_files().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Turn links of a hand-written page that leave `docs/` into links to the pages made of those files."""
    del config, files
    path = page.file.src_uri
    return markdown if path in _PAGES else relinked(markdown, f"docs/{path}")


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Say in which language a translated page is: browsers choose their glyphs by it."""
    del config
    language = page.file.src_uri.split("/")[0]
    if language not in LANGUAGES:
        return output
    return output.replace('<html lang="en"', f'<html lang="{language}"', 1)
