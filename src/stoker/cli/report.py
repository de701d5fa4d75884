"""`stoker report RUN [RUN…]`: one page about a run, or about several side by side.

Enters: folders of runs, also of runs that are going on or were cut. Leaves: one HTML page, PNG plots where
asked for; on stdout the page's path, or one JSON document. Costs under a second; a few with `--png`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import JsonOption
from stoker.cli.terminal import echo, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.runs.record import RunRecord

PAGE_NAME = "report.html"


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Folders of runs; ratios are to the first.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The page; by default report.html in the run's folder.", show_default=False),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", help="Also draw every chart as a PNG file into this folder.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Write an HTML page about a run: speed, waits, memory, GPU, loss, plan, events, config, machine."""
    from stoker.runs.reading import read_run
    from stoker.runs.run_page import run_page, verdict, with_unique_names

    records = with_unique_names([read_run(path) for path in runs])
    target = out or (records[0].folder / PAGE_NAME if len(records) == 1 else Path(PAGE_NAME))
    _write(target, run_page(records))
    plots = _draw(records, png) if png is not None else []
    if as_json:
        _print_json(records, target, plots)
        return
    echo(verdict(records))
    for record in records:
        for problem in record.problems:
            echo(f"{record.name}: {problem}" if len(records) > 1 else problem)
    if plots:
        echo(f"{len(plots)} plots in {png}")
    echo(f"page: {target}")


def _write(target: Path, text: str) -> None:
    from stoker.errors import unwritable
    from stoker.ownership import write_text

    try:
        write_text(target, text)
    except OSError as error:
        raise unwritable(target, error, "the page") from error


def _draw(records: Sequence[RunRecord], folder: Path) -> list[Path]:
    from stoker.runs.figures import all_charts
    from stoker.runs.plots import write_plots

    return write_plots(all_charts(records), folder)


def _print_json(records: Sequence[RunRecord], target: Path, plots: list[Path]) -> None:

    from stoker.runs.comparison import compare

    document = {
        "page": str(target),
        "plots": [str(path) for path in plots],
        "runs": compare(records),
    }
    print_json(document, indent=2)
