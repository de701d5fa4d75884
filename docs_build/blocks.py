"""Code blocks of Markdown pages, and the commands in them.

Enters: the text of a page. Leaves: its blocks in order, fenced or indented, each with the reason why it is not
run, where an HTML comment above it gives one. Costs string work.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

_FENCE = re.compile(r"^( *)```(\w*)$")
_NOT_RUN = re.compile(r"^<!-- not run: *(.*?) *-->$")
_COMMAND = re.compile(r"^(?:\$ )?stoker(?: |$)|(?:^| )-m stoker ")
_FILE_NAME = re.compile(r"^# ([\w./-]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        language: As the fence says; "" for none, and for an indented block.
        text: Without the fence and its indentation.
        line: Number of its first line on the page.
        not_run: Why it is not run; None when it is.
    """

    language: str
    text: str
    line: int
    not_run: str | None = None

    @property
    def file_name(self) -> str | None:
        """The name of the file that the block is, when its first line is a comment with one."""
        found = _FILE_NAME.match(self.text)
        return found[1] if found else None


def code_blocks(page: str) -> list[Block]:
    """Return the blocks of a page in order."""
    blocks = []
    lines = page.splitlines()
    at, reason = 0, None
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        marked = _NOT_RUN.match(lines[at])
        if fence:
            end = lines.index(f"{fence[1]}```", at + 1)
            inside = [line.removeprefix(fence[1]) for line in lines[at + 1 : end]]
            blocks.append(Block(fence[2], "\n".join(inside) + "\n", at + 2, reason))
            at = end
        elif lines[at].startswith("    stoker "):
            end = at
            while end < len(lines) and lines[end].startswith("    "):
                end += 1
            inside = [line.removeprefix("    ") for line in lines[at:end]]
            blocks.append(Block("", "\n".join(inside) + "\n", at + 1, reason))
            at = end - 1
        if marked:
            reason = marked[1]
        elif lines[at].strip():
            reason = None
        at += 1
    return blocks


def prose(page: str) -> str:
    """Return a page without its blocks and comments."""
    without = re.sub(r"^( *)```.*?^\1```$", "", page, flags=re.DOTALL | re.MULTILINE)
    without = re.sub(r"^    stoker .*?\n(?!    )", "", without, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", without, flags=re.DOTALL)


def stoker_commands(block: Block) -> list[list[str]]:
    """Return the words behind `stoker` of every such line in a block of commands."""
    if block.language not in ("", "bash", "console"):
        return []
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if _COMMAND.search(line):
            words = shlex.split(re.sub(r"[\[\]…]|\.\.\.", " ", line), comments=True)
            found.append(words[words.index("stoker") + 1 :])
    return found
