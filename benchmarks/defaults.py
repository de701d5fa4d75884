"""Every recipe's default run on its public data set: minutes, the metric of its field, and its baselines.

    python benchmarks/defaults.py [RECIPE ...] [--device cpu] [--data FOLDER] [--stores FOLDER] [--runs FOLDER]
                                  [--samples N]

Data: `shared/data` beside or above the checkout (docs/training.md says what is in it), or FOLDER of `--data`; a recipe
whose data is not there is left out. `--stores FOLDER` takes FOLDER/RECIPE, packed before, where there is one: packing
mass spectra needs RDKit, training and evaluating do not. `--runs FOLDER` keeps the runs as FOLDER/RECIPE, for
`stoker report`. Results of recipes that are not named are kept in the file.

`--samples N` trains two epochs on N samples where a whole run takes hours: the file then has the seconds of an epoch
and the minutes that the default number of epochs would take at most, no metric. Seconds of a shared machine say more
about the others than about stoker, so processor minutes stand beside them.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness import RESULTS, current_commit, machine_name, publish
from stoker.config import parse_config, resolve
from stoker.recipes.catalogue import choose_recipe
from stoker.recipes.run import RecipeRun, open_run, run_recipe
from stoker.report import Silent

ROOT = Path(__file__).parent.parent


def data_folder(given: Path | None) -> Path:
    """Return the folder of the public data sets."""
    if given is not None:
        return given
    places = [ROOT / "shared/data", ROOT.parent / "shared/data", ROOT.parent.parent / "shared/data"]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        sys.exit(f"no data: none of {', '.join(map(str, places))} exists")
    return found


def pack(*words: str | Path) -> None:
    """Run `stoker pack`."""
    subprocess.run([sys.executable, "-m", "stoker", "pack", *map(str, words)], check=True)


def pack_tabular(data: Path, store: Path) -> None:
    """Intrusion detection: seven classes of flows."""
    repairs = ("clip@Flow Bytes/s", "clip@Flow Packets/s", "fill:median@Flow Bytes/s")
    options = [word for repair in repairs for word in ("--repair", repair)]
    pack("table", data / "tabular/cicids2017_sample.csv", store, "--target", "Label", *options)


def pack_forex(data: Path, store: Path) -> None:
    """EURUSD of five timeframes."""
    pack("bars", data / "bars", store, "--on-bad", "quarantine", "--bad-budget", "0.1%")


def pack_massspec(data: Path, store: Path) -> None:
    """Electron ionisation spectra."""
    folder = data / "massspec"
    library, structures = folder / "massbank_ei.msp.gz", folder / "massbank_ei_mol.zip"
    bad = ("--on-bad", "quarantine", "--bad-budget", "20%")
    pack("massspec", "--msp", library, "--mol-dir", structures, store, *bad)


def pack_segmentation(data: Path, store: Path) -> None:
    """Street scenes, a class per pixel."""
    folder = data / "segmentation"
    parts = {"images": next(folder.glob("*mages*")), "masks": next(folder.glob("*ask*"))}
    options = [word for name, path in parts.items() for word in (f"--{name}", path)]
    pack("segmentation", *options, store, "--size", "256x256")


def pack_images(data: Path, store: Path) -> None:
    """CIFAR-10 from JPEG bytes, decoded into one HDF5 file: 60,000 small files take longer than the training."""
    import h5py
    from PIL import Image

    arrays = np.load(data / "images/cifar10_jpeg.npz")
    pictures, labels, split = [], [], []
    for code, part in ((0, "train"), (2, "test")):
        raw, ends = arrays[f"{part}_bytes"].tobytes(), arrays[f"{part}_off"].tolist()
        for low, high in itertools.pairwise(ends):
            picture = Image.open(io.BytesIO(raw[low:high])).convert("RGB")
            pictures.append(np.asarray(picture).transpose(2, 0, 1))
        labels.append(arrays[f"{part}_lab"].astype("i8"))
        split.append(np.full(len(labels[-1]), code, "u1"))
    with h5py.File(store, "w") as file:
        file["images"] = np.stack(pictures)
        file["labels"], file["split"] = np.concatenate(labels), np.concatenate(split)


@dataclass(frozen=True)
class Job:
    """What a recipe's default run is measured on."""

    pack: Callable[[Path, Path], None]
    data: str
    options: tuple[str, ...] = ()


JOBS = {
    "tabular": Job(pack_tabular, "CIC-IDS2017 sample, 6,311 flows, 7 classes"),
    "forex": Job(pack_forex, "EURUSD M1 to H4, 9,941 decisions"),
    "massspec": Job(pack_massspec, "MassBank EI, 12,677 spectra"),
    "segmentation": Job(
        pack_segmentation,
        "CamVid, 30 pictures at 256 x 256, 11 classes",
        ("recipe.options.ignore_values=[11]",),  # CamVid's void is no class
    ),
    "images": Job(pack_images, "CIFAR-10 (JPEG), 60,000 pictures"),
}


