"""MSP: the rules of docs/msp.md, the flaws of its peer, and two engines with one answer."""

from __future__ import annotations

import dataclasses
import gzip
import io
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InputError, SourceError
from stoker.sources.msp import LineTally, SpectrumBatch, bin_spectrum, read_msp, split_msp
from stoker.sources.msp import blocks as msp_blocks
from stoker.sources.msp import keys as msp_keys
from stoker.sources.msp import library as msp

ENGINES = ("fast", "careful")


@dataclasses.dataclass
class Library:
    """All batches of one reading, joined."""

    records: list[msp.Record]
    peaks: list[list[tuple[float, float]]]
    refused: list[tuple[int | None, str]]
    tally: LineTally


def join(batches: Any) -> Library:
    library = Library([], [], [], LineTally())
    for batch in batches:
        pairs = list(zip(batch.mz.tolist(), batch.intensity.tolist(), strict=True))
        bounds = batch.offsets.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == len(pairs)
        library.records += batch.records
        library.peaks += [pairs[a:b] for a, b in itertools.pairwise(bounds)]
        library.refused += [(refusal.line, refusal.reason) for refusal in batch.refused]
        library.tally += batch.tally
    library.refused.sort(key=lambda refusal: refusal[0] or 0)
    return library


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("msp")


def parse(text: str | bytes, folder: Path, **options: Any) -> Library:
    """Read with both engines, compare, return."""
    path = folder / "library.msp"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    fast, careful = (join(read_msp(path, engine=engine, **options)) for engine in ENGINES)
    assert fast == careful
    return fast


def only(text: str | bytes, folder: Path) -> tuple[msp.Record, list[tuple[float, float]]]:
    library = parse(text, folder)
    assert len(library.records) == 1
    return library.records[0], library.peaks[0]


# ------------------------------------------------------------------------- flaws of matchms 0.33.1

GOOD = "Name: next\nNum Peaks: 2\n41 5\n43 999\n"
GOOD_PEAKS = [(41.0, 5.0), (43.0, 999.0)]


def test_a_count_that_is_too_high_swallows_nothing(folder):
    library = parse(f"Name: a\nNum Peaks: 9\n1 20\n2 999\n\n{GOOD}", folder)
    assert library.peaks == [[(1.0, 20.0), (2.0, 999.0)], GOOD_PEAKS]
    assert library.refused == [(2, "Num Peaks says 9, the record has 2: not trusted")]
    assert "count-mismatch" in library.records[0].flags
    assert library.records[0].declared_peaks == 9


def test_a_count_that_is_too_high_ends_at_the_next_name_without_an_empty_line(folder):
    library = parse(f"Name: a\nNum Peaks: 9\n1 20\n{GOOD}", folder)
    assert library.peaks == [[(1.0, 20.0)], GOOD_PEAKS]


def test_a_count_that_is_too_low_loses_no_peak(folder):
    library = parse(f"Name: a\nNum Peaks: 1\n1 20\n2 999\n\n{GOOD}", folder)
    assert library.peaks == [[(1.0, 20.0), (2.0, 999.0)], GOOD_PEAKS]
    assert library.refused[0][0] == 2


def test_a_record_without_peaks_stays_and_keeps_its_metadata_to_itself(folder):
    library = parse(f"Name: empty\nFormula: H2\nNum Peaks: 0\n\n{GOOD}", folder)
    assert [record.meta["name"] for record in library.records] == ["empty", "next"]
    assert "formula" not in library.records[1].meta
    assert "no-peaks" in library.records[0].flags
    assert library.peaks == [[], GOOD_PEAKS]
    assert library.refused == []


def test_a_colon_in_an_annotation_makes_no_metadata(folder):
    _, peaks = only('Name: a\nNum Peaks: 2\n41 5 "y1: 3 4"\n43 999 b:2 7\n', folder)
    assert peaks == GOOD_PEAKS


