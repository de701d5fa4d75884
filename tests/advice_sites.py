"""Every place of the package that tells a user what to type next, read from its source."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import stoker
from source_trees import nodes
from source_trees import parsed as tree_of

PACKAGE = Path(stoker.__file__).parent
PROGRAMS = [
    "stoker",
    "ls",
    "df",
    "du",
    "dd",
    "cd",
    "cp",
    "mv",
    "rm",
    "sed",
    "cat",
    "head",
    "tail",
    "file",
    "find",
    "fuser",
    "gzip",
    "gunzip",
    "unzip",
    "iconv",
    "expand",
    "mkdir",
    "chmod",
    "ssh",
    "pip",
    "python",
    "python3",
    "torchrun",
    "dask",
    "findmnt",
    "kill",
    "export",
    "command",
]
# Where several ways are named in one advice, or words behind a way say what it does.
_BETWEEN = re.compile(r"[,;] or |; |, then |, and (?=\w+\()|, (?=leave )")
_BEHIND = re.compile(
    r"(?:, which |,? (?:where|for|with|in|shows|as|before|first|there|again|to|names|prints|of|at|instead|beside) "
    r"|,? (?:first|there|again)$| \((?=[a-zA-Z-])|  |, its default$|, in this order$"
    r"| or (?=\w+[.(=])|, (?:instead|too)\b).*"
)


_CONSTANTS = ("null", "true", "false")


@dataclass(frozen=True)
class Site:
    """A call that makes an error: where it stands, and its third part as source text."""

    file: str
    first: int
    last: int
    advice: str
    ways: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.advice}"


@cache
def all_sites() -> tuple[Site, ...]:
    """Return every call of an error class that has an advice which is not prose alone."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = str(path.relative_to(PACKAGE))
        code = path.read_text()
        tree = tree_of(code)
        named = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for call in nodes(code, ast.Call):
            advice = _advice_of(call, file)
            if advice is not None:
                said = named.get(advice.id, advice) if isinstance(advice, ast.Name) else advice
                ways = tuple(way for text in _texts(said) for way in ways_of(text))
                found.append(
                    Site(file, call.lineno, call.end_lineno or 0, ast.unparse(advice), ways)
                )
    return tuple(site for site in found if site.ways)


def _advice_of(call: ast.Call, file: str) -> ast.expr | None:
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
    if name == "Problem" or (name == "clash" and file == "config/resolve.py"):
        return call.args[4]
    if name in ("OSError", "JSONDecodeError"):
        return None
    if not name.endswith("Error") and not (name == "cls" and file == "errors.py"):
        return None
    named = [word.value for word in call.keywords if word.arg == "fix"]
    return next(iter([*named, *call.args[2:3]]), None)


def _texts(node: ast.expr) -> list[str]:
    """Return the texts that an advice may be, with WORD where a value stands."""
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        parts = [
            part.value if isinstance(part, ast.Constant) else "".join(_texts(part.value)[:1])
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        ]
        return ["".join(map(str, parts))]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("command", "display.command"):
        return [" ".join(_texts(word)[0] for word in node.args)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "look_in":
        return ["ls WORD"]
    return ["WORD"]


def ways_of(text: str) -> list[str]:
    """Return what can be typed of an advice: commands, options, values and Python, without the prose."""
    whole = text.removeprefix("for example ")
    if re.fullmatch(r"[\w.+-]+ or [\w.+-]+", whole):  # two values of a config
        return whole.split(" or ")
    # What stands between the quotes of `python3 -c '...'` is code, whatever is in it.
    code = re.search(r"(?<= -c )'[^']*'", whole)
    sign = "CODE-IN-QUOTES"
    plain = whole.replace(code[0], sign) if code else whole
    split = (_BEHIND.sub("", way).strip() for way in _BETWEEN.split(plain))
    ways = (way.replace(sign, code[0]) if code else way for way in split)
    # A word alone is a value where it is the whole advice, and else what was left of a sentence.
    return [
        way
        for way in ways
        if is_typed(way) and (way == whole or way in _CONSTANTS or not re.fullmatch("[a-z]+", way))
    ]


def is_typed(way: str) -> bool:
    """Say whether a way is something to type, rather than a sentence."""
    if not way:
        return False
    first = way.partition(" ")[0]
    if first in PROGRAMS or way.startswith("--") or re.fullmatch(r"leave \S+ out", way):
        return True
    if way.startswith("WORD") or re.fullmatch(r"[\w-]+\.\w+ [\w-]+/|OUT \S+", way):
        return True
    if re.fullmatch(r"(?:delete |OUT )?[\w.'\"/=%,…<>:-]+(?:: [^ ].*)?", way):
        return True
    return parsed(way) is not None


def parsed(way: str) -> ast.Call | None:
    """Return the arguments that a way of Python is, as a call's; None where it is no Python."""
    try:
        return ast.parse(f"f({way})", mode="eval").body
    except SyntaxError:
        pass
    try:
        ast.parse(way)
    except SyntaxError:
        return None
    return ast.Call(ast.Name("f"), [], [])
