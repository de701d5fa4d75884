"""One page per finding of the doctor, cut from `docs/doctor.md`, so that each can be found by its name.

Enters: the text of the doctor's page. Leaves: Markdown by path. Costs string work.
"""

from __future__ import annotations

import re

from docs_build.markdown import table


def findings(page: str) -> dict[str, str]:
    """Return what the page says under each finding's heading."""
    part = page.partition("\n## Findings\n")[2].partition("\n## ")[0]
    pieces = re.split(r"^### (\S+)$", part, flags=re.MULTILINE)[1:]
    return dict(zip(pieces[::2], (text.strip() for text in pieces[1::2]), strict=True))


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
    named = findings(page)
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