def test_an_unquoted_annotation_is_no_peak(folder):
    _, peaks = only("Name: a\nNum Peaks: 1\n10 1 C4H10\n", folder)
    assert peaks == [(10.0, 1.0)]


def test_a_byte_order_mark_does_not_hide_the_name(folder):
    record, _ = only(b"\xef\xbb\xbf" + GOOD.encode(), folder)
    assert record.meta["name"] == "next"


@pytest.mark.parametrize("bad", ["-1 5", "5 -1", "nan 5", "5 nan", "5 inf", "1e999 5", "5 1e39"])
def test_impossible_values_are_refused_with_their_line(folder, bad):
    library = parse(f"Name: a\nNum Peaks: 3\n41 5\n{bad}\n43 999\n", folder)
    assert library.peaks == [GOOD_PEAKS]
    assert [line for line, _ in library.refused] == [2, 4]


def test_no_byte_is_deleted(folder):
    record, _ = only(b"Name: Caf\xe9ine \xb5g\nNum Peaks: 1\n41 5\n", folder)
    assert record.meta["name"] == "Café" + "ine µg"
    assert "latin-1" in record.flags


def test_latin_1_in_one_record_leaves_utf_8_in_the_next(folder):
    library = parse(b"Name: \xe9\nNum Peaks: 0\n\nName: \xc3\xa9\nNum Peaks: 0\n", folder)
    assert [record.meta["name"] for record in library.records] == ["é", "é"]


def test_every_complaint_has_a_file_and_a_line(folder):
    path = folder / "complaint.msp"
    path.write_text("Name: a\nNum Peaks: 1\nrubbish\n41 5\n")
    (refusal,) = next(read_msp(path)).refused
    assert str(refusal).startswith(f"{path}:3: neither metadata nor peaks")


def test_a_missing_peak_count_is_flagged(folder):
    record, peaks = only("Name: a\n41 5\n43 999\n", folder)
    assert peaks == GOOD_PEAKS
    assert "no-count" in record.flags
    assert record.declared_peaks is None


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("Name: a\nNum Peaks: 2\nFormula: H2\n41 5\n43 999\n", "misplaced-count"),
        ("Name: a\nFormula: H2\n41 5\n43 999\nNum Peaks: 2\n", "misplaced-count"),
        ("Name: a\nNum Peaks: 2\n41 5\nFormula: H2\n43 999\n", "late-metadata"),
        ("Name: a\n\nFormula: H2\nNum Peaks: 2\n\n41 5\n43 999\n", "blank-in-header"),
    ],
)
def test_lines_out_of_place_are_taken_and_flagged(folder, text, flag):
    record, peaks = only(text, folder)
    assert peaks == GOOD_PEAKS
    assert record.meta["formula"] == "H2"
    assert flag in record.flags
    assert record.declared_peaks == 2


# ----------------------------------------------------------------------------------- record bounds


def test_metadata_above_the_name_belongs_to_the_record(folder):
    record, _ = only("DB#: 7\nName: a\nNum Peaks: 1\n41 5\n", folder)
    assert record.meta == {"db": "7", "name": "a"}
    assert record.line == 1


def test_a_record_may_have_no_name(folder):
    record, peaks = only("Synon: 001\nNum Peaks: 2\n41 5\n43 999\n", folder)
    assert record.synonyms == ("001",)
    assert peaks == GOOD_PEAKS
    assert "no-name" in record.flags


def test_what_is_no_record_is_refused(folder):
    library = parse(f"%%%\n12 5\n\nLibrary: mine\nmore\n\n{GOOD}", folder)
    assert len(library.records) == 1
    assert [line for line, _ in library.refused] == [1, 2, 4]
    assert library.tally == LineTally(blank=2, metadata=2, peaks=2, refused=4)


def test_the_last_record_needs_no_line_end(folder):
    _, peaks = only(GOOD.rstrip("\n"), folder)
    assert peaks == GOOD_PEAKS


