"""From a config to a finished run: store, job, loaders, trainer, and the best weights on test data.

Enters: `Settings`. Leaves: a `RecipeRun`; in the run's folder checkpoints and the log. Costs: what the
recipe's `make_job` reads, the training, and one pass over the test samples.

This module does not decide how to train: the config and the recipe decide, and the trainer trains.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from stoker.address import as_url
from stoker.arguments import explained
from stoker.augment.ops import Normalize, ToDtype
from stoker.config import Settings
from stoker.config.resolve import describe_choices
from stoker.display import meant_path, quoted
from stoker.errors import InputError, StoreError
from stoker.loader.columns import column_facts, make_columns
from stoker.loader.gather import Augments
from stoker.loader.loader import Loader
from stoker.loader.slabs import usable_device
from stoker.loader.splits import draw_samples
from stoker.machine import probe
from stoker.plan import FALLBACK_SHARE, GPU_SHARE, Plan, make_plan
from stoker.recipes.catalogue import (
    Chosen,
    as_augments,
    choose_recipe,
    code_digest,
    describe_job,
    fingerprint,
    with_defaults,
)
from stoker.recipes.contract import FinalMetrics, Job, Metrics
from stoker.recipes.options import as_overrides
from stoker.recipes.registry import blamed
from stoker.report import LOG_NAME, Note, Progress, RunEnd, RunLog, Silent, Topic
from stoker.runs.evaluation import Evaluation
from stoker.runs.telemetry import RunCounters, TelemetryLog
from stoker.store.fields import Array
from stoker.store.manifest import MANIFEST_NAME, find_store
from stoker.store.reader import Store, open_store
from stoker.train.checkpoint import Checkpoints, load_checkpoint
from stoker.train.history import History, describe_epoch
from stoker.train.memory import gpu_uuid
from stoker.train.parallel import load_whole_model, shard_model
from stoker.train.precision import choose_precision
from stoker.train.predict import evaluate
from stoker.train.ranks import Ranks, check_alike, join, launched_at, num_restarts
from stoker.train.run_folder import RunLock
from stoker.train.settings import TrainSettings
from stoker.train.trainer import Trainer

_CLOCK_SECONDS = 2.0  # tolerance between the start time of a process and the time stamp of a file
# The training data leaves a quarter of the memory free. Evaluation data gets a quarter of that rest.
_JUDGED_SHARE, _JUDGED_FALLBACK = 0.25, 0.20


@dataclass
class RecipeRun(History):
    """The `History` of a recipe's training, with the evaluation of its best checkpoint."""

    recipe: str = ""  # its name
    run_dir: Path = Path()  # folder of log and checkpoints
    best: Path | None = None  # the best checkpoint, by the `monitor` metric on validation samples
    monitor: tuple[str, bool] = ("loss", False)  # that metric, and whether more is better
    # metrics of a trivial baseline (chance) on validation samples
    baseline: dict[str, float] = field(default_factory=dict)
    val: dict[str, float] = field(default_factory=dict)  # the best checkpoint's validation metrics
    # its metrics on test samples; empty if the run was cut short or there are no test samples
    test: dict[str, float] = field(default_factory=dict)
    # the full evaluation on test samples, with baselines; None if the recipe has no `final_metrics`
    evaluation: Evaluation | None = None


