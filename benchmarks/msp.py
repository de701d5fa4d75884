"""Records per second from a real spectrum library, one core: stoker, its peers, and the limit.

Enters: massbank_ei.msp.gz of the shared data (13,342 EI spectra, 12.3 MB unzipped). Leaves: a
table, and JSON in benchmarks/results/. Costs: about two minutes, most of it matchms.

matchms cannot read gzip, so it and the plain loop get the unzipped file; stoker is measured on
both. Peaks are compared with matchms, spectrum by spectrum, before anything is timed.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import tempfile
import time
from pathlib import Path

import matchms
import matchms.importing
import numpy as np

from harness import Timing, publish, timed
from stoker.sources.msp import read_msp, split_msp

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("STOKER_DATA", REPOSITORY.parent / "shared" / "data"))
LIBRARY = DATA / "massspec" / "massbank_ei.msp.gz"


def read_with_stoker(path: Path, engine: str) -> int:
    return sum(len(batch.records) for batch in read_msp(path, engine=engine))


def read_with_matchms(path: Path, harmonize: bool) -> int:
    return sum(
        1 for _ in matchms.importing.load_from_msp(str(path), metadata_harmonization=harmonize)
    )


def read_plainly(path: Path) -> int:
    """The loop one writes in five minutes: right for this file, wrong for most dialects."""
    num_records, meta, mz, intensity = 0, {}, [], []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            line = line.rstrip()
            if not line:
                if meta:
                    np.array(mz), np.array(intensity, np.float32)
                    num_records += 1
                    meta, mz, intensity = {}, [], []
            elif line[0].isdigit():
                left, right = line.split()
                mz.append(float(left))
                intensity.append(float(right))
            else:
                key, _, value = line.partition(":")
                meta[key.strip().lower()] = value.strip()
    return num_records + bool(meta)


def touch_every_byte(path: Path) -> int:
    """The limit: unzip and split, understand nothing."""
    return len(gzip.decompress(path.read_bytes()).split(b"\n\n"))


def compare_peaks(path: Path) -> tuple[int, int]:
    """Return how many spectra matchms read, and how many of them have other peaks here."""
    ours = {}
    for batch in read_msp(path):
        for i, record in enumerate(batch.records):
            peaks = slice(batch.offsets[i], batch.offsets[i + 1])
            ours[record.meta["db"]] = batch.mz[peaks], batch.intensity[peaks]
    num_read = num_different = 0
    for spectrum in matchms.importing.load_from_msp(str(path), metadata_harmonization=False):
        mz, intensity = ours[spectrum.metadata["spectrum_id"]]
        same = np.array_equal(spectrum.peaks.mz, mz) and np.array_equal(
            spectrum.peaks.intensities.astype(np.float32), intensity
        )
        num_read += 1
        num_different += not same
    return num_read, num_different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-repeats", type=int, default=3)
    options = parser.parse_args()
    if not LIBRARY.is_file():
        print(f"skipped: no library at {LIBRARY}; set STOKER_DATA", file=sys.stderr)
        return 0
    # Its warnings, one per spectrum, would be timed too.
    matchms.set_matchms_logger_level("ERROR")
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "library.msp"
        plain.write_bytes(gzip.decompress(LIBRARY.read_bytes()))
        num_matchms, num_different = compare_peaks(plain)
        start = time.perf_counter()
        num_ranges = len(split_msp(plain, 1000))
        split_mb_s = plain.stat().st_size / 1e6 / (time.perf_counter() - start)
        runs = {
            "limit: gunzip + split": (lambda: touch_every_byte(LIBRARY), options.repeats),
            "stoker, gzip": (lambda: read_with_stoker(LIBRARY, "fast"), options.repeats),
            "stoker, plain": (lambda: read_with_stoker(plain, "fast"), options.repeats),
            "stoker careful, plain": (lambda: read_with_stoker(plain, "careful"), options.repeats),
            "plain loop": (lambda: read_plainly(plain), options.peer_repeats),
            "matchms, raw keys": (lambda: read_with_matchms(plain, False), options.peer_repeats),
            "matchms": (lambda: read_with_matchms(plain, True), options.peer_repeats),
        }
        timings: dict[str, Timing] = {
            name: timed(run, repeats=repeats) for name, (run, repeats) in runs.items()
        }
    num_records = sum(len(batch.records) for batch in read_msp(LIBRARY))
    peer = timings["matchms"].median_seconds
    print(f"{'':24} {'records/s':>10} {'median s':>9} {'spread':>7} {'x matchms':>10}")
    for name, timing in timings.items():
        rate = num_records / timing.median_seconds
        times = peer / timing.median_seconds
        print(
            f"{name:24} {rate:10,.0f} {timing.median_seconds:9.3f} {timing.spread:7.0%} {times:10.1f}"
        )
    print(f"split_msp: {split_mb_s:.0f} MB/s, {num_ranges} ranges")
    print(
        f"peaks: {num_matchms - num_different:,} of {num_matchms:,} spectra equal those of matchms"
    )
    publish(
        "msp",
        {
            "num_records": num_records,
            "num_read_by_matchms": num_matchms,
            "num_with_other_peaks": num_different,
            "split_mb_per_second": split_mb_s,
            "records_per_second": {k: num_records / t.median_seconds for k, t in timings.items()},
            "times_matchms": {k: peer / t.median_seconds for k, t in timings.items()},
            "timings": timings,
        },
    )
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
