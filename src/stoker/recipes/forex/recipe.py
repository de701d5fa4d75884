"""The forex recipe: where the price goes over the next bars, and how far.

Enters: a store of `stoker pack bars` (or any store with series and forward returns). Leaves: a `Job`.
Costs: one read of the targets and of up to 200,000 rows per timeframe; seconds.

Labels are made on the device from the stored returns (`labels.py`); the network is in `model.py`.
Samples are split by time, with purge and embargo. Everything that is fitted (scalers, label limits,
baselines) uses training samples only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from stoker.config import Settings
from stoker.errors import InputError
from stoker.loader.batch import Batch
from stoker.loader.lanes import LanePlan, plan_store_lanes
from stoker.loader.splits import split_by_time
from stoker.recipes.contract import (
    BATCH,
    Columns,
    Default,
    Facts,
    Job,
    Judge,
    Layout,
    Port,
    RawReader,
    Rebuilt,
    Recipe,
    Tensors,
)
from stoker.recipes.forex.evaluation import BarEvaluation, DirectionJudge
from stoker.recipes.forex.labels import (
    ForexMetrics,
    LabelPlan,
    describe_cut,
    describe_labels,
    find_baseline,
    forex_loss,
    make_labels,
    plan_labels,
)
from stoker.recipes.forex.lstm import traceable
from stoker.recipes.forex.model import NAMES, ForexModel, TimeframeEncoder
from stoker.recipes.forex.options import ForexOptions
from stoker.recipes.forex.raw_bars import open_raw_bars
from stoker.recipes.gate import drawn_parts, fill_parts, gate_notes, own_parts, quality_gate
from stoker.recipes.options import parse_options, require
from stoker.recipes.scaling import fit_robust, training_rows
from stoker.recipes.schedule import make_adamw, warmup_cosine
from stoker.store.fields import Array
from stoker.store.reader import Store

_FIRST_SHARE, _VAL_SHARE = 0.4, 0.15


def unpack_forex(
    batch: Tensors, timeframes: tuple[str, ...], plan: LabelPlan
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return windows with their gap flags, and labels; `valid` marks rows of lanes that have not ended."""
    names = [part for name in timeframes for part in (name, f"{name}/gap")]
    returns = batch["targets"]
    targets = make_labels(returns if returns.dim() == 2 else returns.unsqueeze(1), plan)
    valid = batch.get("valid", getattr(batch, "valid", None))
    if valid is not None:
        targets["valid"] = valid
    if isinstance(batch, Batch) and valid is not None:
        # The order of lanes is not that of time; the evaluation sorts by sample number.
        targets["sample"] = torch.from_numpy(batch.sample_ids).to(returns.device, non_blocking=True)
    return {name: batch[name] for name in names}, targets


