"""The demo step by step: makes bars, packs, inspects and plans, reads and trains in both ways, examines, tunes.

Enters: a folder. Leaves: CSV files, a store, two training scripts, a config, a run with its report page, and a
`DemoResult` with the measurements. Costs: about a minute on two cores, and half a gigabyte of disk until the training
scripts were examined. stoker's own run uses a GPU if there is one; the comparison trains on the CPU.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from stoker.config import load_config, resolve
from stoker.demo.training import (
    BATCH_SIZE,
    LEARNING_RATE,
    OPTIONS,
    TRAINED,
    WINDOWS,
    Reading,
    Training,
    measure_materialised,
    measure_series,
    train_both_ways,
    write_windows,
)
from stoker.display import command
from stoker.doctor.findings import Consultation
from stoker.doctor.findings_page import findings_page
from stoker.doctor.scripts import consult_script
from stoker.errors import InputError
from stoker.machine import probe
from stoker.ownership import SIGNATURE, always, claim_folder, free_name, remove_file, write_text
from stoker.packing import PackOptions, PackResult, pack
from stoker.plan import Plan, make_plan, store_facts
from stoker.recipes.run import RecipeRun, run_recipe
from stoker.report import Progress, Silent
from stoker.runs.reading import read_run
from stoker.runs.run_page import run_page
from stoker.sources.bars import BarsSource
from stoker.store.fields import Array
from stoker.store.inspection import Inspection, inspect_store
from stoker.store.reader import Store, open_store
from stoker.strict_json import json_text
from stoker.tune.job import Tuned, tune_job
from stoker.tune.trial import Effort

USUAL, OURS = "usual_way.py", "stoker_way.py"
CONFIG = "demo.yaml"
DOCTOR_PAGE = "doctor.html"
EXAMINED_STEPS = 30
_EPOCHS = 2
_SECONDS_PER_TRY = 1.0

_USUAL_LOADER = """\
samples = job.samples["train"].tolist()


class Windows(torch.utils.data.Dataset):
    def __init__(self):
        self.file = h5py.File("windows.h5")

    def __len__(self):
        return len(samples)

    def __getitem__(self, number):
        return {name: self.file[name][samples[number]] for name in (*NAMES, "targets")}


