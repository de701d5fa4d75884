"""`stoker quantize CKPT OUT`: int8 weights for inference on a CPU, and what they cost.

Enters: a checkpoint of `stoker train`; a store to measure on. Leaves: an int8 checkpoint that
`stoker predict` takes; size, latency and the recipe's metric before and after. Costs two passes over the
split that is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.predict import CheckpointArgument
from stoker.cli.terminal import echo, make_console, print_json
from stoker.display import command

if TYPE_CHECKING:
    from stoker.train.quantize import QuantizeReport


def quantize(
    checkpoint: CheckpointArgument,
    out: Annotated[Path, typer.Argument(help="The int8 checkpoint to write.", show_default=False)],
    store: Annotated[
        Path | None,
        typer.Option(
            "--store", help="Store folder, HDF5 file or URL to measure on; by default the run's own, if it is there.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Samples for the metric.")] = "test",
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Samples per measured pass.")
    ] = 64,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
) -> None:  # fmt: skip
    """Turn Linear and LSTM weights into int8, and measure what that changes."""
    from stoker.address import shown
    from stoker.recipes.inference import find_training_store, load_trained, quantize_trained

    trained = load_trained(checkpoint)
    place = store or find_training_store(checkpoint)
    report, metric = quantize_trained(trained, out, place, split=split, batch_size=batch_size)
    if as_json:
        facts = {
            "out": str(out),
            "store": None if place is None else shown(place),
            "metric": metric,
        }
        print_json({**facts, **report.to_json(), "size_bytes": out.stat().st_size})
        return
    _print(report, metric)
    if place is None:
        echo("latency and accuracy were not measured: --store STORE does")
    echo(
        f"{out}: use it like any checkpoint, on a CPU: {command('stoker', 'predict', out)} STORE OUT.parquet"
    )


def _print(report: QuantizeReport, metric: str | None) -> None:
    from rich.table import Table

    from stoker.units import format_bytes

    console = make_console(width=160)
    console.print(f"int8 by {report.api}: {len(report.modules)} modules")
    table = Table(box=None, pad_edge=False)
    for head in ("", "float32", "int8"):
        table.add_column(head, justify="left" if not head else "right")
    table.add_row("weights", format_bytes(report.bytes_before), format_bytes(report.bytes_after))
    if report.latency_before is not None:
        table.add_row("latency of a batch", str(report.latency_before), str(report.latency_after))
    if metric is not None:
        table.add_row(metric, f"{report.metric_before:.5g}", f"{report.metric_after:.5g}")
    console.print(table)
    if report.largest_difference is not None:
        relative = report.relative_difference or 0.0
        console.print(f"outputs differ by at most {report.largest_difference:.3g} ({relative:.2%})")
    for note in report.notes:
        console.print(f"note: {note}")
