"""Reading bars: 1,000,000 CSV lines into checked arrays, beside pandas and the limit.

    python benchmarks/bars.py [--rows 1000000] [--repeats 7]

Peer: `pandas.read_csv(parse_dates=[0])`, which checks nothing. Limit: pyarrow's CSV reader with
every cell left as text: nobody who uses it can be faster. Where the real EURUSD files are present
(STOKER_DATA or ../shared/data), the whole source is timed on them too: five timeframes to series,
samples, targets and splits.
"""

from __future__ import annotations

import argparse
import gzip
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv

from harness import Timing, publish, timed
from stoker.sources.bars import BarsSource, read_bars
from stoker.sources.contract import PartContext

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


def write_rows(path: Path, num_rows: int) -> None:
    """Minutes of a random walk, as the real files are written: no header, five decimals."""
    rng = np.random.default_rng(0)
    stamps = (np.datetime64("2018-01-01T00:00") + np.arange(num_rows)).astype(str)
    close = np.round(1.1 * np.exp(np.cumsum(rng.normal(0, 1e-5, num_rows))), 5)
    volume = rng.integers(1, 3000, num_rows)
    with path.open("w") as file:
        for stamp, price, ticks in zip(stamps, close, volume, strict=True):
            file.write(
                f"{stamp[:10]} {stamp[11:]},{price:.5f},{price + 1e-4:.5f},{price - 1e-4:.5f},"
                f"{price:.5f},{ticks}\n"
            )


def damage(path: Path, source: Path) -> None:
    """One line in ten thousand is cut short, one has a word for a number."""
    lines = source.read_bytes().split(b"\n")
    for place in range(0, len(lines) - 1, 10_000):
        lines[place] = lines[place][:20]
        lines[place + 5_000 if place + 5_000 < len(lines) - 1 else place] = (
            b"2018-01-01 00:00,a,b,c,d,e"
        )
    path.write_bytes(b"\n".join(lines))


def read_raw(path: Path) -> None:
    names = [str(cell) for cell in range(6)]
    arrow_csv.read_csv(
        pa.BufferReader(path.read_bytes()),
        read_options=arrow_csv.ReadOptions(column_names=names),
        convert_options=arrow_csv.ConvertOptions(
            column_types={name: pa.string() for name in names}
        ),
    )


def pandas_reader(path: Path) -> Callable[[], Any] | None:
    try:
        import pandas as pd
    except ImportError:
        return None
    return lambda: pd.read_csv(path, header=None, parse_dates=[0])


def timed_in_turn(
    cases: dict[str, Callable[[], Any] | None], repeats: int
) -> dict[str, Timing | None]:
    """Run the cases round by round, so that a busy minute of the machine hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, run in cases.items():
            if run is not None:
                once = timed(run, repeats=1, warmup=0).median_seconds
                seconds[name] += [once] if turn else []
    return {name: _summary(values) if values else None for name, values in seconds.items()}


def _summary(values: list[float]) -> Timing:
    median = statistics.median(values)
    return Timing(median, min(values), (max(values) - min(values)) / median, len(values))


def time_real(folder: Path, repeats: int) -> dict[str, object] | None:
    """Five real files to one part of a store; None where they are absent."""
    if not folder.is_dir():
        return None
    source = BarsSource((folder,))

    def build() -> dict[str, float]:
        part = source.prepare(folder).parts[0]
        data = source.build(part, PartContext(folder, lambda _: None, {}))
        arrays = [a for n, field in data.fields.items() for a in field.arrays(n).values()]
        return {
            "samples": data.fields["time"].num_samples,
            "bars_read": sum(facts["bars_read"] for facts in data.extra["timeframes"].values()),
            "stored_bytes": sum(array.nbytes for array in arrays),
            "materialised_bytes": data.extra["materialised_bytes"],
        }

    facts = build()
    return {"seconds": timed(build, repeats), **facts}


def show(name: str, timing: Timing | None, num_rows: int) -> None:
    if timing is None:
        print(f"{name:34} {'n/a':>9}")
        return
    rate = num_rows / timing.median_seconds / 1e6
    print(f"{name:34} {timing.median_seconds:8.3f} s  ±{timing.spread:4.0%}  {rate:6.2f} M rows/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain, hurt = Path(folder, "EURUSD_M1.csv"), Path(folder, "HURT_M1.csv")
        packed = Path(folder, "EURUSD_M1.csv.gz")
        write_rows(plain, options.rows)
        damage(hurt, plain)
        packed.write_bytes(gzip.compress(plain.read_bytes(), 6))
        times = timed_in_turn(
            {
                "stoker": lambda: read_bars(plain),
                "stoker_gzip": lambda: read_bars(packed),
                "stoker_damaged": lambda: read_bars(hurt, sort=True),
                "peer_pandas": pandas_reader(plain),
                "limit_arrow_text": lambda: read_raw(plain),
            },
            options.repeats,
        )
    real = time_real(Path(os.environ.get("STOKER_DATA", SHARED)) / "bars", options.repeats)
    for name, timing in times.items():
        show(name, timing, options.rows)
    if real:
        show("real EURUSD, five files, whole part", real["seconds"], real["bars_read"])
        ratio = real["materialised_bytes"] / real["stored_bytes"]
        print(
            f"{real['samples']} samples: windows written out would take {ratio:.0f} times the bytes"
        )
    publish("bars", {"rows": options.rows, "target_seconds": 3.0, "times": times, "real": real})


if __name__ == "__main__":
    main()
