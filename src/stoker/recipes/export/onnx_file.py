"""A graph as an ONNX file: traced, named, compared with torch, and written whole or not at all.

Enters: a graph of plain tensors, and what the file shall say about itself. Leaves: one `.onnx` file with
the weights inside. Costs a trace: 2 to 60 seconds, most of it for sizes that stay free.

The file holds no path of this machine: torch writes a stack trace beside every node, which is removed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.errors import InputError, MissingExtraError, require_utf8, unwritable
from stoker.ownership import SIGNATURE, writing
from stoker.recipes.contract import IMAGE_SIZES
from stoker.recipes.export.graph import Deployed

OPSETS = (18, 23)
"""First and last: what torch writes and converts to."""
_TOLERANCE = 1e-3
_LOUD = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        opset: Version of ONNX's operators.
        difference: Largest difference of a float output from torch's, over that output's largest
            magnitude; None where onnxruntime is not installed.
    """

    opset: int
    difference: float | None


def write_onnx(
    graph: Deployed, out: str | Path, about: Mapping[str, str], opset: int | None = None
) -> Written:
    """Write a graph; replaces an older file of this name when all is well.

    `about` becomes the metadata of the file; `opset` None is torch's own.
    """
    if opset is not None and not OPSETS[0] <= opset <= OPSETS[1]:
        raise InputError(f"--opset is {opset}.", f"{OPSETS[0]} to {OPSETS[1]}", "leave --opset out")
    require_utf8(out)
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError.for_package(package, "onnx", "export to ONNX")
    import onnx_ir

    model = _trace(graph, opset)
    made = int(model.opset_imports[""])
    if opset not in (None, made):
        raise InputError(
            f"torch writes this model as opset {made}, and it cannot be turned into {opset}.",
            f"opset {made}",
            f"--opset {made}",
        )
    _label(model, about)
    path = Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path) as temporary:
            onnx_ir.save(model, temporary)
            difference = _compare(graph, temporary)
    except OSError as error:
        raise unwritable(path, error) from error
    return Written(made, difference)


def _trace(graph: Deployed, opset: int | None) -> Any:
    named = {name: torch.export.Dim(name, min=1) for name in graph.free}
    # Of an image's size torch cannot prove what holds for every size; `_compare` tries another one.
    loose = {name: torch.export.Dim.AUTO for name in graph.free if name in IMAGE_SIZES}
    traced = _by_axis(graph, named | loose)
    tracing = graph.layout.tracing
    with (
        _silence(),
        contextlib.nullcontext({}) if tracing is None else tracing(graph) as translations,
    ):
        # Traced apart, because torch.onnx would fix a size that cannot stay free without a word.
        program = torch.onnx.export(
            torch.export.export(graph, graph.draw({}), dynamic_shapes=(traced,), strict=False),
            dynamo=True,
            verbose=False,
            dynamic_shapes=(_by_axis(graph, named),),  # for their names
            input_names=[port.name for port in graph.ports],
            output_names=list(graph.outputs),
            opset_version=opset,
            custom_translation_table=translations,
        )
    assert program is not None
    return program.model


def _by_axis(graph: Deployed, free: Mapping[str, Any]) -> tuple[dict[int, Any], ...]:
    """Return per port the free sizes by axis, as torch wants them."""
    return tuple(
        {axis: free[size] for axis, size in enumerate(port.shape) if isinstance(size, str)}
        for port in graph.ports
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep torch's notes to its own developers away from the user."""
    loggers = [logging.getLogger(name) for name in _LOUD]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _label(model: Any, about: Mapping[str, str]) -> None:
    """Say whose model this is, and remove what torch's exporter noted beside every node."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    model.metadata_props.update({"stoker.generator": SIGNATURE, **about})
    model.producer_name = "stoker"
    model.producer_version = about["stoker.version"]
    model.doc_string = about.get("stoker.inputs")


def _compare(graph: Deployed, path: Path) -> float | None:
    """Return how far onnxruntime is from torch, on other values and other sizes than were traced."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    values = graph.draw({name: 11 + 3 * number for number, name in enumerate(graph.free)}, seed=1)
    with torch.no_grad():
        wanted = [value.numpy() for value in graph(*values)]
    feed = {port.name: value.numpy() for port, value in zip(graph.ports, values, strict=True)}
    found = session.run(list(graph.outputs), feed)
    worst = max(_difference(*pair) for pair in zip(found, wanted, strict=True))
    if not worst <= _TOLERANCE:
        raise RuntimeError(
            f"onnxruntime {onnxruntime.__version__} differs from torch by {worst:.3g} of the largest "
            "output; nothing was written."
        )
    return worst


def _difference(found: Any, wanted: Any) -> float:
    """Return the largest difference over the largest magnitude; 0 for whole numbers of the same shape.

    A class is the place of the largest score: where two are equal but for rounding, it may be either.
    """
    if found.shape != wanted.shape:
        return float("inf")
    if wanted.dtype.kind != "f":
        return 0.0
    largest = np.abs(wanted).max(initial=0.0) or 1.0
    return float(np.abs(found - wanted).max(initial=0.0) / largest)
