"""`stoker predict CKPT STORE OUT.parquet`: a trained model's answer for every sample.

Enters: a checkpoint of `stoker train` (or an int8 one of `stoker export --int8`) and a store; no targets are
needed. Leaves: a parquet file with the sample's number and the predictions. Costs one forward pass per
sample, in constant memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import DeviceOption, JsonOption, StoreArgument
from stoker.cli.terminal import echo, print_json

CheckpointArgument = Annotated[
    Path,
    typer.Argument(
        help="best.pt or step-*.pt of a run, or exported .safetensors.", show_default=False
    ),
]


def predict(
    checkpoint: CheckpointArgument,
    store: StoreArgument,
    out: Annotated[Path, typer.Argument(help="The parquet file to write.", show_default=False)],
    split: Annotated[str, typer.Option("--split", help="all, train, val or test.")] = "all",
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Samples per forward pass.")
    ] = 256,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the model's prediction for every sample to a parquet file."""
    from stoker.cli.progress import Bar
    from stoker.recipes.inference import load_trained, predict_store
    from stoker.units import format_bytes, format_count, format_seconds

    trained = load_trained(checkpoint)
    with Bar(quiet=as_json) as bar:
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
