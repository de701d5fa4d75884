"""All pages of the site: the hand-written ones in `docs/`, and those that are made here.

Enters: the repository. Leaves: Markdown by its path on the site. Costs about two seconds.

The home page is the README, in four languages; the changelog and the notes for contributors are the files of
the repository. Their links are turned into links between pages; the text is the same. What stoker reads is the table
that the tests run (`tests/gallery/cases_*.py`); each finding of the doctor has a page, cut from `docs/doctor.md`, so
that it can be found by its name.
"""

from __future__ import annotations

import importlib
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs_build.markdown import table
from docs_build.reference import reference_pages
from docs_build.results import benchmarks_page
from docs_build.verbs import title_of, verb_pages
from stoker.doctor.findings import explanations

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = {"ja": "日本語", "zh": "中文", "ru": "Русский"}

# Files of the repository that are pages of the site under another path.
MOVED = {
    "README.md": "index.md",
    **{f"README.{code}.md": f"{code}/index.md" for code in LANGUAGES},
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "benchmarks/README.md": "benchmarks.md",
}
_GALLERY = """# What stoker reads, and what it does with it

Each line is a file that a test writes and packs (`tests/test_gallery.py`), so the right column is what really happens.
The rule: what would surprise the owner of the data is either handled and said, or refused by name with what to type.
Nothing is guessed in silence, and every pack accounts for its input: found = packed + refused + ignored.
"""


def written_pages(root: Path = ROOT) -> dict[str, str]:
    """Return the hand-written pages."""
    folder = root / "docs"
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.md"))
    }


def generated_pages(root: Path = ROOT) -> dict[str, str]:
    """Return the pages that are made of code, results and files of the repository."""
    written = written_pages(root)
    guides = {path: text for path, text in written.items() if path.split("/")[0] not in LANGUAGES}
    readme = (root / "README.md").read_text(encoding="utf-8")
    examples = [path.read_text(encoding="utf-8") for path in sorted(root.glob("examples/*.py"))]
    pages = {
        page: moved_page(root, file) for file, page in MOVED.items() if page != "benchmarks.md"
    }
    benchmarks = (root / "benchmarks/README.md").read_text(encoding="utf-8")
    pages["benchmarks.md"] = relinked(
        benchmarks_page(root / "benchmarks/results", benchmarks), "benchmarks/README.md"
    )
    pages["files.md"] = gallery_page(root)
    pages |= symptom_pages(written["doctor.md"])
    pages |= verb_pages(guides)
    pages |= reference_pages(root / "src/stoker", [readme, *guides.values(), *examples])
    return pages


def published_files(root: Path = ROOT) -> dict[str, bytes]:
    """Return what the site carries beside its pages: the benchmarks' own result files."""
    results = sorted((root / "benchmarks/results").glob("*.json"))
    return {f"results/{path.name}": path.read_bytes() for path in results}


def moved_page(root: Path, file: str) -> str:
    """Return a file of the repository as a page of the site."""
    return relinked((root / file).read_text(encoding="utf-8"), file)


def relinked(text: str, file: str) -> str:
    """Turn links between files of the repository into links between pages.

    Args:
        text: Markdown.
        file: Its path in the repository.
    """
    own = page_of(file)

    def turned(found: re.Match[str]) -> str:
        target, mark, place = found[1].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        there = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(file), target)))
        link = posixpath.relpath(there, posixpath.dirname(own) or ".")
        return f"]({link}{mark}{place})"

    return re.sub(r"\]\(([^()\s]+)\)", turned, text)


def page_of(file: str) -> str:
    """Return the path on the site of a file of the repository."""
    return MOVED.get(file, file.removeprefix("docs/").removeprefix("benchmarks/"))


