"""Reading dense rows: stoker's positional reads against h5py slicing and the memory's own speed.

    python benchmarks/read.py [--megabytes 1500] [--threads 2]

Page cache warm. The limit is a plain memory copy with as many threads. Also one random row of each
layout people have, because that is where default chunks cost 47 ms.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np

from harness import publish, timed
from stoker.ownership import always, write_text
from stoker.store.fields import Dense
from stoker.store.manifest import FieldInfo, Manifest
from stoker.store.reader import open_store
from stoker.store.shard import write_shard


def copy_limit(source: np.ndarray, out: np.ndarray, threads: int) -> None:
    pieces = np.array_split(np.arange(len(source)), threads * 8)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda p: np.copyto(out[p[0] : p[-1] + 1], source[p[0] : p[-1] + 1]), pieces))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    rows = args.megabytes * 1_000_000 // (501 * 4)
    rng = np.random.default_rng(0)
    values = rng.random((rows, 501), dtype=np.float32)
    gigabytes = values.nbytes / 1e9
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder_text:
        folder = Path(folder_text)
        info = write_shard(folder / "shard-00000.h5", {"features": Dense(values)}, "all")
        fields = {"features": FieldInfo.of(Dense(values[:1]))}
        manifest = Manifest(num_samples=rows, fields=fields, shards=[info])
        write_text(folder / "store.json", manifest.to_text(), always)
        out = np.empty_like(values)
        store = open_store(folder, threads=args.threads)
        plain = open_store(folder / "shard-00000.h5", threads=args.threads)
        with h5py.File(folder / "shard-00000.h5") as file:
            dataset = file["features"]
            results = {
                "h5py d[a:b]": timed(lambda: dataset[0:rows], 5),
                "h5py read_direct": timed(lambda: dataset.read_direct(out), 5),
                "stoker first read (checksums verified)": timed(
                    lambda: open_store(folder, threads=args.threads).read_rows(
                        "features", 0, rows, out
                    ),
                    5,
                ),
                "stoker store": timed(lambda: store.read_rows("features", 0, rows, out), 5),
                "stoker plain file": timed(lambda: plain.read_rows("features", 0, rows, out), 5),
                "limit: memory copy": timed(lambda: copy_limit(values, out, args.threads), 5),
            }
        assert (out[::997] == values[::997]).all()
        rates = {name: gigabytes / timing.median_seconds for name, timing in results.items()}
        row_micros = random_rows(folder, values[:20_000], store)
    print(f"{gigabytes:.2f} GB, {args.threads} threads")
    for name, rate in rates.items():
        print(f"  {name:40s} {rate:6.2f} GB/s  {rate / rates['h5py d[a:b]']:5.2f} x h5py slicing")
    for name, micros in row_micros.items():
        print(f"  {name:40s} {micros:10.1f} us a row")
    publish(
        "read",
        {
            "gigabytes": gigabytes,
            "threads": args.threads,
            "gigabytes_per_second": rates,
            "timings": results,
            "ratio_to_h5py_slicing": rates["stoker store"] / rates["h5py d[a:b]"],
            "ratio_to_limit": rates["stoker store"] / rates["limit: memory copy"],
            "random_row_microseconds": row_micros,
        },
    )


def random_rows(folder: Path, values: np.ndarray, store: object) -> dict[str, float]:
    """Time one random row in each layout."""
    layouts = {
        "h5py, default chunks, gzip 4": {"compression": "gzip", "compression_opts": 4},
        "h5py, chunk of one row, gzip 4": {"compression": "gzip", "chunks": (1, 501)},
        "h5py, contiguous": {},
    }
    micros = {}
    for number, (name, options) in enumerate(layouts.items()):
        path = folder / f"layout-{number}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("features", values.shape, "f4", **options)[:] = values
        with h5py.File(path) as file:
            dataset = file["features"]
            micros[name] = per_row(
                lambda i, dataset=dataset: dataset[i], len(values), 40 if not number else 2000
            )
    micros["stoker store"] = per_row(
        lambda i: store.read_rows("features", i, i + 1), len(values), 5000
    )
    return micros


def per_row(read: object, rows: int, count: int) -> float:
    picks = np.random.default_rng(1).integers(0, rows, count).tolist()
    return timed(lambda: [read(i) for i in picks], 3).median_seconds / count * 1e6


if __name__ == "__main__":
    main()
