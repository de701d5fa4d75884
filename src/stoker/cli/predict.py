"""`stoker predict CKPT INPUT OUT`: a trained model's answer for every sample of a store or row of a table.

Enters: a checkpoint of `stoker train` (or an int8 one of `stoker export --int8`) and a store, or a raw table for a
model that was trained on one; no targets are needed. Leaves: a CSV or Parquet file with the number of the sample or row
and the predictions. Costs one forward pass per sample, in constant memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import DeviceOption, JsonOption
from stoker.cli.pack import Decimal, Encoding, Header, Separator
from stoker.cli.terminal import echo, print_json

CheckpointArgument = Annotated[
    Path,
    typer.Argument(
        help="best.pt or step-*.pt of a run, or exported .safetensors.", show_default=False
    ),
]


def predict(
    checkpoint: CheckpointArgument,
    store: Annotated[
        Path,
        typer.Argument(
            help="Store folder, HDF5 file or URL; or a CSV, Parquet or Feather file of new rows.",
            show_default=False,
            metavar="INPUT",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            help="The file to write, .csv or .parquet by its ending.", show_default=False
        ),
    ],
    split: Annotated[
        str, typer.Option("--split", help="all, train, val or test; of a store.")
    ] = "all",
    sep: Separator = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    header: Header = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Samples per forward pass.")
    ] = 256,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the model's prediction for every sample, or every row of a raw table, to a CSV or Parquet file."""
    from stoker.cli.progress import Bar
    from stoker.recipes.inference import load_trained, predict_store
    from stoker.recipes.raw_tables import predict_table
    from stoker.sources.tables import TextOptions
    from stoker.sources.tables.reading import is_table
    from stoker.units import format_bytes, format_count, format_seconds

    trained = load_trained(checkpoint)
    with Bar(quiet=as_json) as bar:
        if store.is_file() and is_table(store):
            text = TextOptions(sep, decimal, encoding, header)
            report = predict_table(
                trained, store, out, text=text, batch_size=batch_size, device=device, progress=bar
            )
        else:
            report = predict_store(
                trained, store, out, split=split, batch_size=batch_size, device=device, progress=bar
            )
    size = out.stat().st_size
    rate = report.num_rows / max(report.seconds, 1e-9)
    if as_json:
        facts = {
            "out": str(out),
            "recipe": trained.chosen.recipe.name,
            "num_rows": report.num_rows,
            "columns": list(report.columns),
            "seconds": round(report.seconds, 3),
            "samples_per_second": round(rate, 1),
            "size_bytes": size,
            "notes": list(report.notes),
        }
        print_json(facts)
        return
    for note in report.notes:
        echo(note)
    echo(
        f"{out}: {format_count(report.num_rows, 'row')} of {', '.join(report.columns)}; "
        f"{format_bytes(size)} in {format_seconds(report.seconds)}, {rate:,.0f} samples/s"
    )
