"""A campaign against the MSP parser: damaged libraries, by the ten thousands.

`STOKER_FUZZ_N` inputs (60,000 unless set) are made from real-looking records by bit flips,
deletions, repetitions, splices and shuffled lines. None may raise anything but `SourceError`,
take long, or be read differently by the two engines.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import SourceError
from stoker.sources.msp import SpectrumBatch, read_msp, split_msp

NUM_INPUTS = int(os.environ.get("STOKER_FUZZ_N", "60000"))
LIMIT_SECONDS = 5.0

SEEDS = [
    seed.replace("\n    ", "\n").encode()
    for seed in (
        """Name: 1-NITROPYRENE
    Synon: a
    Synon: $:00in-source
    DB#: JP000001
    InChIKey: ALRLPDGCPY
    Formula: C16H9NO2
    MW: 247
    CAS#: 5522-43-0;  NIST#: 7302
    Comments: Parent=-1
    Num Peaks: 4
    51 27
    55 80
    57.5 73
    58 13

    """,
        """Name: Sulfaclozine\r
    PrecursorMZ: 285.0208\r
    Comments: "SMILES=C=C" "computed InChI=InChI=1S/C2" "cas=1-2"\r
    Num Peaks: 3\r
    65.0386\t5.2\r
    92.05\t12 "C6H6N+ 1 2"\r
    108\t9\r
    \r
    """,
        """NAME: A
    RETENTIONTIME: CCS: \n    PRECURSORTYPE: [M-H]-
    Num Peaks: 2
    1e2\t3E1
    10 1 C4H10

    """,
        """NAME:Adenosine
    RI:0.0
    CAS#: NA
    NUM PEAKS:4
    (  70   31) (  71   47)
    ( 76 90) (77 220) \n
    """,
        """Name: golm
    MW: 321,15
    Synon: METB N: x
    Num Peaks: 4
    85:12 86:3
    87:1 88:2

    """,
        """#PSI Spectral Library Format
    MS:1009003|Name = TYRAMINE
    MS:1000894|RetentionTime = 2.0
    Adduct = M+H
    MS:1000130|Positive scan
    MS:1009006|number of peaks = 2
    50.1 71.2
    51 4

    """,
        """Name: Propane
    Num Peaks: 5
    28 69; 29 250; 30 7; \n    31 2; 32 71; \n
    Synon: 001
    Num Peaks: 1
    1 20

    """,
        """Name: Methyl Stearate
    Comment: [Marker]
    QI=74.1
    Raw=050107 RI=S.D
    Num Peaks: 3
    53 14
    54 18
    55 267

    Name: none
    Num Peaks: 0

    """,
        """Name: µ-Größe
    Adduct: M+H
    Precursor_type: x

    Num Peaks: 2
    {53,25}:{55,178}
    """,
    )
]
SPLINTERS = [
    b"\n",
    b"\n\n",
    b"\r",
    b"\r\n",
    b"\x00",
    b"\xff",
    b"Name: x\n",
    b"Num Peaks: 3\n",
    b":",
]
SPLINTERS += [b'"', b"'", b";", b"(", b" ", b"\t", b"-", b"e9", b"nan", b"1e999", b".", b"9" * 50]


def damage(rng: random.Random, data: bytearray) -> bytearray:
    """Apply one random mutation."""
    at = rng.randrange(len(data) + 1)
    length = min(len(data) - at, int(rng.expovariate(1 / 12)))
    kind = rng.randrange(6)
    if kind == 0 and data:
        data[at - 1] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at : at + length]
    elif kind == 2:
        data[at:at] = data[at : at + length] * rng.randint(1, 3)
    elif kind == 3:
        data[at:at] = rng.choice(SPLINTERS)
    elif kind == 4:
        other = rng.choice(SEEDS)
        start = rng.randrange(len(other))
        data[at : at + length] = other[start : start + rng.randrange(60)]
    else:
        lines = bytes(data).split(b"\n")
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]
        data[:] = b"\n".join(lines)
    return data


def make_input(rng: random.Random, sizes: tuple[int, ...] = (1, 2, 3, 4)) -> bytes:
    data = bytearray().join(rng.choices(SEEDS, k=rng.choice(sizes)))
    for _ in range(rng.choice([1, 1, 2, 3, 8, 30])):
        data = damage(rng, data)
    return bytes(data)


def check_invariants(batch: SpectrumBatch) -> None:
    assert np.isfinite(batch.mz).all()
    assert (batch.mz >= 0).all()
    assert np.isfinite(batch.intensity).all()
    assert (batch.intensity >= 0).all()
    assert batch.offsets[0] == 0
    assert batch.offsets[-1] == len(batch.mz) == len(batch.intensity)
    assert (np.diff(batch.offsets) >= 0).all()
    assert len(batch.records) == len(batch.offsets) - 1
    for start, stop in zip(batch.offsets, batch.offsets[1:], strict=False):
        assert (np.diff(batch.mz[start:stop]) > 0).all()
    for record, size in zip(batch.records, np.diff(batch.offsets).tolist(), strict=True):
        assert ("no-peaks" in record.flags) == (size == 0)
        if record.declared_peaks == size:
            assert "count-mismatch" not in record.flags or "merged-duplicates" in record.flags


def check_lines(data: bytes, batches: list[SpectrumBatch]) -> None:
    """Every line is blank, metadata, peaks or refused; and each refused line has its reason."""
    for wide in (b"\r\r\n", b"\r\n"):
        data = data.replace(wide, b"\n") if b"\r\r\r" not in data else data
    if b"\r\r\r" in data:
        return
    lines = data.replace(b"\r", b"\n").removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    total = [0, 0, 0, 0]
    for batch in batches:
        tally = batch.tally
        total = np.add(total, [tally.blank, tally.metadata, tally.peaks, tally.refused]).tolist()
    assert sum(total) == len(lines)
    assert total[0] == sum(not line.strip(b" \t\x0b\x0c") for line in lines)
    refused = {refusal.line for batch in batches for refusal in batch.refused}
    assert total[3] == 0 or refused
    assert all(line is not None and 1 <= line <= len(lines) for line in refused)


def outcome(path: Path, engine: str) -> tuple[list[SpectrumBatch], str | None]:
    try:
        return list(read_msp(path, engine=engine)), None
    except SourceError as error:
        return [], str(error)


def assert_equal(one: list[SpectrumBatch], two: list[SpectrumBatch], data: bytes) -> None:
    assert len(one) == len(two), data
    for a, b in zip(one, two, strict=True):
        assert a.records == b.records, data
        assert a.mz.tobytes() == b.mz.tobytes(), data
        assert a.intensity.tobytes() == b.intensity.tobytes(), data
        assert a.offsets.tolist() == b.offsets.tolist(), data
        assert (a.refused, a.tally) == (b.refused, b.tally), data


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(6))
def test_damaged_libraries(tmp_path, part):
    rng = random.Random(20_250 + part)
    path = tmp_path / "damaged.msp"
    for _ in range(NUM_INPUTS // 6):
        data = make_input(rng)
        path.write_bytes(data)
        start = time.perf_counter()
        fast, error = outcome(path, "fast")
        careful, same_error = outcome(path, "careful")
        assert time.perf_counter() - start < LIMIT_SECONDS, data
        assert error == same_error, data
        assert_equal(fast, careful, data)
        if error is None:
            for batch in fast:
                check_invariants(batch)
            check_lines(data, fast)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ranges_of_damaged_libraries(tmp_path):
    rng = random.Random(7)
    path = tmp_path / "damaged.msp"
    for _ in range(NUM_INPUTS // 6):
        data = make_input(rng)
        path.write_bytes(data)
        whole, error = outcome(path, "fast")
        if error is not None or data[:2] == b"\x1f\x8b":
            continue
        records, mz = [], []
        for piece in split_msp(path, rng.randint(1, 3)):
            for batch in read_msp(
                path,
                start_byte=piece.start_byte,
                end_byte=piece.end_byte,
                first_line=piece.first_line,
            ):
                records += batch.records
                mz.append(batch.mz)
        assert records == [record for batch in whole for record in batch.records], data
        assert np.concatenate(mz).tolist() == [m for batch in whole for m in batch.mz], data
