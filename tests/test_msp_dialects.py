"""33 spectrum libraries as found in the wild: what docs/msp.md says is what the parser reads."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from stoker.sources.msp import SpectrumBatch, read_msp, split_msp

DOCS = Path(__file__).resolve().parent.parent / "docs" / "msp.md"
ROW = re.compile(r"\| `([^`]+\.(?:msp|MSP|msl|MSL))` \| ([0-9,]+) \| ([0-9,]+) \| ([0-9]+) \|")

# Num Peaks of a file says more than it has: equal m/z were merged, or the count is wrong.
MERGED = {"MetabolomicsTools__mine_results.msp": 77}
MISCOUNTED = {
    "mssearchr__numpeaks_field_incorrect.msp": 1,
    "mssearchr__numpeaks_field_missing.msp": -2,
}


def table() -> dict[str, tuple[int, int, int]]:
    """Records, peaks and refusals per file, from the page that people read."""
    rows = ROW.findall(DOCS.read_text(encoding="utf-8"))
    return {name: tuple(int(n.replace(",", "")) for n in numbers) for name, *numbers in rows}


@pytest.fixture(scope="module")
def dialects(shared_data: Path) -> Path:
    folder = shared_data / "massspec" / "dialects"
    if not folder.is_dir():
        pytest.skip(f"no dialect files at {folder}")
    return folder


def read(path: Path, **options: object) -> SpectrumBatch:
    (batch,) = read_msp(path, **options)
    return batch


def test_the_page_lists_every_file(dialects):
    assert set(table()) == {path.name for path in dialects.iterdir()}
    assert len(table()) == 33


@pytest.mark.parametrize("name", table())
def test_the_page_says_what_is_read(dialects, name):
    batch = read(dialects / name)
    assert (len(batch.records), len(batch.mz), len(batch.refused)) == table()[name]
    assert batch.tally.total == len((dialects / name).read_bytes().splitlines())


@pytest.mark.parametrize("name", table())
def test_a_plain_search_finds_the_same_numbers(dialects, name):
    text = (dialects / name).read_text(encoding="utf-8")
    num_names = len(re.findall(r"^(?:name:|MS:1009003)", text, re.IGNORECASE | re.MULTILINE))
    counts = re.findall(
        r"^(?:num ?peaks:|MS:1009006\|number of peaks =)\s*([0-9]+)",
        text,
        re.IGNORECASE | re.MULTILINE,
    )
    batch = read(dialects / name)
    assert len(batch.records) == num_names + (name == "mssearchr__name_field_missing.msp")
    off = MERGED.get(name, 0) + MISCOUNTED.get(name, 0)
    assert len(batch.mz) == sum(map(int, counts)) - off


@pytest.mark.parametrize("name", table())
def test_both_engines_and_all_ranges_agree(dialects, name):
    path = dialects / name
    fast, careful = read(path), read(path, engine="careful")
    assert fast.records == careful.records
    assert fast.mz.tobytes() == careful.mz.tobytes()
    assert fast.intensity.tobytes() == careful.intensity.tobytes()
    assert (fast.refused, fast.tally) == (careful.refused, careful.tally)
    pieces = [
        read(path, start_byte=r.start_byte, end_byte=r.end_byte, first_line=r.first_line)
        for r in split_msp(path, 2)
    ]
    assert [record for piece in pieces for record in piece.records] == fast.records
    assert np.concatenate([piece.mz for piece in pieces]).tobytes() == fast.mz.tobytes()


def test_ten_spellings_of_one_spectrum_are_one_spectrum(dialects):
    batch = read(dialects / "mssearchr__delimiters.msp")
    mz, intensity = batch.mz.reshape(10, 23), batch.intensity.reshape(10, 23)
    assert (mz == mz[0]).all()
    assert (intensity == intensity[0]).all()


def test_quoted_annotations_are_not_peaks(dialects):
    batch = read(dialects / "mzSpecLib__test_gcms_metabolomics.msp")
    assert batch.mz[:3].tolist() == [73.04681, 74.04642, 76.01821]
    assert batch.intensity[:3].tolist() == [6882, 3441, 5005]
    assert "retention_time" in batch.records[0].meta
    assert "inchi" not in batch.records[0].meta


def test_the_psi_text_format(dialects):
    record = read(dialects / "GNPS_Workflows__mzvault_IROA_small.msp").records[0]
    assert record.meta["name"] == "TYRAMINE"
    assert record.meta["smiles"] == "NCCC1=CC=C(O)C=C1"
    assert record.meta["precursor_mz"] == "138.09134"
    assert record.meta["precursor_type"] == "M+H"
    assert record.meta["ion_mode"] == "Positive scan"
    assert record.line == 2


def test_a_comment_of_several_lines(dialects):
    meta = read(dialects / "CoreMS__FAMES_REF.msp").records[0].meta
    assert meta["comment"] == "[Marker] QI=74.1 FiehnRI=2712708 Raw=050107-002.D RI=S.D [FAME]"
    assert meta["usi"].startswith("EMSL:")


def test_the_massbank_library(shared_data):
    path = shared_data / "massspec" / "massbank_ei.msp.gz"
    if not path.is_file():
        pytest.skip(f"no library at {path}")
    batches = list(read_msp(path))
    assert sum(len(batch.records) for batch in batches) == 13_342
    assert sum(len(batch.mz) for batch in batches) == 808_849
    assert not any(batch.refused for batch in batches)
    assert sum("inchikey" in record.meta for batch in batches for record in batch.records) == 12_572
