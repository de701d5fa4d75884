"""The samples of `faults.py`, and one epoch of them through stoker and through what people use instead.

Enters: a folder. Leaves: the same 600 samples as a store, HDF5, and the formats of the peers that are installed; the
batches of one epoch; and how many samples were lost, repeated or changed. A sample holds its own number.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import DataLoader, Dataset

from stoker.loader.loader import Loader
from stoker.packing import PackOptions, pack
from stoker.sources.arrays import ArraysSource

SAMPLES, WIDTH, BATCH = 600, 64, 20
OURS = ("stoker store", "stoker, plain HDF5")
PEERS = {
    "h5py loop": "h5py",
    "DataLoader, 0 workers": "torch",
    "DataLoader, 2 workers": "torch",
    "StatefulDataLoader, 2 workers": "torchdata",
    "torchdata nodes": "torchdata",
    "WebDataset": "webdataset",
    "MosaicML Streaming": "streaming",
    "litdata": "litdata",
}
"""Each with the module that it needs."""


def ways() -> list[str]:
    """Return stoker's ways and those of the peers that can be imported."""
    return [*OURS, *(way for way, module in PEERS.items() if can_import(module))]


@functools.cache
def can_import(module: str) -> bool:
    """Return whether a peer's module can be imported; say why not if it is installed."""
    try:
        importlib.import_module(module)
    except (
        ImportError,
        RuntimeError,
    ) as error:  # torchvision raises the latter beside another torch
        if importlib.util.find_spec(module) is not None:
            print(f"{module} is left out: {error}", file=sys.stderr)
        return False
    return True


def rows() -> np.ndarray:
    """Return samples whose first value is their number and whose others follow from it."""
    numbers = np.arange(SAMPLES, dtype="f4")[:, None]
    return numbers + np.arange(WIDTH, dtype="f4") / 1024


def make_world(folder: Path) -> None:
    """Write the samples in every format. Peers get shards of half of the samples, and the checksums that they have."""
    np.save(folder / "features.npy", rows())
    with h5py.File(folder / "plain.h5", "w") as file:
        file["features"] = rows()
    source = ArraysSource((folder / "features.npy",), part_bytes=SAMPLES * WIDTH * 2)
    pack(source, folder / "store", PackOptions(jobs=1))
    half = SAMPLES // 2
    if "WebDataset" in ways():
        import webdataset

        (folder / "tars").mkdir()
        for shard in range(2):
            with webdataset.TarWriter(str(folder / f"tars/part-{shard}.tar")) as out:
                for number in range(shard * half, (shard + 1) * half):
                    out.write({"__key__": f"{number:05d}", "x.npy": rows()[number]})
    if "MosaicML Streaming" in ways():
        from streaming import MDSWriter

        columns = {"x": f"ndarray:float32:{WIDTH}"}
        with MDSWriter(
            out=str(folder / "mds"), columns=columns, hashes=["xxh64"], size_limit=80_000
        ) as out:
            for row in rows():
                out.write({"x": row})
    if "litdata" in ways():
        from litdata.streaming.writer import BinaryWriter

        (folder / "lit").mkdir()
        writer = BinaryWriter(str(folder / "lit"), chunk_bytes="80KB")
        for number, row in enumerate(rows()):
            writer[number] = row
        writer.done()
        writer.merge(1)


class Plain(Dataset):
    """What people write: a file that is opened at the first sample, in every worker."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> np.ndarray:
        if self.file is None:
            self.file = h5py.File(self.path)
        return self.file["features"][number]


def batches(way: str, folder: Path) -> Iterator[Any]:
    """Yield the batches of one epoch as tensors or arrays."""
    if way in OURS:
        path = folder / ("store" if way == OURS[0] else "plain.h5")
        with Loader(path, BATCH, "cpu", data_bytes=SAMPLES * WIDTH * 2) as loader:
            for batch in loader:
                yield batch["features"]
    elif way == "h5py loop":
        with h5py.File(folder / "plain.h5") as file:
            for start in range(0, SAMPLES, BATCH):
                yield file["features"][start : start + BATCH]
    elif way == "WebDataset":
        import webdataset

        names = [str(folder / f"tars/part-{shard}.tar") for shard in range(2)]
        read = (
            webdataset.WebDataset(names, shardshuffle=False)
            .decode()
            .to_tuple("x.npy")
            .batched(BATCH)
        )
        yield from (batch[0] for batch in read)
    elif way == "MosaicML Streaming":
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()  # of cases that were killed: it would be taken for this one's
        read = StreamingDataset(
            local=str(folder / "mds"), batch_size=BATCH, shuffle=False, validate_hash="xxh64"
        )
        yield from (batch["x"] for batch in DataLoader(read, BATCH))
    elif way == "litdata":
        import litdata

        os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(folder / "litcache")
        read = litdata.StreamingDataset(str(folder / "lit"), shuffle=False)
        yield from litdata.StreamingDataLoader(read, batch_size=BATCH, num_workers=0)
    elif way == "torchdata nodes":
        from torch.utils.data import SequentialSampler
        from torchdata import nodes

        data = Plain(folder / "plain.h5")
        picked = nodes.Batcher(
            nodes.SamplerWrapper(SequentialSampler(data)), BATCH, drop_last=False
        )
        yield from nodes.Loader(
            nodes.ParallelMapper(
                picked,
                lambda batch: np.stack([data[number] for number in batch]),
                2,
                method="thread",
            )
        )
    else:
        kind: Any = DataLoader
        if way.startswith("Stateful"):
            from torchdata.stateful_dataloader import StatefulDataLoader as kind  # noqa: N813
        workers = 2 if "2 workers" in way else 0
        yield from kind(Plain(folder / "plain.h5"), BATCH, num_workers=workers)


def read_epoch(way: str, folder: Path, midway: Callable[[], None] | None = None) -> dict[str, Any]:
    """Return what came: lost, repeated and changed samples."""
    wanted, seen, changed = rows(), Counter[int](), 0
    for number, batch in enumerate(batches(way, folder)):
        values = np.asarray(batch)
        for row in values:
            known = 0 <= row[0] < SAMPLES and float(row[0]).is_integer()
            seen[int(row[0]) if known else -1] += 1
            changed += not (known and np.array_equal(row, wanted[int(row[0])]))
        if midway and number == 3:
            midway()
    lost = sum(number not in seen for number in range(SAMPLES))
    return {
        "lost": lost,
        "repeated": sum(count - 1 for count in seen.values() if count > 1),
        "changed": changed,
    }


def file_of(way: str, folder: Path) -> Path:
    """Return the first file that holds samples."""
    places = {
        OURS[0]: "store/*.h5",
        "WebDataset": "tars/*.tar",
        "MosaicML Streaming": "mds/*.mds",
        "litdata": "lit/*.bin",
    }
    return sorted(folder.glob(places[way]))[0] if way in places else folder / "plain.h5"
