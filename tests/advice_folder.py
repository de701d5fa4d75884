"""The folder in which refused commands are typed again: a little of everything that stoker reads and writes."""

from __future__ import annotations

import gzip
import os
import shutil
import stat
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from molecule_makers import msp_record
from run_folders import write_run
from run_makers import make_store, settings_for
from stoker.store.fields import Dense
from store_makers import write_store

REPOSITORY = Path(__file__).resolve().parent.parent


def make_folder(folder: Path) -> None:
    """Write the files that the cases name."""
    rng = np.random.default_rng(0)
    for kind, name in (
        ("tabular", "store"),
        ("forex", "forex-store"),
        ("segmentation", "seg-store"),
        ("windows", "window-store"),
    ):
        make_store(kind, folder / name).close()
    write_store(folder / "plain-store", [{"numbers": Dense(np.arange(40, dtype="i8"))}]).close()
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    (folder / "stores").mkdir()
    (folder / "stores" / "tabular").symlink_to(folder / "store")
    (folder / "config.yaml").write_text("training:\n  epochs: 1\n")
    (folder / "tabular.yaml").write_text(
        "recipe: {name: tabular, store: store, options: {hidden: [8]}}\n"
        "training: {epochs: 1, batch_size: 16, precision: fp32}\n"
    )
    rows = "\n".join(f"{one:.3f},{two:.3f},{one > 0:d}" for one, two in rng.normal(size=(60, 2)))
    (folder / "table.csv").write_text(f"a,b,label\n{rows}\n")
    (folder / "dirty.csv").write_text("a,b\n" + "1,2\n3,4\n" * 20 + "5,\n")
    np.save(folder / "a.npy", rng.normal(size=(40, 3)).astype("f4"))
    np.save(folder / "b.npy", rng.integers(0, 2, 40))
    np.savez(folder / "two.npz", one=np.ones((4, 2), "f4"), two=np.ones(4, "f4"))
    for name in ("pictures", "masks"):
        for kind in ("cat", "dog"):
            (folder / name / kind).mkdir(parents=True)
            for number in range(3):
                pixels = rng.integers(0, 3 if name == "masks" else 256, (16, 16, 3)).astype("u1")
                image = pixels[..., 0] if name == "masks" else pixels
                Image.fromarray(image).save(folder / name / kind / f"{number}.png")
    (folder / "empty").mkdir()
    (folder / "library.msp").write_text(
        "".join(msp_record(f"c{n}", peaks=((50, 10), (60 + n, 99)), SMILES="CCO") for n in range(4))
    )
    (folder / "bad.msp.gz").write_bytes(b"\x1f\x8b" + b"damaged" * 9)
    (folder / "wide.msp").write_bytes("Name: a\nNum Peaks: 1\n1 2\n".encode("utf-16"))
    (folder / "mols").mkdir()
    _write_bars(folder)
    with h5py.File(folder / "plain.h5", "w") as file:
        file["features"] = rng.normal(size=(40, 3)).astype("f4")
    with h5py.File(folder / "text.h5", "w") as file:
        file["text"] = "no numbers"
    write_run(folder / "told", epochs=2)
    from stoker.recipes.run import run_recipe

    run_recipe(
        settings_for("tabular", folder / "store", folder / "run", "training.epochs=1"), device="cpu"
    )


def _write_bars(folder: Path) -> None:
    (folder / "bars").mkdir()
    for name, minutes in (("M5", 5), ("H1", 60)):
        count = 8 * 24 * 60 // minutes
        times = np.datetime64("2020-08-20T00:00") + np.arange(count) * np.timedelta64(minutes, "m")
        price = 1.1 + np.cumsum(np.random.default_rng(1).normal(size=count)) * 1e-5
        lines = [
            f"{str(time).replace('-', '.').replace('T', ' ')},{p:.5f},{p + 1e-4:.5f},{p - 1e-4:.5f},{p:.5f},10"
            for time, p in zip(times, price, strict=True)
        ]
        text = "time,open,high,low,close,volume\n" + "\n".join(lines) + "\n"
        (folder / "bars" / f"EURUSD_{name}.csv").write_text(text)
    (folder / "bad_M5.csv.gz").write_bytes(gzip.compress(b"time,open\n" * 99)[:-9] + b"damaged..")


def restore(template: Path | str, copy: Path | str) -> None:
    """Make a folder what its template is: what was added goes, what was changed is copied again.

    With plain texts: it runs behind each of 900 cases, and a third of its time was making paths.
    """
    wanted = {entry.name: entry for entry in os.scandir(template)}
    there: dict[str, tuple[int, ...]] = {}
    for entry in list(os.scandir(copy)):
        meant, was = wanted.get(entry.name), entry.stat(follow_symlinks=False)
        kind = stat.S_IFMT(was.st_mode)
        if meant is not None and kind == stat.S_IFMT(meant.stat(follow_symlinks=False).st_mode):
            there[entry.name] = _marks(was)
        else:
            if kind == stat.S_IFDIR:
                shutil.rmtree(entry.path)
            else:
                Path(entry.path).unlink()
    for entry in wanted.values():
        found = there.get(entry.name)
        path = f"{copy}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            if found is None:
                Path(path).mkdir()
            restore(entry.path, path)
        elif found is None or found != _marks(entry.stat(follow_symlinks=False)):
            Path(path).unlink(missing_ok=True)
            shutil.copy2(entry.path, path, follow_symlinks=False)


def _marks(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_mode
