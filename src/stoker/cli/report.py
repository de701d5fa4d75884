"""`stoker report RUN [RUN…]`: one page about a run, or about several side by side.

Enters: folders of runs, also of runs in progress or cut short. Leaves: one HTML page, PNG plots where
asked for; on stdout the page's path, or one JSON document. Costs under a second; a few with `--png`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import JsonOption, require_page, verb
from stoker.cli.terminal import echo, print_json
from stoker.errors import unwritable
from stoker.ownership import write_text

PAGE_NAME = "report.html"


@verb
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN")],
    *,
    out: Path | None = None,
    png: Path | None = None,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML page about a run: what it is worth, data, speed, waits, memory, loss, plan, config, machine.

    Options:
        runs: Folders of runs; ratios are to the first.
        out: The page; by default report.html in the run's folder.
        png: Also draw every chart as a PNG file into this folder.
    """
    from stoker.runs.evaluation import Evaluation
    from stoker.runs.figures import all_charts
    from stoker.runs.reading import find_previous, read_run
    from stoker.runs.record import compare
    from stoker.runs.run_page import run_page, verdict, with_unique_names

    require_page(out, "--out")
    records = with_unique_names([read_run(path) for path in runs])
    target = out or (records[0].folder / PAGE_NAME if len(records) == 1 else Path(PAGE_NAME))
    try:
        previous = find_previous(records[0]) if len(records) == 1 else None
        write_text(target, run_page(records, previous))
    except OSError as error:
        raise unwritable(target, error, "the page") from error
    plots: list[Path] = []
    if png is not None:
        from stoker.runs.figures import write_plots

        plots = write_plots(all_charts(records), png)
    if as_json:
        paths = {"page": str(target), "plots": [str(path) for path in plots]}
        print_json({**paths, "runs": compare(records)}, indent=2)
        return
    echo(verdict(records))
    for record in records:
        worth = Evaluation.from_json(record.result.get("evaluation"))
        if worth is not None:
            echo(f"{record.name}: {worth.verdict}" if len(records) > 1 else worth.verdict)
        for problem in record.problems:
            echo(f"{record.name}: {problem}" if len(records) > 1 else problem)
    if plots:
        echo(f"{len(plots)} plots in {png}")
    echo(f"page: {target}")