loader = torch.utils.data.DataLoader(Windows(), batch_size=BATCH_SIZE, shuffle=True)
"""
_STOKER_LOADER = """\
loader = stoker.Loader(
    "store", BATCH_SIZE, "cpu", order="shuffled", fields=job.fields, samples=job.samples["train"]
)
"""
_SCRIPT = '''\
"""A plain training loop. It knows nothing of a doctor."""

import h5py
import torch

import stoker
from stoker.recipes.forex.recipe import ForexRecipe

NAMES, BATCH_SIZE = {names!r}, {batch_size}
job = ForexRecipe().make_job(stoker.open_store("store"), {options!r}, 0)
{loader}optimizer = torch.optim.AdamW(job.model.parameters(), lr={lr})
for epoch in range(100):
    for batch in loader:
        gaps = {{f"{{name}}/gap": torch.zeros(batch[name].shape[:2]) for name in NAMES}}
        inputs, targets = job.unpack(dict(batch) | gaps)
        loss = job.criterion(job.model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        optimizer.step()
'''


@dataclass(frozen=True)
class Examined:
    """The doctor's findings for two scripts that differ only in their loader: a DataLoader, and stoker's."""

    usual: Consultation
    ours: Consultation

    @property
    def predicted(self) -> float | None:
        """Samples per second of the script with a DataLoader if loading took no time, or None if unknown."""
        step = self.usual.measurements.compute_seconds
        return None if step is None or not step.median else BATCH_SIZE / step.median

    @staticmethod
    def rate(consultation: Consultation) -> float | None:
        """Return samples per second by the median step, or None if unknown."""
        step = consultation.measurements.step_seconds
        return None if step is None or not step.median else BATCH_SIZE / step.median


@dataclass(frozen=True)
class DemoResult:
    """All results of the demo."""

    packed: PackResult  # of packing the bars
    inspection: Inspection  # the quality gate's findings in the store
    plan: Plan  # the plan for the store, as `stoker plan` makes it
    series: Reading  # reading an epoch from the store
    materialised: Reading  # reading it from written-out windows
    naive: Training  # training from written-out windows with a DataLoader
    trained: Training  # the same training with stoker
    # the doctor's findings for a script with a DataLoader, and for the same script with stoker's loader
    examined: Examined
    run: RecipeRun  # a run of the same job on all its samples, as `stoker train` does it
    tuned: Tuned  # the result of `stoker tune` for the run's config
    page: Path  # the report page of that run


def run_demo(
    folder: Path, weeks: int = 9, seed: int = 0, progress: Progress | None = None
) -> DemoResult:
    """Run the whole demo in `folder`.

    Args:
        folder: Folder for all files.
        weeks: Weeks of data; nine weeks are 64,800 one-minute bars.
        seed: Seed of the generated prices and of the model's weights.
        progress: Receives a line for every step.

    Raises:
        InputError: `folder` is a file, cannot be made, or is not the demo's own.
    """
    progress = progress or Silent()
    try:
        claim_folder(folder, "demo", "the demo")
    except OSError as error:
        raise InputError(
            f"--folder: {folder} is a file."
            if folder.is_file()
            else f"--folder: cannot make {folder}: {error.strerror}.",
            "a folder, or a name where one can be made",
            "stoker demo --folder stoker-demo",
        ) from error
    progress.say(f"making {weeks} weeks of EURUSD-like bars in five timeframes")
    make_bars(folder / "bars", weeks, seed)
    source = BarsSource((folder / "bars",), windows=WINDOWS, horizon=36)
    packed = pack(source, folder / "store", PackOptions(jobs=1), progress)
    path = folder / "windows.h5"
    with open_store(folder / "store") as store, contextlib.ExitStack() as at_end:
        at_end.callback(remove_file, path, always)
        inspection = inspect_store(store, progress)
        plan = _make_plan(store)
        series = measure_series(store)
        progress.say("writing the same windows out, the way chunk loaders want them")
        write_windows(store, path)
        materialised = measure_materialised(store, path)
        progress.say("training the same small forex model on both")
        naive, trained = train_both_ways(store, path, seed)
        progress.say(f"the doctor runs {folder / USUAL} and {folder / OURS} as they are")
        examined = examine(folder)
    run, tuned = _train_and_tune(folder, progress)
    write_text(folder / DOCTOR_PAGE, findings_page(examined.usual))
    document = {"generator": SIGNATURE, **examined.ours.to_json()}
    write_text(run.run_dir / "doctor.json", json_text(document))
    page = run.run_dir / "report.html"
    write_text(page, run_page([read_run(run.run_dir)]))
    return DemoResult(
        packed, inspection, plan, series, materialised, naive, trained, examined, run, tuned, page
    )


def _make_plan(store: Store) -> Plan:
    machine = probe(store.path)
    seen = [gpu.memory_free_bytes for gpu in machine.gpus if gpu.visible is not False]
    return make_plan(
        store_facts(store.manifest),
        gpu_memory_bytes=seen[0] if seen else None,
        ram_bytes=machine.ram_available_bytes or 8 << 30,
        batch_size=BATCH_SIZE,
        threads=store.threads,
    )


def examine(folder: Path, steps: int = EXAMINED_STEPS) -> Examined:
    """Write two scripts beside their data and run the doctor on both, one after the other, each for `steps` steps."""
    found = []
    job = {"names": TRAINED, "options": OPTIONS, "batch_size": BATCH_SIZE, "lr": LEARNING_RATE}
    for name, loader in ((USUAL, _USUAL_LOADER), (OURS, _STOKER_LOADER)):
        text = _SCRIPT.format(**job, loader=loader)
        write_text(folder / name, text, always)
        with contextlib.chdir(folder):
            found.append(consult_script([sys.executable, name], steps=steps)[1])
    return Examined(*found)


def _train_and_tune(folder: Path, progress: Progress) -> tuple[RecipeRun, Tuned]:
    """Train the same job from a config on all its samples, then tune that config."""
    config = {
        "recipe": {"name": "forex", "store": str(folder / "store"), "options": OPTIONS},
        "training": {"batch_size": BATCH_SIZE, "epochs": _EPOCHS, "lr": LEARNING_RATE},
        "run": {"dir": str(_free_folder(folder / "run"))},
    }
    write_text(folder / CONFIG, yaml.safe_dump(config, sort_keys=False), always)
    settings = resolve(load_config(folder / CONFIG))
    progress.say(f"training with stoker: {command('stoker', 'train', '--config', folder / CONFIG)}")
    run = run_recipe(settings, progress=progress)
    progress.say(
        f"tuning: {command('stoker', 'tune', '--config', folder / CONFIG, '--grow-update')}"
    )
    effort = Effort(_SECONDS_PER_TRY)
    return run, tune_job(settings, effort=effort, grow_update=True, progress=progress)


def _free_folder(folder: Path) -> Path:
    """Return `folder`, with a number appended if an earlier demo used the name."""
    return free_name(folder) if folder.exists() else folder


# -- bars -----------------------------------------------------------------------------------------

_MINUTE_NS = 60_000_000_000
_MINUTES = {"M1": 1, "M5": 5, "M15": 15, "H1": 60, "H4": 240}
_WEEK_MINUTES, _OPEN_MINUTES = 7 * 1440, 5 * 1440
_FIRST_SUNDAY_NS = 1_725_832_800_000_000_000  # Sunday 2024-09-08 22:00, when the week opens


def make_bars(folder: Path, weeks: int, seed: int) -> None:
    """Write `EURUSD_<TF>.csv` with random prices for five timeframes, with clustered volatility and no weekends."""
    folder.mkdir(parents=True, exist_ok=True)
    minute = _make_minutes(weeks, np.random.default_rng(seed))
    for name, minutes in _MINUTES.items():
        _write_csv(folder / f"EURUSD_{name}.csv", _resample(minute, minutes))


def _make_minutes(weeks: int, rng: np.random.Generator) -> dict[str, Array]:
    week = np.arange(weeks)[:, None] * _WEEK_MINUTES + np.arange(_OPEN_MINUTES)[None, :]
    opened = week.reshape(-1)
    daily = 1 + 0.6 * np.sin(2 * np.pi * (opened % 1440) / 1440 - 2)
    calm = np.exp(0.5 * np.convolve(rng.normal(size=len(opened)), np.ones(240) / 240**0.5, "same"))
    steps = rng.standard_t(4, size=(4, len(opened))) * 2e-5 * daily * calm
    # Four ticks per minute make a bar with an open, a close and two prices in between.
    path = 1.1 * np.exp(np.cumsum(steps.T.reshape(-1))).reshape(-1, 4)
    return {
        "time": _FIRST_SUNDAY_NS + opened * _MINUTE_NS,
        "open": path[:, 0],
        "high": path.max(axis=1),
        "low": path.min(axis=1),
        "close": path[:, -1],
        "volume": np.rint(40 * daily * calm * rng.gamma(4, size=len(opened))) + 1,
    }


def _resample(minute: dict[str, Array], minutes: int) -> dict[str, Array]:
    """Return bars of `minutes`, aligned to the clock, from one-minute bars."""
    slot = minute["time"] // (minutes * _MINUTE_NS)
    first = np.flatnonzero(np.diff(slot, prepend=-1))
    last = np.append(first[1:], len(slot)) - 1
    return {
        "time": slot[first] * minutes * _MINUTE_NS,
        "open": minute["open"][first],
        "high": np.maximum.reduceat(minute["high"], first),
        "low": np.minimum.reduceat(minute["low"], first),
        "close": minute["close"][last],
        "volume": np.add.reduceat(minute["volume"], first),
    }


def _write_csv(path: Path, bars: dict[str, Array]) -> None:
    times = np.datetime_as_string(bars["time"].astype("datetime64[ns]"), unit="m")
    prices = np.column_stack([bars[name] for name in ("open", "high", "low", "close")])
    lines = ["time,open,high,low,close,tick_volume"]
    for text, price, volume in zip(times, prices.tolist(), bars["volume"].tolist(), strict=True):
        lines.append(f"{text.replace('T', ' ')},{','.join(f'{x:.5f}' for x in price)},{volume:.0f}")
    write_text(path, "\n".join(lines) + "\n", always)