@pytest.mark.parametrize("end", ["\r\n", "\r", "\r\r\n"])
def test_line_ends_of_other_systems(folder, end):
    text = f"{GOOD}\n{GOOD}"
    library = parse(text.replace("\n", end).encode(), folder)
    assert library == parse(text, folder)


def test_a_bad_count_and_a_second_count_are_refused(folder):
    library = parse("Name: a\nNum Peaks: two\n41 5\nNum Peaks: 2\n43 999\n", folder)
    assert library.peaks == [GOOD_PEAKS]
    assert [line for line, _ in library.refused] == [2, 4]


# ------------------------------------------------------------------------------------- peak lines


@pytest.mark.parametrize(
    "line",
    [
        "41 5 43 999",
        "41\t5\t43\t999\t",
        "41 5; 43 999;",
        "41 5, 43 999,",
        "(41,5),(43,999)",
        "( 41    5) ( 43  999)",
        "{41,5}:{43,999}:",
        "[41; 5];[43; 999];",
        "41:5 43:999",
        "41 5;43 999",
        '41 5 "a 7 8"; 43 999 "b; 9 9";',
        '(41 5 "a")(43 999 "b")',
        "4.1e1 5E0 430e-1 +999.0",
        "41. 5.0; 0043 .999e3",
    ],
)
def test_two_peaks_on_one_line(folder, line):
    record, peaks = only(f"Name: a\nNum Peaks: 2\n{line}\n", folder)
    assert peaks == [(41.0, 5.0), (43.0, float(np.float32(999)))]
    assert "count-mismatch" not in record.flags


@pytest.mark.parametrize(
    "tail",
    [
        "2",
        "-3.1",
        "C4H10",
        "3 C4H10",
        "3 4 C4H10",
        "C4H10 7 8",
        "4498/4498",
        "5'-AMP 3",
        '"x" 1 2',
        '"unterminated 1 2',
        "'single 1 2'",
        "y1:2 3",
        "p-C2/0.2ppm 14/14",
        "12C 13",
    ],
)
def test_what_follows_a_peak_is_annotation(folder, tail):
    _, peaks = only(f"Name: a\nNum Peaks: 1\n62.96 248 {tail}\n", folder)
    assert peaks == [(62.96, 248.0)]


@pytest.mark.parametrize("line", ["41", "41 5 43 999 7", "41; 5; 43", '"41 5"', "C4 5", "41 x"])
def test_a_line_that_cannot_be_paired_is_refused(folder, line):
    library = parse(f"Name: a\nNum Peaks: 0\n{line}\n", folder)
    assert library.peaks == [[]]
    assert [number for number, _ in library.refused] == [3]


def test_peaks_behind_an_unquoted_annotation_are_not_lost_in_silence(folder):
    library = parse("Name: a\nNum Peaks: 1\n41 5 C3H5; 43 999 C3H7\n", folder)
    assert library.peaks == [[(41.0, 5.0)]]
    assert library.refused == [(3, "what looks like peaks after an unquoted annotation")]


def test_peaks_are_sorted_and_equal_mz_merged(folder):
    text = "Name: a\nNum Peaks: 4\n43 2\n41 5\n43 3\n43.0 1\n"
    assert parse(text, folder).peaks == [[(41.0, 5.0), (43.0, 3.0)]]
    library = parse(text, folder, merge="sum")
    assert library.peaks == [[(41.0, 5.0), (43.0, 6.0)]]
    assert {"unsorted", "merged-duplicates"} <= set(library.records[0].flags)


def test_a_sum_stays_finite(folder):
    library = parse("Name: a\nNum Peaks: 2\n43 3e38\n43 3e38\n", folder, merge="sum")
    assert np.isfinite(library.peaks[0][0][1])


def test_an_unknown_merge_says_what_is_allowed(folder):
    with pytest.raises(InputError, match=r"'max' or 'sum'"):
        next(read_msp(folder / "x.msp", merge="mean"))


