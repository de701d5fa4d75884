"""What a checkpoint must hold, besides weights, to build its model again: plain values only.

Enters: a job and its options; later the plain values. Leaves: the blueprint; later the model without
its weights, and how it reads batches. Costs nothing; reads no data.

A recipe finds some sizes in the store it trains on (timeframes, columns, classes). They are written
down here, so that a prediction needs neither that store nor targets. Scalers are buffers of the model
and come with the weights; the normalisation of images is part of the loader's augmentation and is
written down. So are the repairs of the training store, which new data needs too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import xxhash

from stoker.augment import Compose
from stoker.augment.ops import Normalize
from stoker.errors import InputError
from stoker.loader.gather import Augments
from stoker.loader.ragged import batch_graphs, expand_fingerprint
from stoker.recipes.catalogue import Chosen
from stoker.recipes.contract import Job, Tensors
from stoker.recipes.forex import ForexOptions
from stoker.recipes.forex_model import ForexModel, SeriesInput
from stoker.recipes.massspec import MassSpecOptions, TeacherOptions
from stoker.recipes.massspec_models import Student, Teacher, graph_inputs
from stoker.recipes.scaling import RobustScale
from stoker.recipes.segmentation import SegmentationOptions
from stoker.recipes.segmentation_net import MicroSegFormer
from stoker.recipes.tabular import TabularOptions, unpack_tabular
from stoker.recipes.tabular_data import Inputs
from stoker.recipes.tabular_model import PatchTransformer, RowMlp, TabularModel
from stoker.store.reader import Store
from stoker.strict_json import exact_text, parse_json

Facts = Mapping[str, Any]
Columns = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rebuilt:
    """A model to be filled with weights, and how to use it.

    Attributes:
        model: On the CPU, without its trained weights.
        fields: Fields of a store that it reads.
        unpack: Batch to the model's inputs; needs no targets.
        predict: Model and inputs to named columns, a row per sample.
        augment: What the loader does to images, if there are any.
    """

    model: torch.nn.Module
    fields: Sequence[str]
    unpack: Callable[[Tensors], Any]
    predict: Callable[[Any, Any], Columns]
    augment: Compose | None = None


# -- writing down --------------------------------------------------------------------------------


def describe_job(job: Job, store: Store) -> dict[str, Any]:
    """Return what `rebuild` needs besides the options, as JSON would give it back."""
    facts = _DESCRIBE[job.name](job)
    inputs = [name for name in facts["inputs"] if name in store.fields]
    facts["columns"] = {name: store.fields[name].columns for name in inputs}
    facts["repairs"] = {
        name: fitted for name, fitted in store.manifest.repairs.items() if name in inputs
    }
    return cast(dict[str, Any], parse_json(exact_text(facts)))


def _describe_forex(job: Job) -> dict[str, Any]:
    model = cast(ForexModel, job.model)
    encoders = cast(Mapping[str, Any], model.encoders)
    return {
        "inputs": list(model.timeframes),
        "features": {name: len(encoders[name].steps) for name in model.timeframes},
        "carried": list(model.carried),
    }


def _describe_tabular(job: Job) -> dict[str, Any]:
    model = cast(TabularModel, job.model)
    inputs: Inputs = cast("partial[Any]", job.unpack).keywords["inputs"]
    head: Any = [part for part in model.body.modules() if isinstance(part, torch.nn.Linear)][-1]
    return {
        "inputs": [inputs.field],
        "is_series": inputs.is_series,
        "window": inputs.window,
        "num_features": inputs.num_features,
        "num_outputs": int(head.out_features),
        "is_classifier": model.is_classifier,
        "body": "mlp" if isinstance(model.body, RowMlp) else "patchtst",
    }


def _describe_massspec(job: Job) -> dict[str, Any]:
    graphs = ["atoms", "bonds"] if isinstance(job.model, Teacher) else []
    return {
        "inputs": ["ecfp_bits", "ecfp_counts", "mol_weight", *graphs],
        "num_bins": int(cast(Any, job.model).num_bins),
    }


def _describe_segmentation(job: Job) -> dict[str, Any]:
    model: Any = job.model
    assert job.augmentation is not None
    (normalize,) = (op for op in job.augmentation.ops if isinstance(op, Normalize))
    channels = int(model.stages[0].embed.patches.in_channels)
    mean, std = normalize.for_channels(channels)
    return {
        "inputs": ["images"],
        "channels": channels,
        "num_classes": int(model.head.classes[-1].out_channels),
        "mean": list(mean),
        "std": list(std),
    }


_DESCRIBE: Mapping[str, Callable[[Job], dict[str, Any]]] = {
    "forex": _describe_forex,
    "tabular": _describe_tabular,
    "massspec": _describe_massspec,
    "massspec-teacher": _describe_massspec,
    "segmentation": _describe_segmentation,
}


# -- building again ------------------------------------------------------------------------------


def rebuild(chosen: Chosen, facts: Facts) -> Rebuilt:
    """Return the model that `describe_job` saw, without its weights.

    Args:
        chosen: The recipe with the options that the checkpoint keeps.
        facts: From `describe_job`.
    """
    made = _REBUILD[chosen.recipe.name](chosen.options, facts)
    made.model.eval().requires_grad_(False)
    return made


def _rebuild_forex(options: ForexOptions, facts: Facts) -> Rebuilt:
    names = list(facts["inputs"])
    series = {
        name: SeriesInput(
            np.zeros(count), np.ones(count), (False,) * count, options.input_clip, options.gaps
        )
        for name, count in ((name, facts["features"][name]) for name in names)
    }
    model = ForexModel(
        series,
        d_model=options.d_model,
        num_layers=options.layers,
        heads=options.heads,
        dropout=options.dropout,
        ffn_factor=options.ffn_factor,
        pooling=options.pooling,
        head_weights=options.head_weights,
        carried=facts["carried"],
    )
    wanted = [part for name in names for part in (name, f"{name}/gap")]

    def unpack(batch: Tensors) -> Columns:
        return {name: batch[name] for name in wanted}

    return Rebuilt(model, names, unpack, _predict_by_method)


def _rebuild_tabular(options: TabularOptions, facts: Facts) -> Rebuilt:
    (field,) = facts["inputs"]
    inputs = Inputs(field, facts["is_series"], facts["window"], facts["num_features"], "")
    outputs = facts["num_outputs"]
    body: torch.nn.Module
    if facts["body"] == "mlp":
        width = inputs.num_columns * (inputs.window or 1)
        body = RowMlp(width, options.hidden, outputs, options.dropout)
    else:
        shape = options.patch_shape
        body = PatchTransformer(
            inputs.window or 1, inputs.num_columns, shape, outputs, options.dropout
        )
    known: dict[str, Any] = (
        {"classes": np.zeros(outputs, np.int64)}
        if facts["is_classifier"]
        else {"target_center": np.zeros(outputs), "target_scale": np.ones(outputs)}
    )
    columns = inputs.num_columns
    model = TabularModel(
        RobustScale(
            np.zeros(columns),
            np.ones(columns),
            options.input_clip if options.scale_inputs else None,
        ),
        body,
        bound=options.output_bound,
        bound_mode=options.output_bound_mode,
        **known,
    )

    def unpack(batch: Tensors) -> torch.Tensor:
        # The recipe's own way, with nothing in the place of the targets.
        return unpack_tabular({**batch, "": batch[field]}, inputs, "", lambda values: values)[0]

    return Rebuilt(model, [field], unpack, _predict_by_method)


def _rebuild_massspec(options: MassSpecOptions, facts: Facts) -> Rebuilt:
    graphs = isinstance(options, TeacherOptions)
    model: torch.nn.Module
    if isinstance(options, TeacherOptions):
        model = Teacher(
            facts["num_bins"],
            options.num_layers,
            options.graph_width,
            options.width,
            options.num_blocks,
            options.drop_edge,
            options.bottleneck,
            options.dropout,
        )
    else:
        model = Student(
            facts["num_bins"],
            options.width,
            options.num_blocks,
            options.bottleneck,
            options.dropout,
        )

    def unpack(batch: Tensors) -> Columns:
        counts = batch["ecfp_bits"], batch["ecfp_counts"], batch["ecfp_bits/offsets"]
        inputs = {"ecfp": expand_fingerprint(*counts), "mol_weight": batch["mol_weight"]}
        return inputs | graph_inputs(batch_graphs(batch)) if graphs else inputs

    return Rebuilt(model, facts["inputs"], unpack, _predict_outputs)


def _rebuild_segmentation(options: SegmentationOptions, facts: Facts) -> Rebuilt:
    model = MicroSegFormer(
        facts["num_classes"],
        facts["channels"],
        widths=options.widths,
        depths=options.depths,
        heads=options.heads,
        expansion=options.expansion,
        head_width=options.head_width,
        dropout=options.dropout,
    )
    augment = Compose([Normalize(facts["mean"], facts["std"])])

    def unpack(batch: Tensors) -> torch.Tensor:
        return batch["images"]

    return Rebuilt(model, ["images"], unpack, _predict_classes, augment)


_REBUILD: Mapping[str, Callable[[Any, Facts], Rebuilt]] = {
    "forex": _rebuild_forex,
    "tabular": _rebuild_tabular,
    "massspec": _rebuild_massspec,
    "massspec-teacher": _rebuild_massspec,
    "segmentation": _rebuild_segmentation,
}


# -- predicting ----------------------------------------------------------------------------------


def _predict_by_method(model: Any, inputs: Any) -> Columns:
    return cast(Columns, model.predict(inputs))


def _predict_outputs(model: Any, inputs: Any) -> Columns:
    return dict(model(inputs))


def _predict_classes(model: Any, inputs: Any) -> Columns:
    """Return the class of every pixel; logits would be four bytes and a class for each."""
    return {"mask": model(inputs).argmax(dim=1).to(torch.uint8)}


def as_augments(augmentation: Compose | None) -> Augments | None:
    """Return the same; mypy does not see that overloads fit the loader's protocol."""
    return cast("Augments | None", augmentation)


