"""`stoker export CKPT OUT`: a trained model for other programs.

Enters: a checkpoint of `stoker train`. Leaves: an ONNX graph (`OUT.onnx`) that has been compared with torch,
or the weights alone (`OUT.safetensors`), which every verb takes in the place of a checkpoint. Costs: seconds
to a minute for a graph. Needs no network and no account.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.predict import CheckpointArgument
from stoker.cli.terminal import echo, print_json
from stoker.display import command, quoted

if TYPE_CHECKING:
    from stoker.recipes.export.trained import Exported


def export(
    checkpoint: CheckpointArgument,
    out: Annotated[
        Path,
        typer.Argument(help="OUT.onnx: a graph; OUT.safetensors: weights.", show_default=False),
    ],
    opset: Annotated[
        int | None,
        typer.Option(
            "--opset", help="Version of ONNX's operators, 18 to 23.", show_default="torch's"
        ),
    ] = None,
    batch: Annotated[
        str, typer.Option("--batch", help="Samples per call: a number, or dynamic for any.")
    ] = "dynamic",
    size: Annotated[
        str | None,
        typer.Option("--size", help="Of images: HEIGHTxWIDTH.", show_default="any size"),
    ] = None,
    repairs: Annotated[
        bool,
        typer.Option(
            "--repairs/--no-repairs",
            help="Make the repairs of the training store inside the graph, or leave them to the caller.",
        ),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
) -> None:
    """Write a trained model as an ONNX graph, or its weights as safetensors."""
    import dataclasses

    from stoker.errors import InputError
    from stoker.recipes.export.ports import Sizes
    from stoker.recipes.export.trained import export_trained
    from stoker.recipes.export.weights_file import SUFFIX
    from stoker.recipes.inference import load_trained
    from stoker.sources.images import parse_size

    for_graphs = {
        "--opset": opset,
        "--size": size,
        "--batch": None if batch == "dynamic" else batch,
    }
    given = [name for name, value in for_graphs.items() if value is not None]
    given += [] if repairs else ["--no-repairs"]
    if given and out.suffix == SUFFIX:
        raise InputError(
            f"{', '.join(given)}: {out} holds weights, which have no such thing.",
            "these options for a graph, OUT.onnx",
            quoted(out.with_suffix(".onnx")),
        )
    sizes = Sizes(
        batch=_parse_batch(batch),
        image=None if size is None else parse_size(size),
    )
    made = export_trained(load_trained(checkpoint), out, sizes, opset=opset, repairs=repairs)
    if as_json:
        facts = {**dataclasses.asdict(made), "path": str(made.path)}
        print_json(facts)
        return
    _print(made)


def _parse_batch(text: str) -> int | None:
    from stoker.errors import InputError

    if text == "dynamic":
        return None
    if not text.isdecimal():
        raise InputError(f"--batch is {text!r}.", "dynamic, or 1 or more", "--batch dynamic")
    return int(text)


def _print(made: Exported) -> None:
    from stoker.units import format_bytes

    for name, port in made.inputs.items():
        shape = ", ".join(map(str, port["shape"]))
        echo(f"input  {name}: {port['dtype']} ({shape}): {port['about']}")
    for name in made.outputs:
        echo(f"output {name}")
    for note in made.notes:
        echo(f"note: {note}")
    size = format_bytes(made.size_bytes)
    if made.opset is None:
        echo(
            f"{made.path}: weights of {made.recipe}, {size}; "
            f"use it like a checkpoint: {command('stoker', 'predict', made.path)} STORE OUT.parquet"
        )
        return
    compared = (
        "not compared with torch: pip install onnxruntime"
        if made.difference is None
        else f"onnxruntime differs from torch by {made.difference:.1e} of the largest output"
    )
    echo(f"{made.path}: {made.recipe}, opset {made.opset}, {size}; {compared}")
