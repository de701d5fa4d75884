"""A trained recipe as one function from named input tensors to named predictions, and as an ONNX file.

Enters: a model from a checkpoint, the sizes to fix, and metadata for the file. Leaves: a module whose inputs and
outputs are single tensors, so that it can be traced; example values; one `.onnx` file that contains the weights, was
compared with torch, and is written whole or not at all. Costs: for the file a trace, 2 to 60 seconds, most of it for
sizes that stay free. Reads no data.

The graph contains all steps of a prediction: the repairs of the training store, scalers, the normalisation of
images, softmax, and the conversion back to the units of the targets. Outputs have the names of `stoker predict`.
`Recipe.export_layout` defines the inputs. The file contains no path of this machine: the stack trace that torch
stores with every node is removed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.display import command
from stoker.errors import InputError, MissingExtraError, require_utf8, unwritable
from stoker.ownership import SIGNATURE, writing
from stoker.recipes.contract import BATCH, IMAGE_SIZES, Columns, Layout, Port, Sizes
from stoker.recipes.inference import Trained
from stoker.recipes.registry import blamed
from stoker.store.repairs import FittedRepair

Tensor = torch.Tensor


class Deployed(torch.nn.Module):
    """The exported module: `forward` takes one tensor per port, and returns one per name in `outputs`."""

    def __init__(self, trained: Trained, layout: Layout, repairs: bool) -> None:
        super().__init__()
        self.layout = layout
        self.model = trained.model
        facts = trained.facts
        self.repaired = tuple(facts["repairs"]) if repairs else ()
        self.repairs = torch.nn.ModuleList(
            Repairs(
                [FittedRepair.from_json(entry) for entry in facts["repairs"][field]],
                facts["columns"][field],
            )
            for field in self.repaired
        )
        self.ports: tuple[Port, ...] = tuple(layout.ports)
        with torch.no_grad():
            self.outputs = tuple(self.columns(*self.draw({})))
        self.ports = tuple(replace(port, name=self._name(port)) for port in layout.ports)
        self.eval().requires_grad_(False)

    def _name(self, port: Port) -> str:
        name = re.sub(r"\W", "_", port.name or port.key)
        return f"input_{name}" if name in self.outputs else name

    def columns(self, *values: Tensor) -> Columns:
        """Return the predictions by name."""
        named = {port.key: value for port, value in zip(self.ports, values, strict=True)}
        for field, repair in zip(self.repaired, self.repairs, strict=True):
            named[field] = repair(named[field])
        return self.layout.predict(self.model, self.layout.read(named))

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the predictions in the order of `outputs`."""
        return tuple(self.columns(*values).values())

    @property
    def free(self) -> tuple[str, ...]:
        """Names of the sizes that are free, each once."""
        named = [size for port in self.ports for size in port.shape if isinstance(size, str)]
        return tuple(dict.fromkeys(named))

    def draw(self, sizes: Mapping[str, int], seed: int = 0) -> tuple[Tensor, ...]:
        """Return random example values for every port.

        Args:
            sizes: Values of free sizes by name; sizes that are left out are small.
            seed: The same values for the same seed.
        """
        generator = torch.Generator().manual_seed(seed)
        # All sizes are different and at least 2: torch fixes a size of 1, and may take equal sizes for the same one.
        small = {name: 5 + 2 * number for number, name in enumerate(self.free)}
        small |= {BATCH: 2, "height": 40, "width": 48}
        return tuple(port.draw({**small, **sizes}, generator) for port in self.ports)


def deploy(trained: Trained, sizes: Sizes, *, repairs: bool = True) -> Deployed:
    """Return the graph of a trained recipe.

    Args:
        trained: A model with float weights.
        sizes: Sizes to fix.
        repairs: Put the repairs of the training store into the graph; if False, inputs must be repaired already.
    """
    recipe = trained.chosen.recipe
    if sizes.batch is not None and sizes.batch < 1:
        raise InputError(f"--batch is {sizes.batch}.", "dynamic, or 1 or more", "--batch dynamic")
    with blamed(recipe, "export_layout"):
        layout = recipe.export_layout(trained.made, trained.facts)
    if layout is None:
        raise InputError(
            f"the recipe {recipe.name!r} has no ONNX graph: it does not define export_layout.",
            "its weights as .safetensors, or a recipe with export_layout",
            command("stoker", "export", trained.loaded.saved.path, "weights.safetensors"),
        )
    fixed: dict[int | str, int] = {} if sizes.batch is None else {BATCH: sizes.batch}
    if sizes.image is not None:
        if not {*IMAGE_SIZES} & {size for port in layout.ports for size in port.shape}:
            raise InputError(
                f"--size was given, and the recipe {recipe.name!r} takes no images.",
                "--size for a recipe of images",
                "leave --size out",
            )
        fixed |= dict(zip(IMAGE_SIZES, sizes.image, strict=True))
    ports = [
        replace(port, shape=tuple(fixed.get(size, size) for size in port.shape))
        for port in layout.ports
    ]
    return Deployed(trained, replace(layout, ports=ports), repairs)


