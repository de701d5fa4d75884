"""The forex recipe: where the price goes over the next bars, and how far.

Enters: a store of `stoker pack bars` (or any store with series and forward returns). Leaves: a `Job`.
Costs: one read of the targets and of up to 200,000 rows per timeframe; seconds.

Labels are made on the device from the stored returns (`forex_labels.py`), the network is in
`forex_model.py`. Samples are divided by time, with purge and embargo; every fitted number (scalers,
label limits, baselines) comes from training samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch

from stoker.config import Settings
from stoker.errors import InputError
from stoker.loader.batch import Batch
from stoker.loader.lanes import LanePlan, plan_store_lanes
from stoker.loader.splits import SplitName, samples_of, select_samples, split_by_time
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
from stoker.recipes.forex.evaluation import BarData, BarEvaluation, DirectionJudge
from stoker.recipes.forex.labels import (
    ForexMetrics,
    LabelPlan,
    LossWeights,
    describe_cut,
    describe_labels,
    find_baseline,
    forex_loss,
    make_labels,
    plan_labels,
)
from stoker.recipes.forex.lstm import traceable
from stoker.recipes.forex.model import NAMES, ForexModel, Gaps, HeadWeights, Pooling, SeriesInput
from stoker.recipes.forex.raw_bars import open_raw_bars
from stoker.recipes.gate import fill_parts, gate_notes, quality_gate
from stoker.recipes.options import (
    AtLeastOne,
    CheckedOptions,
    Range,
    Share,
    parse_options,
    require,
)
from stoker.recipes.scaling import fit_robust, training_rows
from stoker.recipes.schedule import make_adamw, warmup_cosine
from stoker.store.fields import Array
from stoker.store.reader import Store

_SPLITS: tuple[SplitName, ...] = ("train", "val", "test")
_FIRST_SHARE, _VAL_SHARE = 0.4, 0.15


@dataclass(frozen=True)
class ForexOptions(CheckedOptions):
    """What the forex recipe may be told.

    Attributes:
        timeframes: Series to use; None takes all of the store, shortest first.
        d_model: Width of LSTMs and attention.
        layers: LSTM layers per timeframe.
        heads: Of both attentions; divides `d_model`.
        dropout: Between LSTM layers and in the attentions.
        ffn_factor: Width of the feed-forward part over `d_model`.
        pooling: "attention" with a learned query, the "last" row, or the sum of both:
            the query alone cannot tell which bar is the last.
        head_weights: "mean", or "document" for fixed timeframe weights of scalp and swing.
        gaps: "mask" what reaches over missing bars and flag it, only "flag" it, or "ignore" it.
        input_clip: Largest scaled input; None for no limit.
        label_gaps: "keep" samples whose label runs over missing bars, or "drop" them.
        pip: Log return of one pip. 1e-4 is the basis point; a pip of EURUSD at 1.17 is 0.85 of it.
        cost_pips: What one trade costs in pips, both ways, in the evaluation: spread, commission, slippage.
        neutral_share: Share of the training samples that are to be NEUTRAL.
        direction_step: Bars ahead that decide the direction; None is the whole horizon.
        scalp_step: Bars ahead of the scalp move; None finds the step whose median training move is
            nearest to the middle of 0.5 to 2 pips.
        swing_step: The same for 2 to 5 pips.
        loss_weights: Of direction (cross-entropy), scalp (Huber 0.3), swing (Huber 0.5), trend (MSE).
        ratios: Shares of train, val and test in time order, for stores without a split.
        embargo: Decisions left out after each border, for stores without a split; None is the
            horizon.
        fold: Fold and number of folds of a walk forward, such as [2, 5], instead of the split: the last 60 % of the
            time in equal test spans, each after everything that is trained on. `stoker train --folds 5` trains all.
        weight_decay: Of AdamW, on matrices only.
        warmup_share: Share of the updates in which the rate rises.
        order: "shuffled", or "time". Each sample carries its whole past, so shuffling is right.
        stateful: Carry the LSTM state from batch to batch, over lanes.
        lanes: Rows of a batch when `stateful`: batch size times ranks.
        carried: Timeframes whose state is carried; None is the store's base timeframe.
        max_gap_rows: Bars that may be missing in a row without breaking a carried state.
        parallel_streams: On a GPU, run the timeframes' LSTMs side by side.
    """

    timeframes: tuple[str, ...] | None = None
    d_model: AtLeastOne = 128
    layers: AtLeastOne = 2
    heads: AtLeastOne = 4
    dropout: Share = 0.1
    ffn_factor: AtLeastOne = 4
    pooling: Pooling = "attention+last"
    head_weights: HeadWeights = "mean"
    gaps: Gaps = "mask"
    input_clip: float | None = 10.0
    label_gaps: Literal["keep", "drop"] = "keep"
    pip: Annotated[float, Range("a return above 0", lambda pip: pip > 0)] = 1e-4
    cost_pips: Annotated[float, Range("0 or more", lambda pips: pips >= 0)] = 1.0
    neutral_share: Share = 1 / 3
    direction_step: int | None = None
    scalp_step: int | None = None
    swing_step: int | None = None
    loss_weights: Annotated[
        LossWeights,
        Range(
            "four weights of 0 or more, not all 0",
            lambda weights: min(weights) >= 0 and sum(weights) > 0,
        ),
    ] = (0.40, 0.35, 0.15, 0.10)
    ratios: tuple[float, float, float] = (0.70, 0.15, 0.15)
    embargo: int | None = None
    fold: Annotated[
        tuple[int, int] | None,
        Range("[1, N] to [N, N]", lambda fold: 1 <= fold[0] <= fold[1], (1, 5)),
    ] = None
    weight_decay: float = 1e-2
    warmup_share: Share = 0.05
    order: Literal["shuffled", "time"] = "shuffled"
    stateful: bool = False
    lanes: AtLeastOne = 16
    carried: tuple[str, ...] | None = None
    max_gap_rows: int = 0
    parallel_streams: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.d_model % self.heads == 0,
            "heads",
            self.heads,
            f"a divisor of d_model, which is {self.d_model}",
            "heads=4",
        )


def unpack_forex(
    batch: Tensors, timeframes: tuple[str, ...], plan: LabelPlan
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return windows with their gap flags, and labels; rows of ended lanes are marked."""
    names = [part for name in timeframes for part in (name, f"{name}/gap")]
    returns = batch["targets"]
    targets = make_labels(returns if returns.dim() == 2 else returns.unsqueeze(1), plan)
    valid = batch.get("valid", getattr(batch, "valid", None))
    if valid is not None:
        targets["valid"] = valid
    if isinstance(batch, Batch) and valid is not None:
        # Lanes are walked in another order than that of time; the evaluation puts them back.
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
        returns = {name: _read_returns(store, ids) for name, ids in samples.items()}
        plan = plan_labels(
            returns["train"],
            pip=chosen.pip,
            neutral_share=chosen.neutral_share,
            direction_step=chosen.direction_step,
            scalp_step=chosen.scalp_step,
            swing_step=chosen.swing_step,
        )
        lanes = (
            _plan_lanes(store, chosen, samples["train"], chosen.lanes) if chosen.stateful else None
        )
        criterion = partial(forex_loss, weights=chosen.loss_weights)
        baseline = find_baseline(returns["train"], returns["val"], plan, chosen.loss_weights)
        base = store.manifest.attributes.get("base")
        data = BarData(
            store,
            base if base in timeframes else timeframes[0],
            plan,
            samples,
            returns,
            chosen.cost_pips,
            seed,
        )
        notes += [
            describe_labels(plan, returns["train"]),
            *describe_cut(plan, returns["train"], chosen.cost_pips),
            *([lanes.reason] if lanes else []),
        ]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make_model(store, timeframes, samples["train"], chosen)
        return Job(
            model=model,
            criterion=criterion,
            unpack=partial(unpack_forex, timeframes=timeframes, plan=plan),
            metrics=ForexMetrics,
            final_metrics=partial(BarEvaluation, data),
            baseline=baseline,
            samples=samples,
            make_optimizer=partial(make_adamw, weight_decay=chosen.weight_decay),
            make_schedule=partial(warmup_cosine, warmup_share=chosen.warmup_share),
            fields=fields,
            order="lanes" if lanes else chosen.order,
            lanes=lanes,
            plan_lanes=partial(_plan_fewer_lanes, store, chosen),
            monitor=("loss", False),
            notes=(*notes, *gate_notes(warnings)),
        )

    def from_settings(self, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a lane for each sample of the batch, where the state is carried."""
        is_asked = bool(given.get("stateful")) and "lanes" not in given
        return {"lanes": settings.training.batch_size} if is_asked else {}

    def note_settings(self, settings: Settings, options: ForexOptions) -> list[str]:
        """Return a note on chunks where the state is carried: lanes are resident or streamed."""
        asked = ("data.use_chunk_loader", "data.chunk_size_gb") if options.stateful else ()
        written = [settings.reasons[key] for key in asked if not settings.is_default(key)]
        if not written:
            return []
        return [f"{'; '.join(written)}: no effect, a stateful model walks over lanes"]

    def describe(self, job: Job) -> dict[str, Any]:
        """Return the timeframes, their columns, whose state is carried, and the names of the directions."""
        model = cast(ForexModel, job.model)
        encoders = cast(Mapping[str, Any], model.encoders)
        return {
            "inputs": list(model.timeframes),
            "features": {name: len(encoders[name].steps) for name in model.timeframes},
            "carried": list(model.carried),
            "is_classifier": True,
            "class_names": list(NAMES),
            "labels": asdict(cast("partial[Any]", job.unpack).keywords["plan"]),
        }

    def rebuild(self, options: ForexOptions, facts: Facts) -> Rebuilt:
        """Return the network; its scalers come with the weights."""
        names = list(facts["inputs"])
        series = {
            name: SeriesInput(
                np.zeros(count), np.ones(count), (False,) * count, options.input_clip, options.gaps
            )
            for name, count in facts["features"].items()
        }
        wanted = [part for name in names for part in (name, f"{name}/gap")]

        def unpack(batch: Tensors) -> Columns:
            return {name: batch[name] for name in wanted}

        note = "trained with a carried state; a prediction begins each window without one"
        return Rebuilt(
            build_network(series, options, facts["carried"]),
            names,
            unpack,
            ForexModel.predict,
            notes=(note,) if facts["carried"] else (),
        )

    def open_raw(
        self, given: Any, made: Rebuilt, facts: Facts, told: Mapping[str, Any]
    ) -> RawReader | None:
        """Return the bars of files, for a model that was trained on a store of `stoker pack bars`."""
        return open_raw_bars(given, facts) if "bars" in facts else None

    def read_truth(
        self, store: Store, samples: Array, made: Rebuilt, options: ForexOptions, facts: Facts
    ) -> Array | None:
        """Return the log return over the bars of the direction, `(samples, 1)`."""
        info, step = store.fields.get("targets"), facts.get("labels", {}).get("direction_step")
        if info is None or step is None or int(np.prod(info.shape)) < step:
            return None
        rows = store.gather("targets", samples).reshape(len(samples), -1)
        return rows[:, step - 1 : step].astype(np.float64)

    def make_judge(self, options: ForexOptions, facts: Facts) -> Judge | None:
        """Return directions, and what trading on them would have earned."""
        labels = facts.get("labels")
        return None if labels is None else DirectionJudge(LabelPlan(**labels), options.cost_pips)

    def export_layout(self, made: Rebuilt, facts: Facts) -> Layout:
        """Return windows of any length, and a gap flag beside each bar."""
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
    store: Store, timeframes: tuple[str, ...], train: Array, options: ForexOptions
) -> ForexModel:
    """Return the network with scalers fitted on the rows that training samples show."""
    series = {}
    for name in timeframes:
        center, scale = fit_robust(training_rows(store, name, train))
        columns = store.fields[name].columns or []
        steps = tuple(column == "return" or column.endswith("_change") for column in columns)
        series[name] = SeriesInput(center, scale, steps, options.input_clip, options.gaps)
    return build_network(series, options, _carried(store, options) if options.stateful else ())


def build_network(
    series: Mapping[str, SeriesInput], options: ForexOptions, carried: Sequence[str]
) -> ForexModel:
    """Return the network over these inputs, with initial weights."""
    return ForexModel(
        series,
        d_model=options.d_model,
        num_layers=options.layers,
        heads=options.heads,
        dropout=options.dropout,
        ffn_factor=options.ffn_factor,
        pooling=options.pooling,
        head_weights=options.head_weights,
        carried=carried,
        parallel_streams=options.parallel_streams,
    )


# -- what the store offers -----------------------------------------------------------------


def split_store(store: Store, options: ForexOptions) -> tuple[dict[str, Array], list[str]]:
    """Return the samples of train, val and test, and how they were divided."""
    samples: dict[str, Array]
    if "split" in store.fields and options.fold is None:
        samples = {name: select_samples(store, name) for name in _SPLITS}
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
        samples = {name: known[samples_of(division, name)] for name in _SPLITS}
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
    """Return the samples that a fold may know of, and the shares of train, val and test among them."""
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


def _read_returns(store: Store, samples: Array) -> Array:
    returns: Array = store.gather("targets", samples).reshape(len(samples), _horizon(store))
    return returns


def _carried(store: Store, options: ForexOptions) -> tuple[str, ...]:
    timeframes = _find_timeframes(store, options)
    if options.carried is not None:
        strange = [name for name in options.carried if name not in timeframes]
        require(
            not strange and bool(options.carried),
            "carried",
            options.carried,
            f"some of {', '.join(timeframes)}",
            f"carried=['{timeframes[0]}']",
        )
        return options.carried
    base = store.manifest.attributes.get("base")
    return (base if base in timeframes else timeframes[0],)


def _plan_lanes(store: Store, options: ForexOptions, samples: Array, count: int) -> LanePlan:
    return plan_store_lanes(
        store,
        count,
        fields=_carried(store, options),
        samples=samples,
        max_gap_rows=options.max_gap_rows,
    )


def _plan_fewer_lanes(store: Store, options: ForexOptions, samples: Array) -> LanePlan | None:
    """Return lanes as in training, fewer where there are fewer windows; None where there are none."""
    count = options.lanes
    while count:
        with contextlib.suppress(InputError):
            return _plan_lanes(store, options, samples, count)
        count //= 2
    return None