# ---------------------------------------------------------------------------------------- metadata


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("PRECURSORMZ: 1.5", {"precursor_mz": "1.5"}),
        ("Precursor-M/Z : 1.5", {"precursor_mz": "1.5"}),
        ("CAS#: 1-2-3;  NIST#: 77", {"cas": "1-2-3", "nist": "77"}),
        ("CASNO: 123", {"cas": "123"}),
        ("RI:1625", {"ri": "1625"}),
        ("MW: 321,15", {"mw": "321.15"}),
        ("RETENTIONTIME: CCS: ", {}),
        ("RETENTIONTIME: CCS: 290.1", {"ccs": "290.1"}),
        ("RETENTION_TIME: None", {}),
        ("Formula: H2\nFormula: H2", {"formula": "H2"}),
        ("Note: a\nNote: b", {"note": "a; b"}),
        ("Comment: a\nsecond line\n12 bananas", {"comment": "a second line 12 bananas"}),
        ("Adduct: M+H\nPrecursor_type: [M+H]+", {"adduct": "M+H", "precursor_type": "[M+H]+"}),
        ("Adduct: M+H", {"precursor_type": "M+H"}),
        ("Comment: x\nComments: y", {"comment": "x", "comments": "y"}),
        ("Größe: 5", {"größe": "5"}),
        ("Smiles: C;C", {"smiles": "C;C"}),
        ("Link: http://a/b?c=d:e", {"link": "http://a/b?c=d:e"}),
    ],
)
def test_metadata(folder, line, expected):
    record, _ = only(f"Name: n\n{line}\nNum Peaks: 1\n41 5\n", folder)
    assert record.meta == {"name": "n", **expected}


def test_a_mona_comment_fills_only_what_is_absent(folder):
    comment = '"SMILES=C=C" "computed InChI=InChI=1S/C2H4" "cas=1-2" Date="x y" k="a=b" "n: o=p"'
    record, _ = only(f"Name: n\nCAS#: 9\nComments: {comment}\nNum Peaks: 1\n41 5\n", folder)
    assert record.meta == {
        "name": "n",
        "cas": "9",
        "comment": comment,
        "smiles": "C=C",
        "computed_inchi": "InChI=1S/C2H4",
        "inchi": "InChI=1S/C2H4",
    }


def test_synonyms_keep_their_colons(folder):
    record, _ = only("Name: n\nSynon: $:00in-source\nSynon: METB N: x\nNum Peaks: 0\n", folder)
    assert record.synonyms == ("$:00in-source", "METB N: x")


# ------------------------------------------------------------------------------------------ files


def test_gzip_is_read_and_damage_is_named(folder):
    path = folder / "library.msp.gz"
    whole = gzip.compress(GOOD.encode() * 50)
    path.write_bytes(whole)
    assert len(join(read_msp(path)).records) == 50
    path.write_bytes(whole[:-9])
    with pytest.raises(SourceError, match="damaged gzip"):
        list(read_msp(path))
    with pytest.raises(SourceError, match="no byte ranges"):
        split_msp(path, 10)
    with pytest.raises(SourceError, match="no byte ranges"):
        list(read_msp(path, start_byte=5))


def test_utf_16_is_refused_with_the_cure(folder):
    path = folder / "wide.msp"
    path.write_text(GOOD, encoding="utf-16")
    with pytest.raises(SourceError, match="iconv"):
        list(read_msp(path))


def test_a_missing_file_is_named(folder):
    with pytest.raises(SourceError, match="does not exist"):
        list(read_msp(folder / "nowhere.msp"))


def test_a_line_without_end_is_refused(folder, monkeypatch):
    monkeypatch.setattr(msp_blocks, "_OPEN_BYTES", 1 << 10)
    monkeypatch.setattr(msp_blocks, "MAX_LINE_BYTES", 1 << 12)
    monkeypatch.setattr(msp, "MAX_LINE_BYTES", 1 << 12)
    monkeypatch.setattr(msp_blocks, "CHUNK_BYTES", 1 << 9)
    monkeypatch.setattr(msp, "CHUNK_BYTES", 1 << 9)
    path = folder / "line.msp"
    path.write_bytes(b"x" * (1 << 14))
    with pytest.raises(SourceError, match="has a line of more than"):
        list(read_msp(path))
    with pytest.raises(SourceError, match="has a line of more than"):
        split_msp(path, 1)


