"""Every recipe's default run on its public data set: minutes, the metric of its field, and its strongest baseline.

    python benchmarks/defaults.py [RECIPE ...] [--device cpu]

Data: `shared/data` beside or above the checkout (docs/training.md says what is in it); a recipe whose data is not there
is left out. Results of recipes that are not named are kept in the file. Limit of a run: none; forex on two cores takes
hours, so name what is to be run.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from harness import RESULTS, machine_name, publish
from stoker.config import parse_config, resolve
from stoker.recipes.run import RecipeRun, run_recipe

ROOT = Path(__file__).parent.parent


def data_folder() -> Path:
    """Return the folder of the public data sets."""
    places = [ROOT / "shared/data", ROOT.parent / "shared/data", ROOT.parent.parent / "shared/data"]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        sys.exit(f"no data: none of {', '.join(map(str, places))} exists")
    return found


def pack(*words: str | Path) -> None:
    """Run `stoker pack`."""
    subprocess.run([sys.executable, "-m", "stoker", "pack", *map(str, words)], check=True)


def pack_tabular(data: Path, store: Path) -> str:
    """Intrusion detection: seven classes of flows."""
    repairs = ("clip@Flow Bytes/s", "clip@Flow Packets/s", "fill:median@Flow Bytes/s")
    options = [word for repair in repairs for word in ("--repair", repair)]
    pack("table", data / "tabular/cicids2017_sample.csv", store, "--target", "Label", *options)
    return "CIC-IDS2017 sample, 7 classes"


def pack_forex(data: Path, store: Path) -> str:
    """EURUSD of five timeframes."""
    pack("bars", data / "bars", store, "--on-bad", "quarantine", "--bad-budget", "0.1%")
    return "EURUSD M1 to H4, 50,000 bars each"


def pack_massspec(data: Path, store: Path) -> str:
    """Electron ionisation spectra."""
    folder = data / "massspec"
    library, structures = folder / "massbank_ei.msp.gz", folder / "massbank_ei_mol.zip"
    bad = ("--on-bad", "quarantine", "--bad-budget", "20%")
    pack("massspec", "--msp", library, "--mol-dir", structures, store, *bad)
    return "MassBank EI, 13,342 spectra"


def pack_segmentation(data: Path, store: Path) -> str:
    """Street scenes, a class per pixel."""
    folder = data / "segmentation"
    parts = {"images": next(folder.glob("*mages*")), "masks": next(folder.glob("*ask*"))}
    options = [word for name, path in parts.items() for word in (f"--{name}", path)]
    pack("segmentation", *options, store, "--size", "256x256")
    return "CamVid, 30 pictures, 11 classes"


def pack_images(data: Path, store: Path) -> str:
    """CIFAR-10 from JPEG bytes, as class folders."""
    from PIL import Image

    arrays = np.load(data / "images/cifar10_jpeg.npz")
    folder = store.parent / "cifar"
    for part in ("train", "test"):
        offsets = arrays[f"{part}_off"]
        raw, labels = arrays[f"{part}_bytes"], arrays[f"{part}_lab"]
        for number, label in enumerate(labels.tolist()):
            target = folder / part / str(label)
            target.mkdir(parents=True, exist_ok=True)
            picture = Image.open(io.BytesIO(raw[offsets[number] : offsets[number + 1]].tobytes()))
            picture.save(target / f"{number}.png")
    pack("images", folder, store, "--size", "32x32")
    return "CIFAR-10, 60,000 pictures"


PACKS: dict[str, Callable[[Path, Path], str]] = {
    "tabular": pack_tabular,
    "forex": pack_forex,
    "massspec": pack_massspec,
    "segmentation": pack_segmentation,
    "images": pack_images,
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
        "epochs": len(run.epochs),
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
        }
    return row


def main() -> None:
    """Run and publish after each recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", help=", ".join(PACKS))
    parser.add_argument("--device", default=None)
    given = parser.parse_args()
    data = data_folder()
    path = RESULTS / f"defaults-{machine_name()}.json"
    found = json.loads(path.read_text())["result"] if path.exists() else {}
    for name in given.recipes or PACKS:
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "store"
            try:
                what = PACKS[name](data, store)
            except (subprocess.CalledProcessError, FileNotFoundError, StopIteration) as error:
                print(f"{name}: left out, {error}", file=sys.stderr)
                continue
            values = {"recipe.name": name, "recipe.store": store, "run.dir": Path(folder) / "run"}
            if name == "segmentation":
                values["recipe.options.ignore_values"] = "[11]"  # CamVid's void is no class
            overrides = [f"{key}={value}" for key, value in values.items()]
            began, used = time.perf_counter(), time.process_time()
            run = run_recipe(resolve(parse_config("", overrides=overrides)), device=given.device)
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - used
            found[name] = described(run, what, seconds, cpu_seconds, given.device)
        publish("defaults", found)


if __name__ == "__main__":
    main()