def described(
    run: RecipeRun, data: str, seconds: float, cpu_seconds: float, device: str | None
) -> dict[str, Any]:
    """Return the figures of one run; processor time shows where other work slowed it."""
    made = run.evaluation
    row: dict[str, Any] = {
        "data": data,
        "device": device or "default",
        "minutes": seconds / 60,
        "cpu_minutes": cpu_seconds / 60,
        "load_average": os.getloadavg()[1],
        "epochs": len(run.epochs),
        "epoch_seconds": statistics.median(epoch.seconds for epoch in run.epochs),
    }
    if made is not None:
        name, more = made.compared_by
        best = made.best_baseline
        row |= {
            "num_test": made.num_samples,
            "metric": name,
            "more_is_better": more,
            "value": made.metrics[name],
            "interval": list(made.intervals.get(name, ())),
            "baseline": None if best is None else best[0],
            "baseline_value": None if best is None else best[1],
            "worth": made.worth,
            "verdict": made.verdict,
            "metrics": made.metrics,
            "baselines": made.baselines,
            "notes": list(made.notes),
        }
    return row


def overrides_of(name: str, store: Path, run_dir: Path) -> list[str]:
    """Return what a default run is told: recipe, store, run folder, and how the data is to be read."""
    values = {"recipe.name": name, "recipe.store": store, "run.dir": run_dir}
    return [*(f"{key}={value}" for key, value in values.items()), *JOBS[name].options]


def run_whole(name: str, store: Path, run_dir: Path, device: str | None) -> dict[str, Any]:
    """Train and evaluate one recipe with its defaults."""
    began, used = time.perf_counter(), time.process_time()
    settings = resolve(parse_config("", overrides=overrides_of(name, store, run_dir)))
    run = run_recipe(settings, device=device)
    if run.evaluation is None:
        sys.exit(
            f"{name}: ended after {len(run.epochs)} epochs without an evaluation, so nothing is published"
        )
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - used
    return described(run, JOBS[name].data, seconds, cpu_seconds, device)


def run_part(
    name: str, store: Path, run_dir: Path, device: str | None, samples: int
) -> dict[str, Any]:
    """Train two epochs on some of the samples, and project the second onto a default run, without evaluations.

    On a CPU the minutes are its time over its cores: what others do at the same time does not enter.
    """
    usual = overrides_of(name, store, run_dir)
    told = [*usual, f"data.max_training_samples={samples}"]
    settings = choose_recipe(resolve(parse_config("", overrides=usual))).noted_settings
    with open_run(settings, device=device) as whole:
        num_train = len(whole.job.samples["train"])
    with (
        open_run(resolve(parse_config("", overrides=told)), device=device) as part,
        part.make_train_loader() as loader,
    ):
        trainer = part.make_trainer(loader, None, Silent(), run_dir=None)
        trainer.train_epoch()
        used = time.process_time()
        measured = trainer.train_epoch()
        used = time.process_time() - used
    times = num_train / measured.num_samples
    cores = len(os.sched_getaffinity(0))
    seconds = used / cores if part.device.type == "cpu" else measured.seconds
    epochs = settings.training.epochs
    return {
        "data": JOBS[name].data,
        "device": device or "default",
        "projected": True,
        "minutes": seconds * times * epochs / 60,
        "cpu_minutes": used * times * epochs / 60,
        "load_average": os.getloadavg()[1],
        "epochs": epochs,
        "epoch_seconds": seconds * times,
        "measured_samples": measured.num_samples,
        "measured_seconds": measured.seconds,
    }


def main() -> None:
    """Run and publish after each recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", help=", ".join(JOBS))
    parser.add_argument("--device", default=None)
    parser.add_argument("--data", type=Path, default=None, help="folder of the data sets")
    parser.add_argument("--stores", type=Path, default=None, help="folder of packed stores")
    parser.add_argument("--runs", type=Path, default=None, help="folder that keeps the runs")
    parser.add_argument(
        "--samples", type=int, default=None, help="train on these, project the rest"
    )
    given = parser.parse_args()
    path = RESULTS / f"defaults-{machine_name()}.json"
    found = json.loads(path.read_text())["result"] if path.exists() else {}
    for name in given.recipes or JOBS:
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "store"
            if given.stores is not None and (given.stores / name).exists():
                store = given.stores / name
            else:
                store = store.with_suffix(".h5") if name == "images" else store
                try:
                    JOBS[name].pack(data_folder(given.data), store)
                except (subprocess.CalledProcessError, OSError, StopIteration) as error:
                    print(f"{name}: left out, {error}", file=sys.stderr)
                    continue
            run_dir = Path(folder) / "run" if given.runs is None else given.runs / name
            if given.samples is None:
                found[name] = run_whole(name, store, run_dir, given.device)
            else:
                found[name] = run_part(name, store, run_dir, given.device, given.samples)
        found[name]["commit"] = current_commit()  # the file keeps results of earlier ones
        publish("defaults", found)


if __name__ == "__main__":
    main()