NEVER_QUADRATIC = {
    "digits": b"Name: a\nNum Peaks: 1\n" + b"1" * 400_000 + b"x 5\n",
    "quotes": b"Name: a\nNum Peaks: 1\n1 5 " + b'"' * 400_001 + b"\n",
    "spaces": b"Name: a\nMW: " + b" ;" * 300_000 + b"\nNum Peaks: 0\n",
    "returns": b"\r" * 300_000 + b"\n",
    "repeated keys": b"Name: a\n" + b"k: v\nk: w\n" * 25_000 + b"Num Peaks: 0\n",
    "long comment": b"Name: a\nComment: b\n" + b"line\n" * 80_000 + b"Num Peaks: 0\n",
    "one line of peaks": b"Name: a\nNum Peaks: 60000\n" + b"41 5; " * 60_000 + b"\n",
    "one record": b"Name: a\nNum Peaks: 90000\n" + b"41.5 5\n" * 90_000,
    "names": b"Name: a\n" * 20_000,
    "equals": b'Name: a\nComment: "' + b"a=" * 200_000 + b"\nNum Peaks: 0\n",
}


@pytest.mark.parametrize("case", NEVER_QUADRATIC)
def test_no_text_takes_quadratic_time(folder, case):
    # All take well under 2 s; the smallest quadratic mistake among them takes minutes.
    start = time.perf_counter()
    parse(NEVER_QUADRATIC[case], folder)
    assert time.perf_counter() - start < 20


# ------------------------------------------------------------------------------ made-up libraries

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=9)
KEYS = ["Formula", "INCHIKEY", "Precursor_type", "MW", "ID", "Ontology", "my key"]
TIDY = {"Formula": "formula", "INCHIKEY": "inchikey", "MW": "mw", "ID": "id", "my key": "my_key"}
PEAKS = st.dictionaries(
    st.one_of(st.integers(1, 2000).map(float), st.floats(0, 1e6, allow_subnormal=False)),
    st.floats(0, 1e6, width=32, allow_subnormal=False),
    max_size=12,
)


@st.composite
def spectra(draw: st.DrawFn) -> dict[str, Any]:
    keys = draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=4))
    words = st.from_regex(r"[A-Z][A-Za-z0-9()+\[\]]{0,8}", fullmatch=True)
    return {
        "name": draw(NAMES.filter(lambda name: name.isprintable())),
        "fields": {key: "x" + draw(words) for key in keys},
        "synonyms": draw(st.lists(words, max_size=3)),
        "peaks": sorted(draw(PEAKS).items()),
    }


def in_rows(template: str, per_line: int, between: str) -> Any:
    def render(peaks: list[tuple[float, float]]) -> str:
        cells = [template.format(m=repr(mz), i=f"{intensity:.9g}") for mz, intensity in peaks]
        rows = [cells[k : k + per_line] for k in range(0, len(cells), per_line)]
        return "".join(between.join(row) + "\n" for row in rows)

    return render


DIALECTS = {
    "space": in_rows("{m} {i}", 1, ""),
    "tab": in_rows("{m}\t{i}", 1, ""),
    "padded": in_rows("  {m}   {i} ", 1, ""),
    "quoted": in_rows('{m} {i} "y1/0.2 3 4"', 1, ""),
    "unquoted": in_rows("{m}\t{i}\tC4H10 2", 1, ""),
    "third column": in_rows("{m} {i} 2", 1, ""),
    "semicolons": in_rows("{m} {i};", 5, " "),
    "commas": in_rows("{m} {i},", 5, " "),
    "tabs in a row": in_rows("{m}\t{i}", 5, "\t"),
    "golm": in_rows("{m}:{i}", 5, " "),
    "msl": in_rows("({m}   {i})", 5, " "),
    "braces": in_rows("{{{m},{i}}}", 3, ":"),
}


