"""A progress bar on stderr, with rate and time left; silent when stderr is not a terminal."""

from __future__ import annotations

import sys
from typing import Any, Self

from stoker.cli.terminal import echo, make_console, styled
from stoker.display import printable


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
    from rich.text import Text

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
