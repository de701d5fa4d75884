"""An LSTM epoch over sliding windows: stoker's series on the device against today's recipes.

    python benchmarks/windows.py [--device cuda] [--workers 8]

Two jobs: 12,944 windows of 360 x 167, batch 128 (DESIGN's table), and five timeframes of
480/288/192/96/48 x 128. The limit is the same training loop with every window already on the device.
All loops train the same model eagerly; only where the batch comes from differs. On the CPU the model
is left out: loading alone is compared. A last job, always on one core of the CPU, is all host: a tiny
LSTM, whose loop costs what it takes to issue it, as with a GPU that waits for its launches.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import h5py
import numpy as np
import torch

from harness import publish, side_by_side
from stoker.loader.loader import Loader
from stoker.ownership import always, write_text
from stoker.store.fields import Dense, FieldData, Series
from stoker.store.manifest import FieldInfo, Manifest
from stoker.store.reader import Store, open_store
from stoker.store.shard import write_shard

BATCH = 128
JOBS = {
    "one series": ({"S": 360}, 167, 12_944),
    "five timeframes": ({"M1": 480, "M5": 288, "M15": 192, "H1": 96, "H4": 48}, 128, 4_096),
}


def make_series(windows: dict[str, int], features: int, count: int) -> dict[str, Series]:
    """A series per timeframe, `count` samples, windows that end one row later each."""
    rng = np.random.default_rng(0)
    made: dict[str, Series] = {}
    for name, window in windows.items():
        rows = count + window - 1
        made[name] = Series(
            rows=rng.normal(size=(rows, features)).astype("f4"),
            time=np.arange(rows),
            ends=np.arange(count) + window,
            window=window,
            gap=np.zeros(rows, np.uint8),
            columns=tuple(f"f{i}" for i in range(features)),
            duration_ns=1,
        )
    return made


def write_store(folder: Path, fields: Mapping[str, FieldData], count: int) -> Store:
    """A store of one shard."""
    info = write_shard(folder / "shard-00000.h5", fields, "all")
    about = {name: FieldInfo.of(data) for name, data in fields.items()}
    manifest = Manifest(num_samples=count, fields=about, shards=[info])
    write_text(folder / "store.json", manifest.to_text(), always)
    return open_store(folder)


def materialise(store: Store, path: Path, windows: dict[str, int]) -> None:
    with h5py.File(path, "w") as file:
        for name, window in windows.items():
            rows = store.read_series(name, "rows")
            view = np.lib.stride_tricks.sliding_window_view(rows, window, axis=0).swapaxes(1, 2)
            data = file.create_dataset(name, view.shape, "f4")
            for low in range(0, len(view), 512):
                data[low : low + 512] = view[low : low + 512]
        file["targets"] = store.read_rows("targets", 0, store.num_samples)


class Model(torch.nn.Module):
    def __init__(self, names: list[str], features: int, hidden: int = 128) -> None:
        super().__init__()
        self.lstms = torch.nn.ModuleDict(
            {n: torch.nn.LSTM(features, hidden, batch_first=True) for n in names}
        )
        self.head = torch.nn.Linear(hidden * len(names), 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(
            torch.cat([lstm(batch[n])[0][:, -1] for n, lstm in self.lstms.items()], dim=1)
        )


class Materialised(torch.utils.data.Dataset):
    """Windows in HDF5, opened per worker: what a careful user of torch's DataLoader writes."""

    def __init__(self, path: Path, names: list[str], count: int) -> None:
        self.path, self.names, self.count, self.file = path, names, count, None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if self.file is None:
            self.file = h5py.File(self.path)
        return {name: self.file[name][index] for name in [*self.names, "targets"]}


def document_chunks(
    path: Path, names: list[str], device: torch.device, count: int
) -> Iterable[dict]:
    """The published chunk loader: one big h5py slice, pin, copy, slice on the device."""
    with h5py.File(path) as file:
        whole = {}
        for name in [*names, "targets"]:
            host = torch.from_numpy(file[name][0:count])
            whole[name] = (
                host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
            )
    yield from slices(whole, count)


def resident_windows(
    store: Store, windows: dict[str, int], device: torch.device
) -> dict[str, torch.Tensor]:
    whole = {
        "targets": torch.from_numpy(store.read_rows("targets", 0, store.num_samples)).to(device)
    }
    for name, window in windows.items():
        rows = torch.from_numpy(store.read_series(name, "rows")).to(device)
        whole[name] = rows.unfold(0, window, 1).transpose(1, 2).contiguous()
    return whole


def slices(whole: dict[str, torch.Tensor], count: int) -> Iterable[dict[str, torch.Tensor]]:
    """Batches of windows that are on the device already."""
    for low in range(0, count, BATCH):
        yield {name: values[low : low + BATCH] for name, values in whole.items()}


