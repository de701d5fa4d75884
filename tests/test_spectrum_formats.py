"""MGF, MassBank, SDF and mzML as MSP: the same peaks and conditions; whatever is damaged is named."""

from __future__ import annotations

import base64
import gzip
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gallery.cases_spectra import MASSBANK, MGF, SDF
from stoker.errors import StokerError
from stoker.sources.massspec.conditions import spectrum_kind
from stoker.sources.massspec.formats import as_msp, format_of
from stoker.sources.massspec.structures import elements, healed
from stoker.sources.msp import read_msp

pytest.importorskip("rdkit", reason="RDKit is not installed (extra 'chem')")
WHOLE = {"mgf": MGF, "massbank": MASSBANK, "sdf": SDF}


def converted(folder: Path, raw: bytes, name: str = "lib.txt"):
    """Return what `as_msp` makes of the bytes, and the records in it."""
    (folder / name).write_bytes(raw)
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    made = as_msp(folder / name, scratch)
    batches = list(read_msp(made.path))
    assert not [refusal for batch in batches for refusal in batch.refused] or made.path.name == name
    return made, [record for batch in batches for record in batch.records], batches


@pytest.mark.parametrize("form", WHOLE)
def test_the_content_tells_the_format_and_gzip_changes_nothing(tmp_path, form):
    (tmp_path / "x").write_text(WHOLE[form])
    assert format_of(tmp_path / "x") == form
    _, plain, _ = converted(tmp_path, WHOLE[form].encode())
    _, zipped, _ = converted(tmp_path, gzip.compress(WHOLE[form].encode()), "lib.txt.gz")
    assert len(plain) == len(zipped) == 1
    for record in (*plain, *zipped):
        record.meta.pop("source_file")
    assert plain == zipped


def test_zipped_files_of_one_size_and_time_are_not_taken_for_each_other(tmp_path):
    for name in ("A", "B"):
        path = tmp_path / "in" / f"{name}.msp.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(f"Name: {name}\nNum Peaks: 1\n15 10\n".encode(), mtime=0))
        os.utime(path, ns=(0, 0))
    made = as_msp(tmp_path / "in", tmp_path)
    names = [record.meta["name"] for batch in read_msp(made.path) for record in batch.records]
    assert names == ["A", "B"]


@pytest.mark.parametrize(
    ("content", "what", "typed"),
    [
        (
            b'<?xml version="1.0"?>\n<mzXML xmlns="x">\n<msRun/></mzXML>\n',
            "mzXML",
            "load_from_mzxml",
        ),
        (b'[\n{"spectrum_id": "A", "peaks_json": "[[1, 2]]"}]\n', "JSON", "load_from_json"),
        (b'<?xml version="1.0"?>\n<run/>\n', "XML", "file "),
        (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "file "),
        (b"\x89PNG\r\n", "a picture", "file "),
    ],
)
def test_a_file_of_another_kind_is_named_with_what_to_type(tmp_path, content, what, typed):
    (tmp_path / "x.dat").write_bytes(content)
    with pytest.raises(StokerError, match=f"is {what}") as told:
        as_msp(tmp_path / "x.dat", tmp_path)
    assert typed in told.value.fix


def test_keys_that_count_peaks_are_the_writers_own(tmp_path):
    _, (record,), (batch, *_) = converted(
        tmp_path, MGF.replace("CHARGE", "NUM_PEAKS=9\nMS=1\nCHARGE").encode()
    )
    assert "num_peaks" not in record.meta
    assert len(batch.mz) == 3


def test_every_record_says_where_it_stood(tmp_path):
    _, records, _ = converted(tmp_path, (MGF + MGF).encode())
    assert [record.meta["source_line"] for record in records] == ["2", "17"]


def test_conditions_of_each_format(tmp_path):
    _, (mgf,), _ = converted(tmp_path, MGF.encode())
    assert mgf.meta["precursor_mz"] == "47.0491"
    assert mgf.meta["charge"] == "1+"
    assert mgf.meta["name"] == "Ethanol M+H"
    assert mgf.meta["retention_time"] == "12.5 s"
    assert spectrum_kind(mgf.meta) == "MS/MS"
    _, (massbank,), _ = converted(tmp_path, MASSBANK.encode())
    assert massbank.meta["inchikey"] == "LFQSCWFLJHTTHZ-UHFFFAOYSA-N"
    assert massbank.synonyms == ("Ethyl alcohol",)
    assert spectrum_kind(massbank.meta) == "EI"


PEAKS = st.lists(
    st.tuples(st.floats(1, 2000), st.floats(0, 1e6, width=32)),
    max_size=12,
    unique_by=lambda p: p[0],
)