@explained("run_recipe(stoker.config.resolve(stoker.load_config('my.yaml')))")
def run_recipe(
    settings: Settings,
    *,
    resume: bool = False,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> RecipeRun:
    """Train as a config says, then evaluate the best checkpoint on the test samples.

    Args:
        settings: Settings that name a recipe and a store.
        resume: Continue from the latest checkpoint in the run folder.
        device: The first GPU by default, else the CPU.
        progress: Receives choices, epochs and progress. Its method `show(text)`, if any, gets loss and waiting time.

    Raises:
        ConfigError: The config and the recipe do not fit.
        InputError: The store, the device or the run folder cannot be used, or ranks do not agree.
        RankLostError: Another process of the run has ended or is stalled.
        NonFiniteError: A loss was not finite, and the config says to stop.
        KeyboardInterrupt: Ctrl-C; the run is saved first.
    """
    chosen = choose_recipe(settings)
    settings = chosen.settings or settings
    with join(device, settings.training.stall_seconds) as (ranks, place):
        # Each machine counts the restarts of its own processes only, so the largest count decides. Rank 0 decides
        # whether the run in the folder belongs to this launch.
        is_again = ranks.largest(num_restarts())[0] > 0
        is_ours = ranks.is_first and _is_of_this_launch(run_folder(settings))
        resume = resume or (is_again and ranks.largest(int(is_ours))[0] == 1)
        with ranks.shared_fate():
            if settings.recipe.store is not None and not resume:
                _require_fresh(run_folder(settings))
        told = progress if ranks.is_first else None
        with contextlib.ExitStack() as stack:
            with ranks.shared_fate():
                opened = open_run(settings, chosen, device=place, progress=told)
                run = stack.enter_context(opened)
            check_alike(ranks, {"the store": fingerprint(run.store), "the config": run.digest})
            with blamed(chosen.recipe, "training"):
                history = run.train(resume)
            made = RecipeRun(
                **vars(history),
                recipe=chosen.recipe.name,
                run_dir=run.folder,
                monitor=run.job.monitor,
                baseline=dict(run.job.baseline),
            )
            return run.evaluate(made) if history.ended == "done" else made


@contextlib.contextmanager
def open_run(
    settings: Settings,
    chosen: Chosen | None = None,
    *,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> Iterator[Run]:
    """Yield a run before its first step: its store is open, its job is made, and nothing is written yet."""
    chosen = chosen or choose_recipe(settings)
    settings = chosen.settings or settings
    if settings.recipe.store is None:
        raise InputError(
            "the config names no store.",
            "recipe.store in the config, or --store",
            f"{chosen.recipe.pack_command}, then --store OUT",
        )
    place = usable_device(device)
    where = settings.recipe.store
    if as_url(where) is None and not find_store(Path(where)).exists():
        meant = meant_path(Path(where))
        raise StoreError(
            f"{where} does not exist.",
            "a store folder, an HDF5 file or a URL",
            f"--store {quoted(meant)}"
            if meant
            else chosen.recipe.pack_command.replace("OUT", quoted(where)),
        )
    with open_store(where) as store:
        torch.manual_seed(settings.training.seed)
        job = _make_job(chosen, store, settings)
        yield Run(settings, chosen, store, job, run_folder(settings), place, progress or Silent())


def run_folder(settings: Settings) -> Path:
    """Return the folder of a run: `run.dir`, or runs/ and the recipe's name (the class name of `module:Class`)."""
    name = (settings.recipe.name or "run").rpartition(":")[2]
    return Path(settings.run.dir or Path("runs") / name)


def train_settings(
    settings: Settings, monitor: tuple[str, bool] = ("loss", False)
) -> TrainSettings:
    """Return the trainer's settings from a config, with the metric that decides the best checkpoint."""
    return replace(TrainSettings.of(settings), monitor=monitor[0], maximise=monitor[1])


def _is_of_this_launch(folder: Path) -> bool:
    """Whether the latest checkpoint was written after torchrun, or `--gpus`, started: not by an older run."""
    latest = Checkpoints(folder).latest()
    return latest is not None and latest.path.stat().st_mtime >= launched_at() - _CLOCK_SECONDS


def fresh_folder(folder: Path) -> Path:
    """Return the folder, or the first `FOLDER-2`, `FOLDER-3`, ..., that has no checkpoint."""
    numbered = (Path(f"{folder}-{number}") for number in itertools.count(2))
    return next(
        path for path in itertools.chain((folder,), numbered) if not Checkpoints(path).list()
    )


def _require_fresh(folder: Path) -> None:
    """Refuse a run folder that is a store or a file, or has checkpoints: those of two runs must not mix."""
    if folder.is_file() or (folder / MANIFEST_NAME).exists():
        free = fresh_folder(Path("runs") / folder.stem)
        what = "a file" if folder.is_file() else "a store"
        raise InputError(
            f"the run directory {folder} is {what}.",
            "a folder of its own",
            f"--run-dir {quoted(free)}",
        )
    fresh = fresh_folder(folder)
    if fresh != folder:
        raise InputError(
            f"{folder} has checkpoints of an earlier run.",
            "an empty folder, or --resume to go on",
            f"--resume, or --run-dir {quoted(fresh)}",
        )


def _make_job(chosen: Chosen, store: Store, settings: Settings) -> Job:
    try:
        job = chosen.make_job(store, settings.training.seed)
    except InputError as error:
        fix = as_overrides(error.fix, type(chosen.options))
        raise type(error)(error.given, error.allowed, fix, error.details) from error
    most, train = settings.data.max_training_samples, job.samples["train"]
    if most is None or most >= len(train):
        return job
    if job.lanes is not None:
        raise InputError(
            f"max_training_samples is {most}, and the recipe walks over lanes.",
            "all samples, or stateful: false",
            "delete max_training_samples",
        )
    drawn = draw_samples(train, most, settings.training.seed, job.strata)
    how = "" if job.strata is None else ", each class with its share"
    note = f"{most:,} of {len(train):,} training samples, drawn by the seed{how}: "
    return replace(
        job,
        samples={**job.samples, "train": drawn},
        notes=(*job.notes, note + settings.reasons["data.max_training_samples"]),
    )


@dataclass(eq=False)
class Run:
    """One run, as `open_run` prepares it.

    `train` and `evaluate` perform the run. Measurements use its parts by `make_train_loader` and `make_trainer`.
    """

    settings: Settings
    chosen: Chosen
    store: Store
    job: Job
    folder: Path
    device: torch.device
    told: Progress

    def __post_init__(self) -> None:
        self.ranks = Ranks.current()
        self.rank_batch = share_batch(self.settings, self.ranks.world_size)

    @property
    def digest(self) -> str:
        """A digest of the settings, which all ranks must share."""
        values = self.settings.values()
        return xxhash.xxh3_64_hexdigest(repr(sorted(values.items(), key=str)).encode())

    @property
    def drawn_augmentation(self) -> Augments | None:
        """Augmentation that the trainer applies; None if it only normalises, which the loader does itself."""
        augmentation = self.job.augmentation
        ops = () if augmentation is None else augmentation.ops
        draws = any(not isinstance(op, Normalize | ToDtype) for op in ops)
        return as_augments(augmentation) if draws else None

    def with_settings(self, settings: Settings) -> Run:
        """Return the same job with other settings that do not change it: batch, precision, capture, chunks."""
        return replace(self, settings=with_defaults(settings, self.chosen.recipe))

    def train(self, resume: bool) -> History:
        """Train, and return the history."""
        job, settings = self.job, self.settings
        with contextlib.ExitStack() as stack:
            train = stack.enter_context(self.make_train_loader())
            val_loader = self._evaluation_loader("val") if len(job.samples["val"]) else None
            val = None if val_loader is None else stack.enter_context(val_loader)
            notes = self._notes(train)
            for note in notes:
                self.told.say(note.text)
            progress = RunProgress(self.told, train, settings.training.epochs)
            trainer = self.make_trainer(train, val, progress, run_dir=self.folder)
            trainer.history.told[:0] = notes
            progress.history = trainer.history
            self.ranks.first_does(lambda: self._write_setup(train))
            telemetry = None  # readings of the machine; only rank 0 records them
            if self.ranks.is_first:
                uuid = gpu_uuid(self.device)
                telemetry = TelemetryLog(self.folder, progress.count, gpu_uuid=uuid)
            with telemetry or contextlib.nullcontext():
                history = trainer.fit(resume=resume)
                if telemetry is not None:
                    telemetry.end = RunEnd(history.ended)
            progress.tell_epochs()
            return history

    def make_trainer(
        self, train: Any, val: Any, progress: Progress, *, run_dir: Path | None
    ) -> Trainer:
        """Return the run's trainer over these loaders; without `run_dir` it writes nothing."""
        job, settings = self.job, self.settings
        if settings.training.parallel == "fsdp":
            shard_model(job.model, self.ranks, self.device)
        optimizer = job.make_optimizer(job.model.parameters(), settings.training.lr)
        windows = -(-len(train) // settings.training.gradient_accumulation_steps)
        scheduler = (
            None
            if job.make_schedule is None
            else job.make_schedule(optimizer, max(1, settings.training.epochs * windows))
        )
        return Trainer(
            job.model,
            train,
            val,
            job.criterion,
            optimizer,
            scheduler,
            train_settings(settings, job.monitor),
            self.device,
            # Loaders other than ours are expected to augment their own images.
            self.drawn_augmentation if isinstance(train, Loader) else None,
            unpack=job.unpack,
            metrics=job.metrics,
            run_dir=run_dir,
            identity=self._identity() if run_dir is not None else None,
            progress=progress,
            scheduler_interval="update",  # `make_schedule` got the number of updates
        )

    def evaluate(self, made: RecipeRun) -> RecipeRun:
        """Return the run with the metrics of its best checkpoint, which are also logged."""
        with contextlib.ExitStack() as stack:
            with self.ranks.shared_fate():
                log = stack.enter_context(self._evaluation_log()) if self.ranks.is_first else None
            made, step = self._evaluate_best(made)
            result = {
                "best": None if made.best is None else made.best.name,
                "baseline": made.baseline,
                "val": made.val,
                "test": made.test,
                "num_test": len(self.job.samples["test"]),
                "evaluation": None if made.evaluation is None else made.evaluation.to_json(),
            }
            with self.ranks.shared_fate():
                if log is not None:
                    log.write("result", result, step=step)
            return made

    @contextlib.contextmanager
    def _evaluation_log(self) -> Iterator[RunLog]:
        """Lock the run folder and log the start, and a failure if there is one. `stoker report` reads both."""
        with RunLock(self.folder), RunLog(self.folder / LOG_NAME) as log:
            log.write("evaluation", {})
            try:
                yield log
            except BaseException as error:
                log.write("end", vars(RunEnd.by(error)))
                raise

    def _evaluate_best(self, made: RecipeRun) -> tuple[RecipeRun, int]:
        """Return the run with its metrics, and the step of the best checkpoint."""
        job, settings = self.job, self.settings
        best = Checkpoints(self.folder, 1, *job.monitor).best()
        check_alike(self.ranks, {"the best checkpoint": None if best is None else best.path.name})
        step = 0
        if best is not None:
            load_whole_model(job.model, load_checkpoint(best.path).state["model"])
            made = replace(made, best=best.path, val=dict(best.metrics))
            step = best.step
        job.model.to(self.device)
        precision = choose_precision(settings.training.precision, self.device, job.model)
        if len(job.samples["test"]):
            self.told.say(f"evaluating {best.path.name if best else 'the weights'} on test samples")
            final = None if job.final_metrics is None else job.final_metrics()
            # Final metrics cannot be merged, so every rank evaluates all test samples.
            ranks = self.ranks if final is None else Ranks()
            with self._evaluation_loader("test", ranks) as loader:
                test = evaluate(
                    job.model,
                    loader,
                    job.unpack,
                    job.criterion,
                    job.metrics if final is None else partial(_WithFinal, job.metrics, final),
                    precision,
                    self.device,
                    ranks,
                )
            made = replace(made, test=test)
            if final is not None:
                self.told.say("comparing with baselines that are fitted on the training samples")
                job.model.eval()
                with blamed(self.chosen.recipe, "evaluate"), torch.no_grad():
                    found = final.evaluate(job.model, self.device, job.samples["test"])
                made = replace(made, evaluation=found)
        return made, step

    # -- loaders -----------------------------------------------------------------------------

    def make_train_loader(self) -> Loader:
        """Return the loader of the training samples."""
        job, settings = self.job, self.settings
        told: dict[str, Any] = {}
        if job.lanes is None and not settings.data.use_chunk_loader:
            told["streamed"] = self.device.type == "cuda"
        elif job.lanes is None:
            told["data_bytes"] = settings.data.chunk_bytes
        plan = self._make_plan(job.samples["train"], GPU_SHARE, FALLBACK_SHARE, **told)
        return Loader(
            self.store,
            self.rank_batch,
            self.device,
            order=job.order,
            seed=settings.training.seed,
            plan=plan,
            fields=job.fields,
            samples=job.samples["train"],
            drop_last=settings.data.drop_last,
            lanes=job.lanes,
            balance=job.balance,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            augment=None if self.drawn_augmentation else as_augments(job.augmentation),
        )

    def _evaluation_loader(self, split: str, among: Ranks | None = None) -> Loader:
        job, samples = self.job, self.job.samples[split]
        shared = among or self.ranks
        lanes = None if job.plan_lanes is None or job.lanes is None else job.plan_lanes(samples)
        # Lanes, and splits too small to share, are evaluated in full by every rank.
        ranks = shared if lanes is None and len(samples) >= 2 * shared.world_size else Ranks()
        return Loader(
            self.store,
            # Batches of one cannot be divided evenly among ranks.
            lanes.num_lanes if lanes else max(1 + ranks.are_several, self.rank_batch),
            self.device,
            order="sequential" if lanes is None else "lanes",
            seed=self.settings.training.seed,
            plan=self._make_plan(samples, _JUDGED_SHARE, _JUDGED_FALLBACK),
            fields=job.fields,
            samples=samples,
            lanes=lanes,
            rank=ranks.rank,
            world_size=ranks.world_size,
            augment=None
            if job.augmentation is None
            else as_augments(job.augmentation.validation()),
        )

    def _make_plan(self, samples: Array, share: float, fallback: float, **told: Any) -> Plan:
        """Plan with the smallest free memory of all ranks: free memory differs, but chunks must be the same."""
        columns = make_columns(self.store, self.job.fields, samples)
        # Encoded pictures stay in host memory, where decoders read them.
        on_gpu = self.device.type == "cuda" and not any(column.is_encoded for column in columns)
        if not on_gpu:
            told.pop("streamed", None)
        free = torch.cuda.mem_get_info(self.device)[0] if on_gpu else None
        return make_plan(
            column_facts(self.store, columns, len(samples)),
            gpu_memory_bytes=None if free is None else self.ranks.smallest(free),
            ram_bytes=self.ranks.smallest(probe(self.store.path).ram_available_bytes or 8 << 30),
            batch_size=self.rank_batch,
            ranks_per_host=self.ranks.local_world_size,
            gpu_share=share,
            fallback_share=fallback,
            threads=self.ranks.smallest(self.store.threads),
            **told,
        )

    # -- what is written down ----------------------------------------------------------------

    @property
    def _place(self) -> str:
        return str(as_url(self.store.name) or self.store.path.resolve())

    def _notes(self, train: Loader) -> list[Note]:
        chosen, settings = self.chosen, self.settings
        return [
            Note(f"recipe {chosen.recipe.name} on {self.device}"),
            Note(f"store: {self._place}", Topic.STORE, {"store": self._place}),
            *map(Note, describe_choices(settings)),
            *map(Note, self.job.notes),
            *self._rank_notes(),
            *map(Note, self._few_notes()),
            Note(f"data {train.reason}", Topic.DATA),
            *map(Note, settings.notes),
            *map(Note, chosen.notes),
        ]

    def _few_notes(self) -> list[str]:
        have, asked = len(self.job.samples["train"]), self.settings.training.batch_size
        notes = [
            f"no {name} samples: {what}"
            for name, what in (
                ("val", "no epoch is the best, and nothing stops early"),
                ("test", "nothing says how good the model is"),
            )
            if not len(self.job.samples[name])
        ]
        if asked > have:
            notes.append(
                f"batch_size is {asked:,}, and there are {have:,} training samples: one batch has all"
            )
        return notes

    def _rank_notes(self) -> list[Note]:
        if not self.ranks.joined:
            return []
        each, ranks = self.rank_batch, self.ranks.world_size
        here, whole = self.ranks.local_world_size, self.settings.training.batch_size
        words = [f"ranks {ranks}, {here} on this machine: batches of {whole} are {each} on each"]
        if num_restarts():
            words.append(f"started again after a rank was lost, time {num_restarts()}")
        return [Note(text, Topic.RANKS) for text in words]

    def _write_setup(self, train: Loader) -> None:
        """Write config, plan, machine and data to the run's log."""
        with RunLock(self.folder), RunLog(self.folder / LOG_NAME) as log:
            values = {**self.settings.values(), "notes": list(self.settings.notes)}
            log.write("config", {"settings": values, "reasons": self.settings.reasons})
            log.write("plan", train.plan.to_json())
            log.write("machine", probe(self.store.path).to_json())
            log.write("data", self._data_facts())

    def _data_facts(self) -> dict[str, Any]:
        """Return the store and its splits, what was left out and why, and digests of data and code."""
        samples = {name: len(ids) for name, ids in self.job.samples.items()}
        unused = self.store.num_samples - sum(samples.values())
        return {
            "store": self._place,
            "digest": fingerprint(self.store),
            "num_samples": self.store.num_samples,
            "splits": samples | ({"unused": unused} if unused else {}),
            "counts": self.store.manifest.counts,
            "repairs": {
                name: [entry["repair"] for entry in fitted]
                for name, fitted in self.store.manifest.repairs.items()
            },
            "code": code_digest(self.chosen.recipe),
        }

    def _identity(self) -> dict[str, Any]:
        settings, chosen = self.settings, self.chosen
        return {
            **chosen.file_digests,
            "recipe": chosen.key,
            "options": chosen.kept,
            "facts": describe_job(chosen.recipe, self.job, self.store),
            "data": fingerprint(self.store),
            "learning_rate": settings.training.lr,
            "batch_size": settings.training.batch_size,
            "drop_last": settings.data.drop_last,
            "max_training_samples": settings.data.max_training_samples,
            # Older checkpoints, without this entry, were trained on the first samples of the file.
            "subset": None if settings.data.max_training_samples is None else "drawn by the seed",
        }


def share_batch(settings: Settings, world_size: int) -> int:
    """Return each rank's share of a batch: `batch_size` in the config is the total over all ranks."""
    if settings.training.batch_size % world_size == 0:
        return settings.training.batch_size // world_size
    size = settings.training.batch_size
    near = max(world_size, size - size % world_size)
    raise InputError(
        f"batch_size is {size} ({settings.reasons['training.batch_size']}), and {world_size} ranks share it.",
        f"a multiple of {world_size}: the batch is the same on any number of ranks",
        f"--set training.batch_size={near}, or --set training.batch_size={near + world_size}",
    )


class _WithFinal:
    """Passes test batches to both the job's metrics and its final metrics."""

    def __init__(self, make: Callable[[], Metrics] | None, final: FinalMetrics) -> None:
        self._metrics, self._final = None if make is None else make(), final

    def update(self, outputs: Any, targets: Any) -> None:
        if self._metrics is not None:
            self._metrics.update(outputs, targets)
        self._final.update(outputs, targets)

    def compute(self) -> dict[str, float]:
        return {} if self._metrics is None else self._metrics.compute()


# -- as plain values ------------------------------------------------------------------------------


def as_json(run: RecipeRun) -> Mapping[str, Any]:
    """Return a run as plain values; losses of single steps are in the run's log."""
    return {
        "recipe": run.recipe,
        "ended": run.ended,
        "run_dir": str(run.run_dir),
        "best": None if run.best is None else str(run.best),
        "monitor": run.monitor[0],
        "baseline": run.baseline,
        "val": run.val,
        "test": run.test,
        "evaluation": None if run.evaluation is None else run.evaluation.to_json(),
        "epochs": [
            {**vars(report), "samples_per_second": report.samples_per_second}
            for report in run.epochs
        ],
        "notes": run.notes,
    }


# -- progress for people ----------------------------------------------------------------------------


_SHOW_SECONDS = 0.2


class RunProgress:
    """Forwards progress to another `Progress` in samples, with a line for each epoch."""

    def __init__(self, told: Progress, loader: Loader, epochs: int) -> None:
        self._told = told
        self._loader = loader
        self._epochs = epochs
        self._show = getattr(told, "show", None)
        self._num_told = 0
        self._left = 0
        self._began = self._shown = time.perf_counter()
        self._waited = 0.0
        self._num_samples = 0
        # Seconds of finished epochs, and the start of the current one. In one tuple, which is replaced at once,
        # so that the telemetry thread never reads an old and a new number together.
        self._clock: tuple[float, float | None] = (0.0, None)
        self.history: History | None = None

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Begin an epoch."""
        self.tell_epochs()
        batch = self._loader.batch_size
        whole = len(self._loader.samples)
        self._left = min(whole, batch * total) if total is not None else whole
        self._began, self._waited = time.perf_counter(), self._loader.waited_seconds
        self._clock = (self.trained_seconds, self._began)
        self._told.start(f"{label}/{self._epochs}", self._left, "samples")

    def advance(self, count: int = 1) -> None:
        """Count batches that are done."""
        done = min(self._left, count * self._loader.batch_size)
        self._left -= done
        self._num_samples += done
        self._told.advance(done)
        now = time.perf_counter()
        if not self._left:
            self._clock = (self.trained_seconds, None)
        if self._show is not None and now - self._shown >= _SHOW_SECONDS:
            self._shown = now
            waited = (self._loader.waited_seconds - self._waited) / max(now - self._began, 1e-9)
            losses = self.history.step_losses if self.history is not None else ()
            loss = f"loss {losses[-1]:.4g}  " if losses else ""
            self._show(f"{loss}waited {waited:.0%}")

    @property
    def trained_seconds(self) -> float:
        """Seconds spent in epochs so far, without the time between epochs."""
        finished, since = self._clock
        return finished if since is None else finished + time.perf_counter() - since

    def count(self) -> RunCounters:
        """Return the counters so far. May be called from another thread, as telemetry does."""
        history, device = self.history, self._loader.device
        losses = history.step_losses if history is not None else ()
        on_gpu = device.type == "cuda"
        return RunCounters(
            self._num_samples,
            self.trained_seconds,
            self._loader.waited_seconds,
            min(self._loader.epoch, self._epochs - 1),
            losses[-1] if losses else None,
            torch.cuda.memory_allocated(device) if on_gpu else None,
            torch.cuda.memory_reserved(device) if on_gpu else None,
        )

    def say(self, line: str) -> None:
        """Show a line, unchanged."""
        self._told.say(line)

    def tell_epochs(self) -> None:
        """Print a line for each epoch that has ended since the last call."""
        for report in (self.history.epochs if self.history else [])[self._num_told :]:
            self._num_told += 1
            self._told.say(describe_epoch(report, self._epochs))
