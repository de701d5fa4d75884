"""Everything that is printed goes through here: plain text without control characters.

Enters: lines and tables that hold names from files, and messages of servers. Leaves: the same without control
characters, without rich's markup, and without passwords, on stdout or stderr; JSON for `--json`. Costs the import
of rich, where a table or a style is wanted.

Every verb prints through here, so that one place decides. A string is one line: what it holds of line ends is
shown escaped. Whoever wants two lines prints two.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import typer

from stoker.address import masked_values
from stoker.display import printable, secret_hint
from stoker.strict_json import json_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


STDOUT, STDERR = "standard output", "standard error"


@contextlib.contextmanager
def _named(stream: str) -> Iterator[None]:
    """Let the error of a stream that cannot be written name it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = stream
        raise


def echo(line: str, *, err: bool = False) -> None:
    """Print a line."""
    with _named(STDERR if err else STDOUT):
        typer.echo(printable(line), err=err)


def echo_lines(text: str) -> None:
    """Print a text of our own making, such as a config, line by line."""
    for line in text.splitlines():
        echo(line.expandtabs())


json_is_promised = False
"""Whether `--json` was given and its document is still to be printed: an error then prints one. Set by `main`."""


def print_json(document: Any, indent: int | None = None) -> None:
    """Print a JSON document, with passwords in URLs masked; JSON escapes control characters."""
    global json_is_promised  # noqa: PLW0603  one per process, as stdout is one
    json_is_promised = False
    with _named(STDOUT):
        typer.echo(json_text(masked_values(document), indent=indent))


def styled(text: str, style: str = "") -> Text:
    """Return a line with a style, for a console or a table."""
    from rich.text import Text

    return Text(printable(text), style)


def make_console(*, stderr: bool = False, width: int = 160, soft_wrap: bool = False) -> Console:
    """Return a console that shows strings as they are.

    `width` is for what is no terminal: a pipe has none, and lines should not be folded at 80.
    """
    kind = _console_kind()
    console: Console = kind(stderr=stderr, soft_wrap=soft_wrap)
    return console if console.is_terminal else kind(stderr=stderr, soft_wrap=soft_wrap, width=width)


@cache
def _console_kind() -> Any:
    from rich.console import Console

    class Plain(Console):
        """A rich console without markup, emoji codes or highlighting; control characters are escaped."""

        def __init__(self, **options: Any) -> None:
            super().__init__(markup=False, emoji=False, highlight=False, **options)

        def print(self, *lines: Any, **options: Any) -> None:
            """Print, as rich does."""
            with _named(STDERR if self.stderr else STDOUT):
                super().print(*lines, **options)

        def render_str(self, text: str, **options: Any) -> Text:
            """Convert a string to text, as rich does for every line, cell and title."""
            return super().render_str(printable(text), **options)

    return Plain


def print_commands(console: Console, commands: Sequence[str]) -> None:
    """Print commands to type next, and what to do where a password was left out of one."""
    for words in commands:
        console.print(f"  {words}", soft_wrap=True)
    if hint := secret_hint(" ".join(commands)):
        console.print(f"  {hint}", soft_wrap=True)


# -- progress, on stderr where that is a terminal ---------------------------------------------------


class Bar:
    """A `stoker.report.Progress` for people. Use as a context manager.

    Args:
        quiet: Show nothing at all, not even lines.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = not quiet and sys.stderr.isatty()
        self._bars: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._live:
            self._bars = _make_bars()
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Begin a stage; its bar replaces that of the stage before."""
        if self._bars is not None:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task = self._bars.add_task(printable(label), total=total, unit=unit, info="")

    def advance(self, count: int = 1) -> None:
        """Move the bar."""
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task, count)

    def show(self, info: str) -> None:
        """Put a few words behind the bar: a loss, a share of waiting. Nothing without a terminal."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, info=printable(info))

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._quiet:
            return
        if self._bars is not None:
            self._bars.console.print(line, soft_wrap=True)
        else:
            echo(line, err=True)


def _make_bars() -> Any:
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    class Rate(ProgressColumn):
        """Done, of how many, and how many a second."""

        def render(self, task: Any) -> Text:
            """Draw the column."""
            total = f"/{task.total:,.0f}" if task.total else ""
            speed = task.finished_speed or task.speed
            rate = f"  {speed:,.0f}/s" if speed else ""
            return styled(f"{task.completed:,.0f}{total} {task.fields.get('unit', '')}{rate}")

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[info]}", markup=False),
        console=make_console(stderr=True),
        transient=True,
    )
