"""`stoker export CKPT OUT`: a trained model for other programs, or for a CPU.

Enters: a checkpoint of `stoker train`. Leaves: an ONNX graph (`OUT.onnx`) that has been compared with torch,
or the weights alone (`OUT.safetensors`), which every verb takes instead of a checkpoint. With `--int8`: a
checkpoint of int8 weights that `stoker predict` takes on a CPU, with size, latency and the recipe's metric before
and after. Costs: seconds to a minute for a graph; two passes over a split for int8. Needs no network and no account.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.address import shown
from stoker.cli.options import JsonOption, verb
from stoker.cli.predict import CheckpointArgument
from stoker.cli.terminal import echo, make_console, plain_table, print_json
from stoker.display import command, quoted
from stoker.errors import InputError
from stoker.units import format_bytes

if TYPE_CHECKING:
    from stoker.recipes.export.trained import Exported


@verb
def export(
    checkpoint: CheckpointArgument,
    out: Path,
    *,
    opset: Annotated[int | None, typer.Option(show_default="torch's")] = None,
    batch: Annotated[str, typer.Option("--batch", "--batch-size")] = "dynamic",
    size: Annotated[str | None, typer.Option(show_default="any size")] = None,
    repairs: Annotated[bool, typer.Option("--repairs/--no-repairs")] = True,
    int8: bool = False,
    store: Annotated[
        Path | None, typer.Option(show_default="the run's own, if it is there")
    ] = None,
    split: Annotated[str | None, typer.Option(show_default="test")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a trained model as an ONNX graph, as safetensors weights, or in int8 for a CPU.

    Options:
        out: OUT.onnx: a graph; OUT.safetensors: weights; with --int8, OUT.pt: a checkpoint.
        opset: Version of ONNX's operators, 18 to 23.
        batch: Samples per call: a number, or dynamic for any. With --int8: per measured pass, 64.
        size: Size of images, HEIGHTxWIDTH.
        repairs: Make the repairs of the training store inside the graph, or leave them to the caller.
        int8: Write an int8 checkpoint for CPUs, and measure what that changes.
        store: With --int8: store folder, HDF5 file or URL to measure on.
        split: With --int8: samples for the metric.
    """
    from stoker.recipes.contract import Sizes
    from stoker.recipes.export.trained import export_trained
    from stoker.recipes.inference import load_trained
    from stoker.sources.images import parse_size

    of_graphs = {
        "--opset": opset,
        "--size": size,
        "--batch": None if int8 or batch == "dynamic" else batch,
        "--no-repairs": None if repairs else True,
    }
    _check_options(
        checkpoint,
        out,
        int8,
        [name for name, value in of_graphs.items() if value is not None],
        [name for name, value in {"--store": store, "--split": split}.items() if value is not None],
    )
    if batch != "dynamic" and not batch.isdecimal():
        raise InputError(f"--batch is {batch!r}.", "dynamic, or 1 or more", "--batch dynamic")
    count = None if batch == "dynamic" else int(batch)
    sizes = Sizes(batch=count, image=None if size is None else parse_size(size))
    if int8:
        num_samples = 64 if count is None else count
        _export_int8(checkpoint, out, store, split or "test", num_samples, as_json)
        return
    made = export_trained(load_trained(checkpoint), out, sizes, opset=opset, repairs=repairs)
    if as_json:
        print_json({**dataclasses.asdict(made), "path": str(made.path)})
    else:
        _print(made)


def _check_options(
    checkpoint: Path, out: Path, int8: bool, of_graphs: list[str], of_int8: list[str]
) -> None:
    """Refuse options that this kind of output file does not use."""
    from stoker.recipes.export.trained import ONNX_SUFFIX
    from stoker.recipes.export.weights_file import SUFFIX

    if int8 and out.suffix in (ONNX_SUFFIX, SUFFIX):
        raise InputError(
            f"--int8 writes a checkpoint, and {out} ends with {out.suffix!r}.",
            "OUT.pt",
            quoted(out.with_suffix(".pt")),
        )
    if of_graphs and int8:
        raise InputError(
            f"{', '.join(of_graphs)}: an int8 checkpoint has no such thing.",
            "these options for a graph, OUT.onnx",
            command("stoker", "export", checkpoint, out, "--int8"),
        )
    if of_graphs and out.suffix == SUFFIX:
        raise InputError(
            f"{', '.join(of_graphs)}: {out} holds weights, which have no such thing.",
            "these options for a graph, OUT.onnx",
            quoted(out.with_suffix(ONNX_SUFFIX)),
        )
    if of_int8 and not int8:
        raise InputError(
            f"{', '.join(of_int8)}: only int8 weights are measured on a store.",
            "these options with --int8",
            command("stoker", "export", checkpoint, out.with_suffix(".pt"), "--int8"),
        )


def _print(made: Exported) -> None:
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


# -- int8 ------------------------------------------------------------------------------------------


def _export_int8(
    checkpoint: Path, out: Path, store: Path | None, split: str, batch_size: int, as_json: bool
) -> None:
    from stoker.recipes.inference import find_training_store, load_trained, quantize_trained

    trained = load_trained(checkpoint)
    place = store or find_training_store(checkpoint)
    report, metric = quantize_trained(trained, out, place, split=split, batch_size=batch_size)
    if as_json:
        where = {"out": str(out), "store": None if place is None else shown(place)}
        size = {"size_bytes": out.stat().st_size}
        print_json({**where, "metric": metric, **report.to_json(), **size})
        return
    console = make_console(width=160)
    console.print(f"int8 by {report.api}: {len(report.modules)} modules")
    rows = [("weights", format_bytes(report.bytes_before), format_bytes(report.bytes_after))]
    if report.latency_before is not None:
        rows.append(("latency of a batch", str(report.latency_before), str(report.latency_after)))
    if metric is not None:
        rows.append((metric, f"{report.metric_before:.5g}", f"{report.metric_after:.5g}"))
    console.print(plain_table(rows, ("", "float32", "int8"), right=(1, 2)))
    if report.largest_difference is not None:
        relative = report.relative_difference or 0.0
        console.print(f"outputs differ by at most {report.largest_difference:.3g} ({relative:.2%})")
    for note in report.notes:
        console.print(f"note: {note}")
    if place is None:
        echo("latency and accuracy were not measured: --store STORE does")
    echo(
        f"{out}: use it like any checkpoint, on a CPU: {command('stoker', 'predict', out)} STORE OUT.parquet"
    )