@given(spectra=st.lists(PEAKS, min_size=1, max_size=5))
def test_mgf_keeps_every_peak(tmp_path_factory, spectra):
    text = "".join(
        f"BEGIN IONS\nTITLE=t{number}\nPEPMASS=500.5\n"
        + "".join(f"{mz!r}\t{intensity!r}\n" for mz, intensity in peaks)
        + "END IONS\n\n"
        for number, peaks in enumerate(spectra)
    )
    _, records, batches = converted(tmp_path_factory.mktemp("mgf"), text.encode())
    assert [record.meta["name"] for record in records] == [f"t{n}" for n in range(len(spectra))]
    expected = [pair for peaks in spectra for pair in sorted(peaks)]
    got_mz = np.concatenate([batch.mz for batch in batches])
    got = np.concatenate([batch.intensity for batch in batches])
    assert got_mz.tolist() == [mz for mz, _ in expected]
    assert got.tolist() == [np.float32(value) for _, value in expected]


@given(
    form=st.sampled_from(sorted(WHOLE)),
    changes=st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=3)), max_size=6),
    cut=st.none() | st.integers(0, 900),
)
def test_damage_is_refused_by_name_or_read(tmp_path_factory, form, changes, cut):
    raw = bytearray(WHOLE[form].encode()[:cut])
    for place, what in changes:
        at = place % (len(raw) + 1)
        raw[at : at + len(what)] = what
    folder = tmp_path_factory.mktemp("damage")
    try:
        made, records, _ = converted(folder, bytes(raw))
    except StokerError:
        return
    assert made.num_unread == sum(refusal.kind == "unreadable record" for refusal in made.refused)
    assert len(records) + made.num_unread <= 4


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("C9H8O4", {"C": 9, "H": 8, "O": 4}),
        ("C2H6O+", {"C": 2, "H": 6, "O": 1}),
        ("[C5H10N]+", {"C": 5, "H": 10, "N": 1}),
        ("C29H35N2+", {"C": 29, "H": 35, "N": 2}),
        ("[C29H35N2]2+", {"C": 29, "H": 35, "N": 2}),
        ("C10H16^2+", {"C": 10, "H": 16}),
        ("C10H16+2", {"C": 10, "H": 16}),
        ("CD4", {"C": 1, "H": 4}),
        ("C[13C]H4", {"C": 2, "H": 4}),
        ("NaCl", {"Na": 1, "Cl": 1}),
        ("X", {}),
        ("C2H6O.HCl", {}),
        ("", {}),
    ],
)
def test_formulas_are_read_where_they_are_certain(formula, expected):
    assert elements(formula) == expected


@given(st.text(max_size=30))
def test_any_text_is_no_formula_or_counts_atoms(text):
    assert all(count > 0 for count in elements(text).values())


@given(st.text(max_size=80))
def test_healing_adds_at_most_one_line(text):
    mended, is_new = healed(text)
    assert (mended != text) >= is_new
    assert not is_new or "\nM  END" in mended


@pytest.mark.parametrize(
    ("meta", "kind"),
    [
        ({}, "EI"),
        ({"instrument_type": "GC-EI-TOF"}, "EI"),
        ({"instrument_type": "EI-B", "collision_energy": "70 eV"}, "EI"),
        ({"instrument_type": "GC-EI-QQ", "spectrum_type": "MS2"}, "MS/MS"),
        ({"precursor_mz": "100"}, "MS/MS"),
        ({"precursor_type": "[M]+."}, "EI"),
        ({"precursor_type": "[M+H]+"}, "MS/MS"),
        ({"instrument_type": "LC-ESI-QTOF", "ms_level": "1"}, "MS1"),
        ({"instrument_type": "LC-ESI-QTOF", "ms_level": "MS2"}, "MS/MS"),
        ({"ms_level": "3"}, "MS/MS"),
        ({"ms_level": "1"}, "MS1"),
        ({"ms_level": "MS1", "instrument_type": "GC-EI-TOF"}, "EI"),
    ],
)
def test_kinds_of_spectra(meta, kind):
    assert spectrum_kind(meta) == kind


def _array(values: list[float], accession: str, name: str) -> str:
    raw = base64.b64encode(zlib.compress(struct.pack(f"<{len(values)}d", *values))).decode()
    return (
        f'<binaryDataArray encodedLength="{len(raw)}">'
        '<cvParam cvRef="MS" accession="MS:1000523" name="64-bit float" value=""/>'
        '<cvParam cvRef="MS" accession="MS:1000574" name="zlib compression" value=""/>'
        f'<cvParam cvRef="MS" accession="{accession}" name="{name}" value=""/>'
        f"<binary>{raw}</binary></binaryDataArray>"
    )