def filled_nav(nav: list[Any], pages: Mapping[str, str]) -> list[Any]:
    """Replace each `folder/*` of a navigation by the pages of that folder, and `*` by all that stand nowhere else."""
    named = {entry for entry in _entries(nav) if not entry.endswith("*")}
    folders = tuple(entry.removesuffix("*") for entry in _entries(nav) if entry.endswith("/*"))
    rest = sorted(path for path in pages if path not in named and not path.startswith(folders))
    return _filled(nav, pages, rest)


def _entries(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for below in entry.values() if isinstance(entry, dict) else [entry]:
            yield from _entries(below) if isinstance(below, list) else [below]


def _filled(nav: list[Any], pages: Mapping[str, str], rest: list[str]) -> list[Any]:
    filled: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, below),) = entry.items()
            inside = _filled(below, pages, rest) if isinstance(below, list) else below
            filled.append({title: inside})
        elif entry == "*":
            filled += rest
        elif entry.endswith("/*"):
            folder = entry.removesuffix("*")
            index = f"{folder}index.md"
            inside = sorted(path for path in pages if path.startswith(folder) and path != index)
            filled += [index] if index in pages else []
            filled += [{title_of(pages[path]).removeprefix("stoker "): path} for path in inside]
        else:
            filled.append(entry)
    return filled


# -- what stoker reads ------------------------------------------------------------------------------


def gallery_page(root: Path = ROOT) -> str:
    """Return the page, a table for each kind of input."""
    folder = root / "tests"
    added = str(folder) not in sys.path
    if added:
        sys.path.insert(0, str(folder))
    try:
        parts = [_GALLERY.rstrip()]
        for path in sorted((folder / "gallery").glob("cases_*.py")):
            module = importlib.import_module(f"gallery.{path.stem}")
            rows = [
                [text.replace("|", "\\|") for text in (case.what, case.does)]
                for case in module.CASES
            ]
            parts += [f"\n## {module.KIND}\n", *table(("input", "what happens"), rows)]
        return "\n".join(parts) + "\n"
    finally:
        if added:
            sys.path.remove(str(folder))


# -- a page per finding -----------------------------------------------------------------------------


def symptoms(page: str) -> dict[str, list[str]]:
    """Return what one sees, by the finding that the page's table leads to from there."""
    part = page.partition("\n## From symptom to remedy\n")[2].partition("\n## ")[0]
    seen: dict[str, list[str]] = {}
    for line in part.splitlines():
        if line.startswith("| ") and "](#" in line:
            words = line.split("|")[1].strip()
            for name in re.findall(r"\]\(#([a-z0-9-]+)\)", line):
                seen.setdefault(name, []).append(words)
    return seen


def symptom_pages(page: str) -> dict[str, str]:
    """Make the page of every finding and the page that lists them."""
    seen = symptoms(page)
    named = explanations()
    pages = {f"symptoms/{name}.md": _page(name, text, seen[name]) for name, text in named.items()}
    rows = [("; ".join(seen[name]), f"[{name}]({name}.md)") for name in named]
    index = [
        "# Symptoms",
        "",
        "What you see, and the finding of [the doctor](../doctor.md) that may be behind it.",
        "",
        *table(("what you see", "it may be"), rows),
        "",
    ]
    return {"symptoms/index.md": "\n".join(index)} | pages


def _page(name: str, text: str, seen: list[str]) -> str:
    moved = re.sub(r"\]\((\w[\w/]*\.md)", r"](../\1", text).replace("](#", "](../doctor.md#")
    return "\n".join([
        f"# {name}",
        "",
        *(f"**What you see:** {words}." for words in seen),
        "",
        moved,
        "",
        "## Is it that?",
        "",
        "```",
        "stoker doctor --config my.yaml     # a job of stoker's own",
        "stoker doctor -- python train.py   # anybody's script, as it is",
        "```",
        "",
        f"If it is, the report names `{name}` with its evidence, the remedy and the gain to expect.",
        "[How the doctor works](../doctor.md) says how that gain is found.",
        "",
    ])  # fmt: skip
