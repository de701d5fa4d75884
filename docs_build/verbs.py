"""One page per verb of the command line, made of its own parser.

Enters: `stoker.cli.main.app`. Leaves: Markdown by path, and the parser itself for whoever wants to hold a
typed command against it. Costs the import of the command line, 0.2 s; no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from docs_build.markdown import cell, table
from stoker.errors import EXIT_DONE, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OURS, EXIT_REFUSED

EXIT_CODES = {
    EXIT_DONE: "done",
    EXIT_OURS: "a fault of stoker's; `STOKER_TRACEBACK=1` before the command shows where",
    EXIT_INPUT: "your input: an option, a file, a config; the message says what to type",
    EXIT_REFUSED: "the quality gate refuses the data, or a loss is not finite",
    EXIT_INTERRUPTED: "interrupted; what was finished is kept",
}
_EXIT_CODES = [
    "## Exit codes",
    "",
    *table(("code", "meaning"), [(str(code), meaning) for code, meaning in EXIT_CODES.items()]),
]


def command_tree() -> Any:
    """Return the parser of `stoker`. Typer may carry a click of its own, hence no type."""
    import typer

    from stoker.cli.main import app

    return typer.main.get_command(app)


def subcommands(command: Any) -> dict[str, Any]:
    """Return the verbs below a command that are not hidden; none below a plain one."""
    below = getattr(command, "commands", {})
    return {name: one for name, one in sorted(below.items()) if not one.hidden}


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command that can be run, with the words that lead to it."""
    below = subcommands(command)
    if not below:
        yield words, command
    for name, one in below.items():
        yield from leaves(one, (*words, name))


def verb_pages(guides: Mapping[str, str]) -> dict[str, str]:
    """Make the page of every verb and the page that lists them.

    Args:
        guides: Text of the hand-written pages by path; those that use a verb are linked on its page.
    """
    tree = command_tree()
    pages = {
        f"verbs/{verb}.md": _page(verb, command, guides)
        for verb, command in subcommands(tree).items()
    }
    return {"verbs/index.md": _list(tree)} | pages


def _list(tree: Any) -> str:
    rows = [
        (f"[`stoker {verb}`]({verb}.md)", cell((command.help or "").split("\n\n")[0]))
        for verb, command in subcommands(tree).items()
    ]
    return "\n".join([
        "# Commands",
        "",
        "Made of the command's own parser when this site is built: what stands here is what",
        "`stoker VERB --help` says.",
        "",
        *table(("verb", "what it does"), rows),
        "",
        *_options(tree, "stoker"),
        *_EXIT_CODES,
    ])  # fmt: skip


def _page(verb: str, command: Any, guides: Mapping[str, str]) -> str:
    below = subcommands(command)
    lines = [f"# stoker {verb}", ""]
    if below:
        lines += [_prose(command.help), ""]
        for name, one in below.items():
            lines += [f"## stoker {verb} {name}", "", *_command(one, f"stoker {verb} {name}")]
    else:
        lines += _command(command, f"stoker {verb}")
    lines += [*_EXIT_CODES, "", *_uses(verb, guides)]
    return "\n".join(lines) + "\n"


def _command(command: Any, name: str) -> list[str]:
    context = command.context_class(command, info_name=name)
    usage = command.get_usage(context).removeprefix("Usage: ")
    return ["```text", usage, "```", "", _prose(command.help), "", *_options(command, name)]


def _options(command: Any, name: str) -> list[str]:
    context = command.context_class(command, info_name=name)
    shown = [
        (param, record)
        for param in command.get_params(context)
        if param.name != "help" and (record := param.get_help_record(context)) is not None
    ]
    if not shown:
        return []
    shown.sort(key=lambda pair: pair[0].param_type_name != "argument")  # they come first
    rows = []
    for _, (words, text) in shown:
        meaning, notes = _split_notes(text)
        default = notes.pop("default", "required" if "required" in notes else "")
        allowed = "; ".join(word for word in notes if word != "required")
        meaning += f" Allowed: `{allowed}`." if allowed else ""
        default = f"`{cell(default)}`" if default not in ("", "required") else default
        rows.append((f"`{cell(words)}`", default, cell(meaning)))
    return [*table(("argument or option", "default", "meaning"), rows), ""]


def _split_notes(text: str) -> tuple[str, dict[str, str]]:
    """Take what the help appends in brackets (a default, a range, "required") off its text."""
    found = re.search(r"\s*\[([^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]$", text)
    if not found or not re.match(r"default: |required|x|[\d.-]+<", found[1]):
        return text, {}
    notes = {}
    for part in found[1].split("; "):
        name, colon, value = part.partition(": ")
        notes[name] = value if colon else ""
    return text[: found.start()], notes


def _uses(verb: str, guides: Mapping[str, str]) -> list[str]:
    """List the pages that speak of `stoker VERB`, the most talkative first."""
    word = re.compile(rf"\bstoker {re.escape(verb)}(?![\w-])")
    counts = {path: len(word.findall(text)) for path, text in guides.items()}
    paths = sorted((path for path, count in counts.items() if count), key=lambda p: -counts[p])
    if not paths:
        return []
    links = [f"[{title_of(guides[path])}](../{path})" for path in paths]
    return ["## Read more", "", " · ".join(links)]


def title_of(page: str) -> str:
    """Return a page's first heading."""
    found = re.search(r"^# (.+)$", page, re.MULTILINE)
    assert found, "every page begins with a heading"
    return found[1]


def _prose(help_text: str | None) -> str:
    paragraphs = (help_text or "").split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in paragraphs).replace("<", "&lt;")