# -- the repairs of a training store, for tensors ---------------------------------------------------


_LARGEST = float(np.finfo(np.float32).max)


class Repairs(torch.nn.Module):
    """`stoker.store.repairs.apply_repairs` for tensors: computed in float64, rounded once per repair."""

    def __init__(self, fitted: Sequence[FittedRepair], columns: Sequence[str]) -> None:
        super().__init__()
        self.fitted = tuple(fitted)
        self.places = [[columns.index(name) for name in repair.columns] for repair in fitted]
        for number, (repair, places) in enumerate(zip(fitted, self.places, strict=True)):
            changed = places[:1] if repair.spec.name == "min-denominator" else places
            mask = torch.zeros(len(columns), dtype=torch.bool)
            mask[changed] = True
            # Columns without this repair are computed with 1, which is always valid, and then masked out.
            low, high = (torch.ones(len(columns), dtype=torch.float64) for _ in range(2))
            if repair.low:
                low[places] = torch.tensor(repair.low, dtype=torch.float64)
                high[places] = torch.tensor(repair.high, dtype=torch.float64)
            if repair.spec.name == "clip":
                # A bound beyond float32 would become infinite again when it is rounded.
                low, high = low.clamp(min=-_LARGEST), high.clamp(max=_LARGEST)
            for name, value in (("mask", mask), ("low", low), ("high", high)):
                self.register_buffer(f"{name}_{number}", value)

    def forward(self, values: Tensor) -> Tensor:
        """Return repaired `(..., columns)`."""
        values = values if values.dtype == torch.float64 else values.float()
        for number, repair in enumerate(self.fitted):
            mask, low, high = (
                getattr(self, f"{part}_{number}") for part in ("mask", "low", "high")
            )
            x = values.double()
            if repair.spec.name == "min-denominator":
                _, top, bottom = (x[..., place : place + 1] for place in self.places[number])
                least = torch.clamp(bottom.abs(), min=repair.spec.numbers[0])
                made = top / torch.where(bottom < 0, -least, least)
            else:
                made = _repair(repair.spec.name, x, low, high)
            values = torch.where(mask, made.to(values.dtype), values)
        return values


def _repair(name: str, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    if name == "clip":
        # By comparison, since runtimes differ in the minimum of NaN.
        return torch.where(x < low, low, torch.where(x > high, high, x))
    if name == "robust":
        return (x - low) / high
    if name == "asinh":
        return _asinh(x / high)
    return torch.where(torch.isnan(x), low, x)


def _asinh(x: Tensor) -> Tensor:
    """Return asinh by logarithms, in float64: onnxruntime 1.31 implements its own for float32 only."""
    size = x.abs()
    # 1 + size loses the digits of a small size; the first terms of the series keep them.
    small = size - size**3 / 6 + 3 * size**5 / 40
    made = torch.where(size < 1e-3, small, torch.log(size + torch.sqrt(size * size + 1)))
    return torch.where(x < 0, -made, made)


# -- the file -------------------------------------------------------------------------------------

OPSETS = (18, 23)  # first and last: what torch writes and converts to
_TOLERANCE = 1e-3
_LOUD = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


def write_onnx(
    graph: Deployed, out: str | Path, about: Mapping[str, str], opset: int | None = None
) -> tuple[int, float | None]:
    """Write a graph as an ONNX file; an older file of this name is replaced after the comparison succeeded.

    Returns the opset version, and the largest difference between onnxruntime's and torch's float outputs, relative
    to the output's largest magnitude; None if onnxruntime is not installed. `about` becomes the metadata of the file;
    `opset` None takes torch's default.
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
    return made, difference


def _trace(graph: Deployed, opset: int | None) -> Any:
    named = {name: torch.export.Dim(name, min=1) for name in graph.free}
    # For images torch cannot prove that the graph is right for every size; `_compare` tests another size.
    loose = {name: torch.export.Dim.AUTO for name in graph.free if name in IMAGE_SIZES}
    traced = _by_axis(graph, named | loose)
    tracing = graph.layout.tracing
    with (
        _silence(),
        contextlib.nullcontext({}) if tracing is None else tracing(graph) as translations,
    ):
        # Traced separately: torch.onnx would silently fix a size that cannot stay free.
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
    """Return the free sizes of each port by axis, in the form of torch's `dynamic_shapes`."""
    return tuple(
        {axis: free[size] for axis, size in enumerate(port.shape) if isinstance(size, str)}
        for port in graph.ports
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hide warnings and log lines of torch's exporter, which are for its developers."""
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
    """Write the metadata, and remove the notes of torch's exporter at every node."""
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
    """Return the difference between onnxruntime and torch, for other values and sizes than the traced ones."""
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

    Whole numbers are not compared: a class is the index of the largest score, which rounding may change.
    """
    if found.shape != wanted.shape:
        return float("inf")
    if wanted.dtype.kind != "f":
        return 0.0
    largest = np.abs(wanted).max(initial=0.0) or 1.0
    return float(np.abs(found - wanted).max(initial=0.0) / largest)
