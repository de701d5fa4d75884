"""Samples as the model gets them: what is drawn is what is stored, and what is odd is said."""

from __future__ import annotations

import base64
import io
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kept_commands import invoke
from molecule_makers import msp_record
from stoker.packing.samples import (
    MAX_DRAWN,
    Samples,
    encode_png,
    sample_facts,
    samples_of,
    samples_section,
)
from stoker.store.fields import Dense, Ragged
from store_makers import write_store

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra 'vision')")


def pictures_in(text: str) -> list[np.ndarray]:
    found = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", text)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(raw)))) for raw in found]


@given(arrays.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3))))
def test_a_png_has_the_pixels_it_was_made_of(pixels):
    assert (np.asarray(Image.open(io.BytesIO(encode_png(pixels)))) == pixels).all()


@pytest.fixture
def masked(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (30, 3, 8, 8), dtype=np.uint8)
    images[:3] = 255
    masks = np.zeros((30, 8, 8), np.uint8)
    masks[:, :4] = 1
    fields = {
        "images": Dense(images),
        "masks": Dense(masks),
        "name": Ragged.from_strings([f"<b>{n}.png" for n in range(30)]),
    }
    return write_store(tmp_path / "s", [fields])


def test_pictures_and_masks_are_drawn_from_the_store_and_names_are_escaped(masked):
    samples = samples_of(masked)
    section = samples_section(samples)
    assert section is not None
    drawn = pictures_in(section.body)
    assert len(drawn) == 2 * MAX_DRAWN
    stored = masked.read_rows("images", 0, 1)[0].transpose(1, 2, 0)
    assert (drawn[0] == stored).all()
    mixed = drawn[1].astype(int)
    assert not (mixed[0] == mixed[7]).all()  # the two classes have different colours
    assert "<b>" not in section.body
    assert sample_facts(samples)["all white"] == "3 of 30 pictures that were looked at"


def test_parts_of_a_source_give_the_same_facts_as_the_store(masked):
    half = Samples()
    for start in (0, 15):
        half.take(
            {name: Dense(masked.read_rows(name, start, start + 15)) for name in ("images", "masks")}
        )
    facts = sample_facts(half)
    assert facts["pictures"] == "8 x 8, 3 channels"
    assert facts["mask classes"] == "0 960 (50.0%), 1 960 (50.0%) pixels"
    assert facts["pixel values"] == sample_facts(samples_of(masked))["pixel values"]


def test_inspect_takes_pictures_masks_and_classes_as_pack_does(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "in" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (6, 6), (number, 9, 9)).save(tmp_path / "in" / name / f"{number}.png")
    (tmp_path / "in" / "notes.txt").write_text("x")
    outcome = invoke("inspect", tmp_path / "in", "--size", "6x6", "--html", tmp_path / "p.html")
    assert outcome.exit_code == 0, outcome.output
    assert "classes: cat 2 (50.0%), dog 2 (50.0%) samples" in outcome.output
    assert "5 pictures found = 4 packed + 0 refused + 1 ignored" in outcome.output
    assert len(pictures_in((tmp_path / "p.html").read_text())) == 4
    facts = json.loads(invoke("inspect", tmp_path / "in", "--size", "6x6", "--json").stdout)[
        "facts"
    ]
    assert facts["pixel values"].startswith("red 0 to 1")


def test_inspect_takes_a_spectrum_library_and_draws_the_molecule(tmp_path):
    pytest.importorskip("rdkit", reason="RDKit is not installed (extra 'chem')")
    (tmp_path / "lib.msp").write_text(msp_record("Ethanol", SMILES="CCO") + msp_record("bare"))
    outcome = invoke("inspect", tmp_path / "lib.msp", "--html", tmp_path / "p.html")
    assert outcome.exit_code == 0, outcome.output
    assert "mass of the molecules: 46.0419" in outcome.output
    assert "refused 1: " in outcome.output
    text = (tmp_path / "p.html").read_text()
    assert text.count('<svg id="spectrum-') == 1
    assert "class='bond-0" in text
    (tmp_path / "bare.msp").write_text(msp_record("bare"))
    assert "peaks per spectrum: 3 to 3" in invoke("inspect", tmp_path / "bare.msp").output


def test_a_folder_of_tables_with_a_plot_in_it_is_one_of_tables(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.csv").write_text("a,b\n" + "1.5,2.5\n3.5,4.25\n" * 9)
    Image.new("L", (4, 4)).save(tmp_path / "plot.png")
    assert "rows: 36" in invoke("inspect", tmp_path).output


def test_rows_of_a_table_are_shown_with_the_names_of_their_columns(tmp_path):
    (tmp_path / "t.csv").write_text(
        "height,kind\n" + "".join(f"{n}.5,{n % 2}\n" for n in range(40))
    )
    outcome = invoke(
        "inspect", tmp_path / "t.csv", "--target", "kind", "--html", tmp_path / "p.html"
    )
    assert outcome.exit_code == 0, outcome.output
    text = (tmp_path / "p.html").read_text()
    assert 'id="rows"' in text
    assert "height" in text


def test_a_finished_pack_tells_the_facts_and_where_to_look(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, value in (("images", 255), ("masks", 0)):
        (tmp_path / folder).mkdir()
        Image.new("L", (6, 6), value).save(tmp_path / folder / "0.png")
    words = ("pack", "segmentation", "out", "--images", "images", "--masks", "masks", "-j", "1")
    outcome = invoke(*words)
    assert outcome.exit_code == 0, outcome.output
    assert "all white: 1 of 1 pictures that were looked at" in outcome.output
    assert "samples as the model gets them: out/samples.html" in outcome.output
    assert invoke("inspect", "out", "--html", "out.html").exit_code == 0


def test_a_page_that_a_killed_pack_could_not_write_is_written_by_the_next(tmp_path, monkeypatch):
    """Found by the campaign of kills: the store was committed, and never got its page."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{n},{n % 7}\n" for n in range(200))
    (tmp_path / "x.csv").write_text(f"a,b\n{rows}")
    words = ["pack", "table", "x.csv", "out", "--repair", "robust"]
    assert invoke(*words).exit_code == 0
    page = tmp_path / "out" / "samples.html"
    whole = page.read_bytes()
    page.unlink()
    again = invoke(*words)
    assert "is up to date" in again.output
    assert page.read_bytes() == whole
    page.unlink()
    assert json.loads(invoke(*words, "--json").output)["page"] == str(page.relative_to(tmp_path))
    assert page.read_bytes() == whole