def render(spectrum: dict[str, Any], dialect: str) -> str:
    fields = [f"{key}: {value}" for key, value in spectrum["fields"].items()]
    synonyms = [f"Synon: {synonym}" for synonym in spectrum["synonyms"]]
    count = f"Num Peaks: {len(spectrum['peaks'])}"
    lines = [f"Name: {spectrum['name']}", *fields, *synonyms, count, ""]
    return "\n".join(lines) + DIALECTS[dialect](spectrum["peaks"])


@pytest.mark.parametrize("dialect", DIALECTS)
@given(library=st.lists(spectra(), min_size=1, max_size=3), end=st.sampled_from(["\n", "\r\n"]))
def test_made_up_libraries_come_back_from_every_dialect(folder, dialect, end, library):
    text = "\n".join(render(spectrum, dialect) for spectrum in library)
    result = parse(text.replace("\n", end).encode(), folder)
    assert result.refused == []
    assert len(result.records) == len(library)
    for spectrum, record, peaks in zip(library, result.records, result.peaks, strict=True):
        fields = {TIDY.get(k, k.lower()): v for k, v in spectrum["fields"].items()}
        assert record.meta == {"name": spectrum["name"], **fields}
        assert record.synonyms == tuple(spectrum["synonyms"])
        assert peaks == [(m, float(np.float32(f"{i:.9g}"))) for m, i in spectrum["peaks"]]
        assert record.declared_peaks == len(peaks)


LINES = st.sampled_from(
    [
        "Name: a",
        "NAME:b",
        " name : c",
        "Name:",
        "Synon: s",
        "Formula: H2",
        "MW: 1,5",
        "MW: 7",
        "Num Peaks: 2",
        "NumPeaks: 1",
        "num_peaks: 0",
        "Num Peaks: x",
        "Number of peaks: 2",
        "41 5",
        "43 999",
        "41 5; 43 9",
        "(41 5) (43 9)",
        "41:5 43:9",
        "41.5\t5",
        " 41  5 ",
        "41",
        "41 5 x",
        '41 5 "a: 1 2"',
        "1e2 5",
        "-1 5",
        "",
        "",
        "",
        " ",
        "free text",
        "é: ü",
        "RT: None",
        'Comments: "a=b" "InChI=c"',
        "Comments: plain",
        "CAS#: 1; NIST#: 2",
        "MS:1009003|Name = p",
        "MS:1000894|RetentionTime = 2",
        "Adduct = M",
        "#PSI Spectral Library Format",
        "ÿ",
        "k: v",
    ]
)
ENDS = st.sampled_from(["\n", "\n", "\n", "\r\n", "\r", "\r\r\n"])