def epoch_seconds(batches: Iterable, model: torch.nn.Module | None, device: torch.device) -> float:
    """One epoch: forward, backward, Adam; or, without a model, just taking the batches."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True) if model else None
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    sync()
    began = time.perf_counter()
    for batch in batches:
        if model is None:
            continue
        batch = {name: values.to(device, non_blocking=True) for name, values in batch.items()}
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.mse_loss(model(batch), batch["targets"]).backward()
        optimizer.step()
    sync()
    return time.perf_counter() - began


def run_job(name: str, device: torch.device, workers: int, repeats: int, scale: float) -> dict:
    windows, features, count = JOBS[name]
    count = int(count * scale)
    names = list(windows)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder_text:
        folder = Path(folder_text)
        targets = Dense(np.random.default_rng(1).normal(size=(count, 1)).astype("f4"))
        fields = {"targets": targets, **make_series(windows, features, count)}
        store = write_store(folder, fields, count)
        materialise(store, folder / "windows.h5", windows)
        torch.manual_seed(0)
        model = Model(names, features).to(device) if device.type == "cuda" else None
        dataset = Materialised(folder / "windows.h5", names, count)
        fields = [*names, "targets"]
        loader = Loader(store, BATCH, device, fields=fields)
        persistent = {"persistent_workers": True, "prefetch_factor": 4} if workers else {}
        torch_loader = torch.utils.data.DataLoader(
            dataset, BATCH, num_workers=workers, pin_memory=device.type == "cuda", **persistent
        )
        whole = resident_windows(store, windows, device)
        ways = {
            "limit: windows on the device": lambda: slices(whole, count),
            "stoker Loader": lambda: loader,
            f"torch DataLoader, {workers} workers": lambda: torch_loader,
            "document's chunk loader": lambda: document_chunks(
                folder / "windows.h5", names, device, count
            ),
        }
        list(loader)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats + 1):  # interleaved, so that a noisy minute hits all of them
            for way, make in ways.items():
                seconds[way].append(epoch_seconds(make(), model, device))
        medians = {way: float(np.median(times[1:])) for way, times in seconds.items()}
        ours = medians["stoker Loader"]
        pairs = side_by_side(
            [
                lambda make=make: epoch_seconds(make(), model, device)
                for make in [*ways.values()][:2]
            ],
            10 * repeats,
        )
        materialised_bytes = sum(count * window * features * 4 for window in windows.values())
        result = {
            "samples": count,
            "epoch_seconds": medians,
            "spread": {way: (max(t[1:]) - min(t[1:])) / medians[way] for way, t in seconds.items()},
            "ratio_to_limit": float(np.median([mine / limit for limit, mine in pairs])),
            "ratio_of_the_best": float(np.divide(*np.min(pairs, axis=0)[::-1])),
            "ratios_to_limit": [round(mine / limit, 4) for limit, mine in pairs],
            "ratio_of_medians": ours / medians["limit: windows on the device"],
            "times_faster_than": {way: value / ours for way, value in medians.items()},
            "device_bytes": loader.device_bytes,
            "materialised_bytes": materialised_bytes,
            "bytes_ratio": materialised_bytes / loader.device_bytes,
        }
        loader.close()
    print(f"{name}: {count} samples, batch {BATCH}, {device}")
    for way, value in medians.items():
        print(f"  {way:34s} {value:8.3f} s  {value / ours:6.2f} x stoker")
    print(f"  data on the device {loader_bytes(result)}")
    return result


def run_host_bound(count: int = 12_928, repeats: int = 12) -> dict:
    """The loader against slices of windows that are there, where every call of the host counts."""
    windows, features, device = {"S": 4}, 40, torch.device("cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        targets = Dense(np.zeros((count, 1), "f4"))
        fields = {"targets": targets, **make_series(windows, features, count)}
        store = write_store(Path(folder), fields, count)
        whole = resident_windows(store, windows, device)
        model = Model(list(windows), features, hidden=8)
        with Loader(store, BATCH, device, fields=[*windows, "targets"]) as loader:
            ways = [
                lambda: epoch_seconds(slices(whole, count), model, device),
                lambda: epoch_seconds(loader, model, device),
            ]
            pairs = side_by_side(ways, repeats + 2)[2:]
    torch.set_num_threads(threads)
    step_us = float(np.median([limit for limit, _ in pairs])) / (count / BATCH) * 1e6
    ratio = float(np.median([mine / limit for limit, mine in pairs]))
    print(f"all host: {step_us:.0f} us a step, {ratio:.3f} x with stoker's Loader")
    return {"limit_us_per_step": step_us, "ratio_to_limit": ratio}


def loader_bytes(result: dict) -> str:
    return f"{result['device_bytes'] / 1e6:.1f} MB, 1/{result['bytes_ratio']:.0f} of the windows"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=8 if torch.cuda.is_available() else 2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0 if torch.cuda.is_available() else 0.2)
    args = parser.parse_args()
    device = torch.device(args.device)
    results = {name: run_job(name, device, args.workers, args.repeats, args.scale) for name in JOBS}
    results["all host"] = run_host_bound()
    publish("windows", {"device": str(device), "batch": BATCH, **results})


if __name__ == "__main__":
    main()