def fingerprint(store: Store) -> str:
    """Return a digest of what is in a store: the same data packed again gives the same."""
    about = store.manifest.model_dump(mode="json", include={"num_samples", "fields", "repairs"})
    about["shards"] = [[shard.size_bytes, shard.checksum] for shard in store.manifest.shards]
    return xxhash.xxh3_64_hexdigest(exact_text(about, sort_keys=True).encode())


def check_columns(store: Store, facts: Facts) -> None:
    """Raise when a store does not hold what the model was trained on, in the same order.

    Raises:
        InputError: A field is missing, or its columns are others; both are shown.
    """
    for name, trained in facts["columns"].items():
        if name not in store.fields:
            raise InputError(
                f"{store.name} has no field {name!r}; it holds {', '.join(store.fields)}.",
                f"a store with {', '.join(facts['inputs'])}, as in training",
                "pack the new data like the training data",
            )
        have = store.fields[name].columns
        # A plain HDF5 file has no names: its shape is checked by the model itself.
        if trained and have and list(have) != list(trained):
            first = next(
                (pair for pair in zip(trained, have, strict=False) if pair[0] != pair[1]),
                (f"{len(trained)} columns", f"{len(have)}"),
            )
            raise InputError(
                f"field {name!r} of {store.name} has other columns than in training: "
                f"{first[0]!r} was trained on, {first[1]!r} stands there.",
                f"the columns {', '.join(map(str, trained[:8]))}{', ...' if len(trained) > 8 else ''}",
                "pack the new data with the same columns in the same order",
            )