@st.composite
def soups(draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        library = draw(st.lists(spectra(), max_size=3))
        lines = "\n\n".join(render(s, "space").rstrip("\n") for s in library).split("\n")
        for _ in range(draw(st.integers(0, 3))):
            lines.insert(draw(st.integers(0, len(lines))), draw(LINES))
    else:
        lines = draw(st.lists(LINES, max_size=25))
    end = draw(ENDS)
    text = end.join(lines) + draw(st.sampled_from(["", end]))
    return text.encode("latin-1" if text.isascii() or draw(st.booleans()) else "utf-8", "replace")


@given(soup=soups())
def test_both_engines_agree_and_account_for_every_line(folder, soup):
    library = parse(soup, folder)
    lines = soup.replace(b"\r\r\n", b"\n").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert library.tally.total == lines.count(b"\n") + (not lines.endswith(b"\n") and bool(lines))
    assert library.tally.blank == sum(
        not line.strip(b" \t\x0b\x0c") for line in lines.removesuffix(b"\n").split(b"\n")
    ) * bool(lines)


@given(soup=soups(), records_per_part=st.integers(1, 4))
def test_reading_the_ranges_is_reading_the_file(folder, soup, records_per_part):
    path = folder / "ranges.msp"
    path.write_bytes(soup)
    ranges = split_msp(path, records_per_part)
    assert ranges[0].start_byte == 0
    assert ranges[-1].end_byte == len(soup)
    assert all(a.end_byte == b.start_byte for a, b in itertools.pairwise(ranges))
    for engine in ENGINES:
        pieces = [
            read_msp(
                path,
                start_byte=r.start_byte,
                end_byte=r.end_byte,
                first_line=r.first_line,
                engine=engine,
            )
            for r in ranges
        ]
        assert join(batch for piece in pieces for batch in piece) == join(read_msp(path))


@given(soup=soups(), chunk=st.integers(1, 200), open_bytes=st.integers(1, 400))
def test_the_size_of_a_block_changes_nothing(folder, soup, chunk, open_bytes):
    path = folder / "chunks.msp"
    path.write_bytes(soup)
    whole, ranges = join(read_msp(path)), split_msp(path, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(msp_blocks, "CHUNK_BYTES", chunk)
        patch.setattr(msp, "CHUNK_BYTES", chunk)
        patch.setattr(msp_blocks, "_OPEN_BYTES", open_bytes)
        assert join(read_msp(path)) == whole
        assert split_msp(path, 1) == ranges


VALUES = ["H2", "", "None", "1,5", " x", "x ", "a;  NIST#: 7", '"a=b"', "CCS: 3", "x\x0b", "é", ":"]
VALUES += ["v;w", "\xa0x", "NaN", "7", "NIST#: 5", "\t", "#", "a; NIST#: b; NIST#: c"]
HEADER_KEYS = ["Name", "Formula", "MW", "CAS#", "NIST#", "Synon", "Synonym", "Comments", "Comment"]
HEADER_KEYS += [
    "RT",
    "RETENTIONTIME",
    "Adduct",
    "Precursor_type",
    "odd key",
    "MS",
    "Num Peaks",
    "é",
]


@given(data=st.data())
def test_a_header_template_gives_what_the_fold_gives(data):
    keys = data.draw(st.lists(st.sampled_from(HEADER_KEYS), min_size=1, max_size=6))
    reader = msp_keys.HeaderReader()
    for _ in range(6):
        values = data.draw(st.lists(st.sampled_from(VALUES), min_size=6, max_size=6))
        text = "\n".join(f"{k}: {v}" for k, v in zip(keys, values, strict=False))
        assert reader.read(text) == msp_keys.fold_header(text.split("\n"), strict=True)


def test_a_header_template_is_used_from_the_third_time_on():
    reader = msp_keys.HeaderReader()
    for _ in range(2):
        assert not reader._templates
        reader.read("Name: a\nSynon: b\nCAS#: 1;  NIST#: 2")
    (template,) = reader._templates
    expected = {"name": "x", "cas": "1", "nist": "2"}, ("y", "z")
    assert template.fill("Name: x\nSynon: y\nSynon: z\nCAS#: 1\nNIST#: 2") == expected


def test_regular_records_take_the_fast_way_and_no_others(folder, monkeypatch):
    fed = []
    feed = msp.CarefulParser.feed
    monkeypatch.setattr(
        msp.CarefulParser,
        "feed",
        lambda self, text, line: (fed.append(line), feed(self, text, line)),
    )
    shapes = [
        "41 5\n43 9",
        "41\t5\n43\t9",
        "41 5; 43 9;",
        "(41  5) (43 9)",
        "41:5 43:9",
        " 41 5 \n43  9",
        '41 5 "a: 1 2"\n43 9\t"b"',
        "4.1e1 5E0\n43e-0 9",
    ]
    path = folder / "regular.msp"
    path.write_text("\n\n".join(f"Name: a\nNum Peaks: 2\n{shape}" for shape in shapes))
    assert [len(peaks) for peaks in join(read_msp(path)).peaks] == [2] * len(shapes)
    assert fed == []
    path.write_text(f"{GOOD}\nName: odd\nNum Peaks: 2\n41 5 x\n43 9\n\n{GOOD}")
    assert len(join(read_msp(path)).records) == 3
    assert fed == [6]


# ----------------------------------------------------------------------------------- write and bin


@given(soup=soups())
def test_what_is_written_reads_back_the_same(folder, soup):
    path, copy = folder / "soup.msp", folder / "copy.msp"
    path.write_bytes(soup)
    copy.unlink(missing_ok=True)
    msp.write_msp(read_msp(path), copy)
    with pytest.raises(InputError, match="exists, and stoker did not write it"):
        msp.write_msp(read_msp(path), copy)
    first, second = join(read_msp(path)), join(read_msp(copy))
    assert second.peaks == first.peaks
    assert [r.synonyms for r in second.records] == [r.synonyms for r in first.records]
    assert [r.meta for r in second.records] == [r.meta for r in first.records]
    assert second.refused == []


def test_the_peak_count_is_written_last_before_the_peaks():
    record = msp.Record(1, {"cas": "1", "name": "a\nb", "odd_key": "c"}, ("s",))
    batch = SpectrumBatch(
        [record], np.array([41.5, 43.0]), np.array([5, 0.1], np.float32), np.array([0, 2])
    )
    file = io.StringIO()
    msp.write_msp([batch], file)
    assert file.getvalue() == (
        "Name: a b\nCAS#: 1\nodd_key: c\nSynon: s\nNum Peaks: 2\n41.5 5\n43.0 0.100000001\n\n"
    )


@pytest.mark.parametrize("key", ["a:b", "", "num peaks", "synon", "1a"])
def test_a_key_that_would_not_come_back_is_refused(key):
    record = msp.Record(1, {key: "v"})
    batch = SpectrumBatch([record], np.empty(0), np.empty(0, np.float32), np.array([0, 0]))
    with pytest.raises(InputError, match="rename the key"):
        msp.write_msp([batch], io.StringIO())


def test_binning_rounds_halves_up_keeps_the_last_bin_and_counts_the_rest():
    mz = np.array([99.4, 99.5, 99.6, 100.4, 100.5, 7.0, 3.0])
    intensity = np.array([8, 2, 4, 3, 100, 5, 0], np.float32)
    binned = bin_spectrum(mz, intensity, np.array([0, 5, 6, 6, 7]), 100)
    assert binned.spectra.shape == (4, 101)
    assert binned.spectra.dtype == np.float32
    assert {i: v for i, v in enumerate(binned.spectra[0].tolist()) if v} == {99: 1.0, 100: 0.5}
    assert binned.num_dropped.tolist() == [1, 0, 0, 0]
    assert binned.spectra[1, 7] == 1.0
    assert not binned.spectra[2:].any()


def test_binning_by_floor():
    binned = bin_spectrum(
        np.array([99.6, 100.9, 101.0]),
        np.array([1, 2, 9], np.float32),
        np.array([0, 3]),
        100,
        rounding="floor",
    )
    assert binned.spectra[0, 99:].tolist() == [0.5, 1.0]
    assert binned.num_dropped.tolist() == [1]


@given(soup=soups(), max_mz=st.integers(0, 60))
def test_binning_is_the_loop_that_one_would_write(folder, soup, max_mz):
    path = folder / "bins.msp"
    path.write_bytes(soup)
    for batch in read_msp(path):
        binned = bin_spectrum(batch.mz, batch.intensity, batch.offsets, max_mz)
        for row, (a, b) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
            expected = [0.0] * (max_mz + 1)
            for mz, value in zip(batch.mz[a:b], batch.intensity[a:b], strict=True):
                nearest = int(mz) + (mz - int(mz) >= 0.5)
                if nearest <= max_mz:
                    expected[nearest] = max(expected[nearest], float(value))
            base = max(expected)
            expected = [np.float32(v) / np.float32(base or 1) for v in expected]
            assert binned.spectra[row].tolist() == expected