def mzml_text(mode: str = "centroid spectrum") -> str:
    """One MS/MS spectrum of three peaks."""
    accession = "MS:1000127" if mode == "centroid spectrum" else "MS:1000128"
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n<mzML xmlns="http://psi.hupo.org/ms/mzml" version="1.1.0">'
        '<run id="r"><spectrumList count="1" defaultDataProcessingRef="d">'
        '<spectrum index="0" id="scan=1" defaultArrayLength="3">'
        '<cvParam cvRef="MS" accession="MS:1000511" name="ms level" value="2"/>'
        f'<cvParam cvRef="MS" accession="{accession}" name="{mode}" value=""/>'
        '<cvParam cvRef="MS" accession="MS:1000130" name="positive scan" value=""/>'
        '<precursorList count="1"><precursor><selectedIonList count="1"><selectedIon>'
        '<cvParam cvRef="MS" accession="MS:1000744" name="selected ion m/z" value="47.0491" unitName="m/z"/>'
        '<cvParam cvRef="MS" accession="MS:1000041" name="charge state" value="1"/>'
        "</selectedIon></selectedIonList><activation>"
        '<cvParam cvRef="MS" accession="MS:1000045" name="collision energy" value="20.0" unitName="electronvolt"/>'
        '</activation></precursor></precursorList><binaryDataArrayList count="2">'
        + _array([19.0178, 29.0386, 47.0491], "MS:1000514", "m/z array")
        + _array([5.0, 100.0, 30.0], "MS:1000515", "intensity array")
        + "</binaryDataArrayList></spectrum></spectrumList></run></mzML>"
    )


def test_mzml(tmp_path):
    _, (record,), (batch, *_) = converted(tmp_path, mzml_text().encode(), "run.mzML")
    assert record.meta["precursor_mz"] == "47.0491"
    assert record.meta["charge"] == "1"
    assert record.meta["collision_energy"] == "20.0"
    assert spectrum_kind(record.meta) == "MS/MS"
    assert batch.mz.tolist() == [19.0178, 29.0386, 47.0491]
    made, records, _ = converted(tmp_path, mzml_text("profile spectrum").encode(), "run.mzML")
    assert not records
    assert "profile spectrum" in made.refused[0].reason
    assert made.refused[0].fix.startswith("msconvert")
    made, *_ = converted(tmp_path, b"<mzML><run><chromatogramList/></run></mzML>", "run.mzML")
    assert str(made.refused[0]).endswith(
        "run.mzML: it holds no spectrum; chromatograms are not read"
    )
    packed = mzml_text().replace("MS:1000574", "MS:1002312")
    assert "numpress" in converted(tmp_path, packed.encode(), "run.mzML")[0].refused[0].reason
    with pytest.raises(StokerError, match="cannot be read as mzML"):
        converted(tmp_path, mzml_text().encode()[:-300], "run.mzML")


@given(
    changes=st.lists(
        st.tuples(st.integers(0, 3000), st.binary(max_size=4)), min_size=1, max_size=5
    ),
    cut=st.none() | st.integers(0, 2500),
)
def test_a_damaged_mzml_is_refused_by_name_or_read(tmp_path_factory, changes, cut):
    raw = bytearray(mzml_text().encode()[:cut])
    for place, what in changes:
        at = place % (len(raw) + 1)
        raw[at : at + len(what)] = what
    try:
        made, records, _ = converted(tmp_path_factory.mktemp("mzml"), bytes(raw), "run.mzML")
    except StokerError:
        return
    assert len(records) + made.num_unread <= 2


def test_training_leaves_out_what_was_packed_for_prediction_and_reads_conditions(tmp_path):
    from molecule_makers import SMILES, msp_record
    from stoker.packing import PackOptions, pack
    from stoker.recipes.massspec.recipe import MassSpecRecipe
    from stoker.sources.massspec import MassSpecSource
    from stoker.store.reader import open_store

    texts = [
        msp_record(f"c{n}", SMILES=smiles, PrecursorMZ="99", peaks=[] if n % 4 == 0 else None)
        for n, smiles in enumerate(SMILES)
    ]
    (tmp_path / "lib.msp").write_text("".join(texts))
    source = MassSpecSource(tmp_path / "lib.msp", without_spectra=True)
    pack(source, tmp_path / "s", PackOptions(jobs=1, on_bad="quarantine", bad_budget="50%"))
    with open_store(tmp_path / "s") as store:
        job = MassSpecRecipe().make_job(store, {"width": 8, "num_blocks": 1}, 0)
        used = np.concatenate(list(job.samples.values()))
        assert all(len(store.read_values("mz", int(sample))) for sample in used)
        assert 0 < len(used) < store.num_samples
    assert any("samples without a spectrum are left out" in note for note in job.notes)
    assert "conditions" in job.fields, "of MS/MS spectra, which the model reads"
