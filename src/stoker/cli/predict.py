"""`stoker predict CKPT INPUT OUT`: a trained model's prediction for every sample of a store or row of raw input.

Enters: a checkpoint of `stoker train` (or an int8 one of `stoker export --int8`) and the input: a store, or raw
files like those that the training store was packed from. No targets are needed; where there are some, the predictions
are evaluated. Leaves: a file with the key of each sample or row and its prediction. Costs one forward pass per sample,
in constant memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.data_options import Text, refuse_given
from stoker.cli.options import DeviceOption, JsonOption, verb
from stoker.cli.terminal import Bar, echo, make_console, print_evaluation, print_json
from stoker.display import command
from stoker.errors import InputError
from stoker.units import format_bytes, format_count, format_seconds

CheckpointArgument = Annotated[
    Path, typer.Argument(help="best.pt or step-*.pt of a run, or exported .safetensors.")
]


@verb
def predict(
    checkpoint: CheckpointArgument,
    given: Annotated[Path, typer.Argument(metavar="INPUT")],
    out: Path,
    *,
    split: str = "all",
    text: Text,
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the model's prediction for every sample of a store, or every row of raw input, with its key.

    Options:
        given: Raw files, or a folder of them, like those that were packed for training; or a store.
        out: What to write, by its ending: .csv, .parquet, .jsonl, or the recipe's own.
        split: all, train, val or test; of a store.
        batch_size: Samples per forward pass.
    """
    from stoker.recipes.answers import is_store, predict_file
    from stoker.recipes.inference import load_trained

    if given.suffix in (".pt", ".safetensors") and checkpoint.suffix not in (".pt", ".safetensors"):
        raise InputError(
            f"the checkpoint is {checkpoint}, and INPUT is {given}.",
            "first the checkpoint, then INPUT",
            command("stoker", "predict", given, checkpoint, out),
        )
    if given.exists() and is_store(given):
        refuse_given(text, given)
    trained = load_trained(checkpoint)
    with Bar(quiet=as_json) as bar:
        report = predict_file(
            trained,
            given,
            out,
            split=split,
            batch_size=batch_size,
            device=device,
            progress=bar,
            text=text.options(),
        )
    size = out.stat().st_size if out.is_file() else None
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
            "evaluation": None if report.evaluation is None else report.evaluation.to_json(),
        }
        print_json(facts)
        return
    for note in report.notes:
        echo(note)
    if report.evaluation is not None:
        print_evaluation(make_console(width=200), report.evaluation)
    echo(
        f"{out}: {format_count(report.num_rows, 'row')} of {', '.join(report.columns)}; "
        f"{'' if size is None else f'{format_bytes(size)} '}in {format_seconds(report.seconds)}, {rate:,.0f} samples/s"
    )