class ForexRecipe(Recipe):
    """Builds forex jobs."""

    name = "forex"
    Options = ForexOptions
    pack_command = "stoker pack bars FOLDER OUT"
    raw_kinds = "a file or a folder of bars"
    defaults = (
        Default("training.lr", 1e-3, "AdamW, rising for 5 % of the updates, then half a cosine"),
        Default("training.epochs", 20, "at most; bars are noisy, and the best weights come early"),
        Default(
            "training.patience", 5, "epochs without a lower validation loss; the best weights count"
        ),
    )

    def make_job(self, store: Store, options: ForexOptions | Mapping[str, Any], seed: int) -> Job:
        """Build the job; see `Recipe`."""
        chosen = parse_options(ForexOptions, options, self.name)
        timeframes = _find_timeframes(store, chosen)
        fields = [*timeframes, "targets"]
        warnings = quality_gate(store, fields, scaled=True)
        samples, notes = split_store(store, chosen)
        returns = {
            name: store.gather("targets", ids).reshape(len(ids), _horizon(store))
            for name, ids in samples.items()
        }
        plan = plan_labels(returns["train"], chosen)
        carried = _find_carried(store, timeframes, chosen) if chosen.stateful else ()
        plan_lanes = partial(
            plan_store_lanes, store, fields=carried, max_gap_rows=chosen.max_gap_rows
        )
        lanes = plan_lanes(chosen.lanes, samples=samples["train"]) if carried else None
        base = store.manifest.attributes.get("base")
        notes += [
            describe_labels(plan, returns["train"]),
            *describe_cut(plan, returns["train"], chosen.cost_pips),
            *([lanes.reason] if lanes else []),
        ]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make_model(store, timeframes, samples["train"], chosen, carried)
        return Job(
            model=model,
            criterion=partial(forex_loss, weights=chosen.loss_weights),
            unpack=partial(unpack_forex, timeframes=timeframes, plan=plan),
            metrics=ForexMetrics,
            final_metrics=partial(
                BarEvaluation,
                store,
                base if base in timeframes else timeframes[0],
                plan,
                samples,
                returns,
                chosen.cost_pips,
                seed,
            ),
            baseline=find_baseline(returns["train"], returns["val"], plan, chosen.loss_weights),
            samples=samples,
            make_optimizer=partial(make_adamw, weight_decay=chosen.weight_decay),
            make_schedule=partial(warmup_cosine, warmup_share=chosen.warmup_share),
            fields=fields,
            order="lanes" if lanes else chosen.order,
            lanes=lanes,
            plan_lanes=partial(_plan_fewer_lanes, plan_lanes, chosen.lanes),
            monitor=("loss", False),
            notes=(*notes, *gate_notes(warnings)),
            facts={
                "inputs": list(timeframes),
                "features": {name: _num_columns(store, name) for name in timeframes},
                "carried": list(carried),
                "is_classifier": True,
                "class_names": list(NAMES),
                "labels": asdict(plan),
            },
        )

    def from_settings(self, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return `lanes`: with carried state the default is one lane per sample of the batch."""
        is_asked = bool(given.get("stateful")) and "lanes" not in given
        return {"lanes": settings.training.batch_size} if is_asked else {}

    def note_settings(self, settings: Settings, options: ForexOptions) -> list[str]:
        """Return a note if chunks are configured with a carried state: lanes do not use chunks."""
        asked = ("data.use_chunk_loader", "data.chunk_size_gb") if options.stateful else ()
        written = [settings.reasons[key] for key in asked if not settings.is_default(key)]
        if not written:
            return []
        return [f"{'; '.join(written)}: no effect, a stateful model walks over lanes"]

    def describe(self, job: Job) -> dict[str, Any]:
        """Return the timeframes, their numbers of columns, which states are carried, and label facts."""
        return dict(job.facts)

    def rebuild(self, options: ForexOptions, facts: Facts) -> Rebuilt:
        """Return the network; its scalers are restored with the weights."""
        names = list(facts["inputs"])
        wanted = [part for name in names for part in (name, f"{name}/gap")]

        def unpack(batch: Tensors) -> Columns:
            return {name: batch[name] for name in wanted}

        note = "trained with a carried state; a prediction begins each window without one"
        return Rebuilt(
            ForexModel(facts["features"], options, facts["carried"]),
            names,
            unpack,
            ForexModel.predict,
            notes=(note,) if facts["carried"] else (),
        )

    def open_raw(
        self, given: Any, made: Rebuilt, facts: Facts, told: Mapping[str, Any]
    ) -> RawReader | None:
        """Open bars, for a model that was trained on a store of `stoker pack bars`."""
        return open_raw_bars(given, facts) if "bars" in facts else None

    def read_truth(
        self, store: Store, samples: Array, made: Rebuilt, options: ForexOptions, facts: Facts
    ) -> Array | None:
        """Return the log return over `direction_step` bars, `(samples, 1)`."""
        info, step = store.fields.get("targets"), facts.get("labels", {}).get("direction_step")
        if info is None or step is None or int(np.prod(info.shape)) < step:
            return None
        rows = store.gather("targets", samples).reshape(len(samples), -1)
        return rows[:, step - 1 : step].astype(np.float64)

    def make_judge(self, options: ForexOptions, facts: Facts) -> Judge | None:
        """Return the judge of directions and of trading on them."""
        labels = facts.get("labels")
        return None if labels is None else DirectionJudge(LabelPlan(**labels), options.cost_pips)

    def export_layout(self, made: Rebuilt, facts: Facts) -> Layout:
        """Return inputs for windows of any length and their gap flags."""
        ports = []
        scaled = (
            "; scaled as packed, by bars.scalers of each symbol in stoker.blueprint"
            if "bars" in facts
            else ""
        )
        for name in facts["inputs"]:
            encoder: Any = cast(ForexModel, made.model).encoders[name]
            bars = f"bars_{name}"
            columns = f": {', '.join(facts['columns'][name])}" if facts["columns"][name] else ""
            ports += [
                Port(
                    name,
                    (BATCH, bars, facts["features"][name]),
                    torch.float32,
                    f"the last bars of {name}, oldest first{columns}{scaled}",
                    scaler=encoder.scaler,
                ),
                Port(
                    f"{name}/gap",
                    (BATCH, bars),
                    torch.uint8,
                    f"1 where bars of {name} are missing before this one, else 0",
                    below=2,
                ),
            ]
        return Layout(ports, made.unpack, made.predict, traceable)


def make_model(
    store: Store,
    timeframes: Sequence[str],
    train: Array,
    options: ForexOptions,
    carried: Sequence[str],
) -> ForexModel:
    """Return the network with scalers fitted on the rows that training samples contain."""
    model = ForexModel({name: _num_columns(store, name) for name in timeframes}, options, carried)
    for name in timeframes:
        encoder = cast(TimeframeEncoder, model.encoders[name])
        center, scale = map(torch.from_numpy, fit_robust(training_rows(store, name, train)))
        encoder.scaler.center.copy_(center)
        encoder.scaler.scale.copy_(scale)
        for place, column in enumerate(store.fields[name].columns or []):
            encoder.steps[place] = column == "return" or column.endswith("_change")
    return model


# -- what the store offers -----------------------------------------------------------------


def split_store(store: Store, options: ForexOptions) -> tuple[dict[str, Array], list[str]]:
    """Return the samples of train, val and test, and notes on how they were split."""
    samples: dict[str, Array]
    if "split" in store.fields and options.fold is None:
        samples = own_parts(store)
        how = "as packed (by time, with purge and embargo)"
    else:
        missing = [name for name in ("time", "label_time") if name not in store.fields]
        if missing:
            lacks = "no" if options.fold else "neither 'split' nor"
            raise InputError(
                f"{store.name} has {lacks} {' and '.join(map(repr, missing))}.",
                "a split, or the times of decisions and labels to make one by",
                "stoker pack bars FOLDER OUT --windows M5=288,H1=96",
            )
        total = store.num_samples
        time, label_time = (store.read_rows(n, 0, total) for n in ("time", "label_time"))
        embargo = options.embargo if options.embargo is not None else _horizon(store)
        known, ratios = np.arange(total), options.ratios
        if options.fold is not None:
            known, ratios = _cut_fold(time, *options.fold)
        division = split_by_time(time[known], label_time[known], ratios, embargo)
        samples = {name: known[ids] for name, ids in drawn_parts(division).items()}
        how = f"fold {options.fold[0]} of {options.fold[1]}, " if options.fold else ""
        how += f"by time, labels purged at the borders, an embargo of {embargo} decisions"
        fill_parts(samples, ratios, 0, None, f"bars, divided {how},")
    if options.label_gaps == "drop":
        if "label_gap" not in store.fields:
            raise InputError(
                f"label_gaps is 'drop', and {store.name} has no field 'label_gap'.",
                "a store of stoker pack bars",
                "label_gaps='keep'",
            )
        gap = store.read_rows("label_gap", 0, store.num_samples) != 0
        kept = {name: ids[~gap[ids]] for name, ids in samples.items()}
        samples, dropped = kept, sum(len(samples[name]) - len(kept[name]) for name in samples)
        how += f"; {dropped:,} samples left out whose label runs over missing bars"
    if not len(samples["train"]):
        raise InputError(
            f"{store.name} has no training samples ({how}).", "at least one", "pack more bars"
        )
    counts = ", ".join(f"{len(ids):,} {name}" for name, ids in samples.items())
    return samples, [f"samples: {counts}; {how}"]


def _cut_fold(time: Array, number: int, count: int) -> tuple[Array, tuple[float, float, float]]:
    """Return the samples up to the end of a fold's test span, and their shares of train, val and test."""
    ends = [_FIRST_SHARE + (1 - _FIRST_SHARE) * k / count for k in (number - 1, number)]
    start, stop = (max(1, round(end * len(time))) for end in ends)
    order = np.argsort(time, kind="stable")
    val = round(_VAL_SHARE * start)
    return np.sort(order[:stop]), ((start - val) / stop, val / stop, (stop - start) / stop)


def _find_timeframes(store: Store, options: ForexOptions) -> tuple[str, ...]:
    series = {name: info for name, info in store.fields.items() if info.kind == "series"}
    targets = store.fields.get("targets")
    if not series or targets is None or targets.kind != "dense" or "f" not in targets.dtype:
        held = ", ".join(
            f"{name} ({info.kind} {info.dtype})" for name, info in store.fields.items()
        )
        raise InputError(
            f"{store.name} holds {held}.",
            "one series per timeframe, and forward returns in a float field 'targets'",
            "stoker pack bars FOLDER OUT --windows M5=288,H1=96",
        )
    wanted = options.timeframes or tuple(series)
    unknown = [name for name in wanted if name not in series]
    if unknown:
        raise InputError(
            f"the timeframes {', '.join(unknown)} are not in {store.name}.",
            ", ".join(series),
            f"timeframes=[{next(iter(series))!r}]",
        )
    return tuple(sorted(wanted, key=lambda name: series[name].duration_ns or 0))


def _horizon(store: Store) -> int:
    shape = store.fields["targets"].shape
    return int(shape[0]) if shape else 1


def _num_columns(store: Store, name: str) -> int:
    return int(store.fields[name].shape[-1])


def _find_carried(
    store: Store, timeframes: tuple[str, ...], options: ForexOptions
) -> tuple[str, ...]:
    if options.carried is None:
        base = store.manifest.attributes.get("base")
        return (base if base in timeframes else timeframes[0],)
    require(
        bool(options.carried) and set(options.carried) <= set(timeframes),
        "carried",
        options.carried,
        f"some of {', '.join(timeframes)}",
        f"carried=['{timeframes[0]}']",
    )
    return options.carried


def _plan_fewer_lanes(plan: Callable[..., LanePlan], count: int, samples: Array) -> LanePlan | None:
    """Return lanes as in training, or fewer if there are too few windows; None if not even one lane is possible."""
    while count:
        with contextlib.suppress(InputError):
            return plan(count, samples=samples)
        count //= 2
    return None
