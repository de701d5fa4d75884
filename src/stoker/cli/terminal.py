"""Everything that is printed goes through here: plain text without control characters.

Enters: lines and tables that hold names from files, and messages of servers. Leaves: the same without control
characters, without rich's markup, and without passwords, on stdout or stderr; JSON for `--json`. Costs the import
of rich, where a table or a style is wanted.

Every verb prints through here, so that one place decides. A string is one line: line ends in it are shown
escaped.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import typer

from stoker.address import masked_values
from stoker.display import printable, secret_hint
from stoker.strict_json import json_text
from stoker.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from stoker.runs.evaluation import Evaluation
    from stoker.store.reader import Store


STDOUT, STDERR = "standard output", "standard error"


@contextlib.contextmanager
def _named(stream: str) -> Iterator[None]:
    """Give an error of writing to a stream the stream's name."""
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

    `width` is for output that is no terminal: a pipe has no width, and rich would fold lines at 80.
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
            with _named(STDERR if self.stderr else STDOUT):
                super().print(*lines, **options)

        def render_str(self, text: str, **options: Any) -> Text:
            """Convert a string to text, as rich does for every line, cell and title."""
            return super().render_str(printable(text), **options)

    return Plain


def print_commands(console: Console, commands: Sequence[str]) -> None:
    """Print commands to type next, with a hint if a password was left out of one."""
    for words in commands:
        console.print(f"  {words}", soft_wrap=True)
    if hint := secret_hint(" ".join(commands)):
        console.print(f"  {hint}", soft_wrap=True)


# -- progress, on stderr where that is a terminal ---------------------------------------------------


class Bar:
    """A `stoker.report.Progress` for people. Use as a context manager."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet  # show nothing at all, not even lines
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
        """Shows the count done, the total and the rate per second."""

        def render(self, task: Any) -> Text:
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


# -- tables ---------------------------------------------------------------------------------------

_MOST_GROUPS = 24
_MOST_CONFUSED = 12
_MOST_INPUTS = 10


def make_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    left: Collection[int] = (0,),
) -> Table:
    """Return a table; numbers stand to the right. Columns of `left` hold text and may be folded."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        is_text = number in left
        table.add_column(head, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def plain_table(
    rows: Iterable[Sequence[str]], heads: Sequence[str] = (), right: Collection[int] = ()
) -> Table:
    """Return a table without lines; columns of `right` hold numbers."""
    from rich.table import Table

    table = Table(*heads, box=None, pad_edge=False, show_header=bool(heads))
    for row in rows:
        table.add_row(*row)
    for number in right:
        table.columns[number].justify = "right"
    return table


def known(value: object, spec: str = "") -> str:
    """Return a value as text; n/a where it is not known."""
    return "n/a" if value is None else format(value, spec)


def store_table(store: Store) -> Table:
    """Return one line per field: kind, rows, type, bytes."""
    import numpy as np

    title = f"{store.name}: {format_count(store.num_samples)} samples"
    table = make_table(title, ("field", "kind", "rows", "row", "bytes"), left=(0, 1, 3))
    for name, info in store.fields.items():
        dataset = {"dense": name, "ragged": f"{name}/values", "series": f"{name}/rows"}[info.kind]
        rows = sum(shard.rows[dataset] for shard in store.manifest.shards)
        row_bytes = int(np.prod(info.shape, dtype=np.int64)) * np.dtype(info.dtype).itemsize
        about = {"utf8": "text", "picture": "encoded pictures"}.get(
            info.encoding or ""
        ) or f"{np.dtype(info.dtype).name} {tuple(info.shape)}"
        if info.window:
            about += f", windows of {info.window}"
        table.add_row(name, info.kind, format_count(rows), about, format_bytes(rows * row_bytes))
    table.add_section()
    table.add_row(
        "on disk", "", "", format_count(len(store.shards), "shard"), format_bytes(store.num_bytes)
    )
    return table


def print_evaluation(console: Console, made: Evaluation) -> None:
    """Print an evaluation: overall beside the baselines, per group, the confusion; the verdict last."""
    from stoker.runs.evaluation import spell_interval

    name, _ = made.compared_by
    heads = ("metric", "model", "95 % interval", *made.baselines)
    table = make_table(format_count(made.num_samples, "test sample"), heads)
    for metric, value in made.metrics.items():
        span = spell_interval(made.intervals.get(metric), "{:.4g}".format)
        others = [_number(metrics.get(metric)) for metrics in made.baselines.values()]
        mark = " *" if metric == name else ""
        table.add_row(f"{metric}{mark}", _number(value), span, *others)
    table.caption = "* decides the comparison" if made.baselines else None
    console.print(table)
    for kind, rows in made.groups.items():
        names = list(dict.fromkeys(metric for row in rows.values() for metric in row))
        shown = dict(list(rows.items())[:_MOST_GROUPS])
        cut = f", {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""
        cells = ([who, *(_number(row.get(each)) for each in names)] for who, row in shown.items())
        console.print(make_table(f"by {kind}{cut}", (kind, *names), cells))
    if made.confusion is not None and len(made.confusion.names) <= _MOST_CONFUSED:
        names = list(made.confusion.names)
        counts = made.confusion.counts
        rows_of = ([who, *map(str, row)] for who, row in zip(names, counts, strict=True))
        console.print(make_table("confusion matrix", ("true \\ predicted", *names), rows_of))
    if made.importance:
        top = list(made.importance.items())[:_MOST_INPUTS]
        told = ", ".join(f"{who} {loss:.3g}" for who, loss in top)
        console.print(f"most important inputs ({name} lost when permuted): {told}", soft_wrap=True)
    for note in made.notes:
        console.print(note, soft_wrap=True)
    if made.baselines:
        console.print(made.verdict, soft_wrap=True)


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "n/a"
    # Counts of samples and trades stand among shares: 16,210, not 1.621e+04.
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
