"""A trained recipe for other programs: an ONNX graph, or its weights alone.

Enters: a model from a checkpoint, and a file name whose ending chooses the format. Leaves: the file, and notes for
the user. Costs: seconds to a minute for a graph; one read and write of the weights otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stoker
from stoker.display import quoted
from stoker.errors import InputError
from stoker.ownership import check_output, has_signature
from stoker.recipes.contract import Sizes
from stoker.recipes.export.graph import Deployed, deploy, write_onnx
from stoker.recipes.export.weights_file import SUFFIX, is_weights, write_weights
from stoker.recipes.inference import Trained, find_training_store
from stoker.store.reader import open_store
from stoker.strict_json import json_text

ONNX_SUFFIX = ".onnx"


@dataclass(frozen=True)
class Exported:
    """The result of `export_trained`."""

    path: Path  # the file
    recipe: str  # name of the recipe
    size_bytes: int  # of the file
    # input name to field, type, shape and meaning; empty for weights
    inputs: Mapping[str, Mapping[str, Any]]
    outputs: tuple[str, ...]  # names; empty for weights
    opset: int | None  # version of ONNX's operators; None for weights
    # difference between onnxruntime and torch, as a share of the largest output; None if not compared
    difference: float | None
    notes: tuple[str, ...]  # what a user should know


def export_trained(
    trained: Trained,  # from `load_trained`, with float weights
    # ends with `.onnx` (a graph) or `.safetensors` (weights, which `load_trained` takes)
    out: str | Path,
    sizes: Sizes | None = None,  # sizes to fix; None leaves all free
    *,
    opset: int | None = None,  # version of ONNX's operators; None takes torch's default
    repairs: bool = True,  # put the repairs of the training store into the graph
) -> Exported:
    """Write a trained model as a file for other programs."""
    path = Path(out)
    if path.suffix not in (ONNX_SUFFIX, SUFFIX):
        raise InputError(
            f"{path} ends with {path.suffix!r}." if path.suffix else f"{path} has no ending.",
            f"{ONNX_SUFFIX} for a graph, {SUFFIX} for weights",
            quoted(path.with_suffix(ONNX_SUFFIX)),
        )
    check_output(
        path,
        [trained.loaded.saved.path],
        has_signature if path.suffix == ONNX_SUFFIX else is_weights,
    )
    if "int8" in trained.loaded.identity:
        raise InputError(
            f"{trained.loaded.saved.path} holds int8 weights, in a form of torch's own.",
            "a checkpoint of float weights",
            "the checkpoint that it was made from; onnxruntime.quantization.quantize_dynamic "
            "makes int8 of an ONNX file",
        )
    if path.suffix == SUFFIX:
        write_weights(trained.loaded, path)
        note = "no optimizer inside: a run is resumed from its checkpoint"
        size = path.stat().st_size
        return Exported(path, trained.chosen.recipe.name, size, {}, (), None, None, (note,))
    graph = deploy(trained, sizes or Sizes(), repairs=repairs)
    inputs, windows = _describe_inputs(graph), _find_windows(trained, graph)
    about = _describe(trained, graph, inputs, windows)
    made, difference = write_onnx(graph, path, about, opset)
    return Exported(
        path,
        trained.chosen.recipe.name,
        path.stat().st_size,
        inputs,
        graph.outputs,
        made,
        difference,
        tuple(_notes(trained, graph, windows)),
    )


def _describe(
    trained: Trained,
    graph: Deployed,
    inputs: Mapping[str, Mapping[str, Any]],
    windows: Mapping[str, int],
) -> dict[str, str]:
    """Return the metadata of a graph as texts."""
    saved, facts = trained.loaded.saved, trained.facts
    made = {
        field: [entry["repair"] for entry in facts["repairs"][field]] for field in graph.repaired
    }
    return {
        "stoker.version": stoker.__version__,
        "stoker.recipe": trained.chosen.key,
        "stoker.options": json_text(trained.chosen.plain),
        "stoker.blueprint": json_text(facts),
        "stoker.inputs": json_text(inputs),
        "stoker.repairs": json_text(made),
        "stoker.classes": json_text(facts.get("class_names", [])),
        "stoker.windows": json_text(windows),
        "stoker.checkpoint": json_text(
            {"step": saved.step, "epoch": saved.epoch, "metrics": dict(saved.metrics)}
        ),
    }


def _find_windows(trained: Trained, graph: Deployed) -> dict[str, int]:
    """Return the training lengths of windows whose length is free in the graph.

    They are read from the training store; empty if it no longer exists.
    """
    free = [
        port.key for port in graph.ports if len(port.shape) > 1 and isinstance(port.shape[1], str)
    ]
    found = find_training_store(trained.loaded.saved.path) if free else None
    if found is None:
        return {}
    with open_store(found) as store:
        known = {name: store.fields.get(name) for name in free}
    return {name: info.window for name, info in known.items() if info and info.window}


def _describe_inputs(graph: Deployed) -> dict[str, dict[str, Any]]:
    return {
        port.name: {
            "field": port.key,
            "dtype": str(port.dtype).removeprefix("torch."),
            "shape": list(port.shape),
            "about": port.about,
        }
        for port in graph.ports
    }


def _notes(trained: Trained, graph: Deployed, windows: Mapping[str, int]) -> list[str]:
    notes = []
    for field, entries in trained.facts["repairs"].items():
        named = ", ".join(entry["repair"] for entry in entries)
        is_inside = field in graph.repaired
        outside = "not inside: give values that are repaired already"
        where = "inside the graph: give raw values" if is_inside else outside
        notes.append(f"repairs of {field} ({named}) are {where}")
    if windows:
        shown = ", ".join(f"{name}={bars}" for name, bars in windows.items())
        notes.append(f"trained on windows of {shown} bars; the graph takes any length")
    return [*notes, *trained.made.notes]
