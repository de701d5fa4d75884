"""Reading gzip HDF5 from the page cache: stoker's threads against h5py.

    python benchmarks/gzip_hdf5.py [--megabytes 64] [--threads 2]

Three kinds of data, as the compressor sees them: sparse counts, prices with two digits, noisy bytes; each with
h5py's gzip level 4, with and without shuffle. h5py is measured with one thread and with as many as stoker
(its lock makes them wait for each other), and the better figure counts. All ways run in turns. Each way has its
best turn, which a busy machine disturbs least, and its median; `core` is megabytes per second of CPU time, which
other programs hardly disturb: with n free cores stoker's threads make n times as much, h5py's do not. The
limit is libdeflate or zlib alone on the stored chunks, with as many threads and no reading, shuffling or placing.
stoker opens the file anew in every turn, which costs about 5 ms; h5py's file stays open.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np

from harness import publish, seconds_of, side_by_side
from stoker.store import hdf5 as filters
from stoker.store.reader import open_store

TURNS = 12
CHUNK_BYTES = 1 << 20


def arrays(megabytes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = megabytes * 1_000_000 // 4096
    prices = np.cumsum(rng.normal(size=(rows, 1024)), axis=1).round(2)
    return {
        "counts": rng.poisson(0.3, (rows, 1024)).astype("f4"),
        "prices": prices.astype("f4"),
        "bytes": rng.integers(0, 30, (rows, 4096)).astype("u1"),
    }


def pieces(rows: int, height: int, threads: int) -> list[tuple[int, int]]:
    """Row ranges for several threads, cut at chunks so that none is decoded twice."""
    step = max(height, rows // threads // height * height)
    return [(low, min(rows, low + step)) for low in range(0, rows, step)]


def measure(path: Path, values: np.ndarray, threads: int) -> dict[str, dict[str, float]]:
    out = np.empty_like(values)
    rows, height = len(values), CHUNK_BYTES // values[0].nbytes
    with h5py.File(path) as file, ThreadPoolExecutor(threads) as pool:
        dataset = file["features"]
        cuts = pieces(rows, height, threads)
        stored = [dataset.id.read_direct_chunk((low, 0))[1] for low in range(0, rows, height)]

        def h5py_threads() -> None:
            list(
                pool.map(
                    lambda cut: dataset.read_direct(out[slice(*cut)], np.s_[slice(*cut)]), cuts
                )
            )

        def stoker_threads() -> None:
            # Opened anew: nothing that was decoded before is kept.
            with open_store(path, threads=threads) as store:
                store.read_rows("features", 0, rows, out)

        def inflate_alone() -> None:
            undo = filters._UNDO[filters.DEFLATE]
            list(pool.map(lambda raw: undo(raw, CHUNK_BYTES, 1), stored))

        ways = {
            "h5py, 1 thread": lambda: dataset.read_direct(out),
            f"h5py, {threads} threads": h5py_threads,
            "stoker": stoker_threads,
            "limit: inflating alone": inflate_alone,
        }
        busy: dict[str, list[float]] = {name: [] for name in ways}

        def turn(name: str) -> float:
            began = time.process_time()
            seconds = seconds_of(ways[name])
            busy[name].append(time.process_time() - began)
            return seconds

        taken = side_by_side([lambda name=name: turn(name) for name in ways], TURNS)
        stoker_threads()
        assert (out == values).all()
    columns = dict(zip(ways, zip(*taken, strict=True), strict=True))
    kinds = {
        "best": {name: min(seconds) for name, seconds in columns.items()},
        "median": {name: statistics.median(seconds) for name, seconds in columns.items()},
        "core": {name: min(seconds) for name, seconds in busy.items()},
    }
    return {
        kind: with_ratio({name: values.nbytes / 1e6 / seconds for name, seconds in found.items()})
        for kind, found in kinds.items()
    }


def with_ratio(rates: dict[str, float]) -> dict[str, float]:
    peer = max(rate for name, rate in rates.items() if name.startswith("h5py"))
    return rates | {"ratio_to_h5py": rates["stoker"] / peer}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for name, values in arrays(args.megabytes).items():
            for shuffle in (False, True) if values.itemsize > 1 else (False,):
                path = Path(folder) / "x.h5"
                with h5py.File(path, "w") as file:
                    file.create_dataset(
                        "features", data=values, chunks=(CHUNK_BYTES // values[0].nbytes, values.shape[1]),
                        compression="gzip", compression_opts=4, shuffle=shuffle,
                    )  # fmt: skip
                kind = f"{name}, shuffle" if shuffle else name
                results[kind] = measure(path, values, args.threads)
                for way, rates in results[kind].items():
                    print(kind, way, {key: round(value, 2) for key, value in rates.items()})
    publish(
        "gzip_hdf5",
        {
            "megabytes": args.megabytes,
            "threads": args.threads,
            "inflater": "libdeflate" if filters.deflate is not None else "zlib",
            "megabytes_per_second": results,
        },
    )


if __name__ == "__main__":
    main()
