"""Similarities of spectra against plain loops; spectra for new molecules as an MSP library."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

pytest.importorskip("rdkit.Chem", reason="the extra 'chem' is not installed")

from molecule_makers import inchikey, msp_record
from run_makers import make_store, settings_for
from stoker.errors import InputError
from stoker.packing import PackOptions, pack
from stoker.recipes.answers import load_model, predict_file
from stoker.recipes.inference import load_trained
from stoker.recipes.massspec.evaluation import (
    NEAREST,
    _by_label,
    cosines,
    element_class,
    entropy_similarity,
    fingerprint_rows,
    peak_list,
    ring_class,
    stein_scott,
)
from stoker.recipes.massspec.molecules import read_molecules_of
from stoker.recipes.run import as_json, run_recipe
from stoker.sources.massspec import MassSpecSource
from stoker.sources.massspec.conditions import CONDITION_COLUMNS, encode_conditions
from stoker.sources.molecules.packed import pack_molecule, read_structure
from stoker.sources.msp import read_msp
from stoker.store.reader import open_store
from test_recipe_massspec import made_molecules

SPECTRA = npst.arrays(
    np.float64,
    (2, 12),
    elements=st.one_of(st.just(0.0), st.floats(1e-3, 1e3)),
)


def naive_cosine(one, other):
    lengths = math.sqrt(sum(a * a for a in one)) * math.sqrt(sum(b * b for b in other))
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0


def naive_entropy(shares):
    return -sum(share * math.log(share) for share in shares if share > 0)


def naive_entropy_similarity(one, other):
    """Li et al., 2021, as their text says it."""
    spectra = []
    for spectrum in (one, other):
        if not sum(spectrum):
            return 0.0
        shares = [value / sum(spectrum) for value in spectrum]
        entropy = naive_entropy(shares)
        if entropy < 3:
            shares = [share ** (0.25 + 0.25 * entropy) if share else 0.0 for share in shares]
            shares = [share / sum(shares) for share in shares]
        spectra.append(shares)
    mixed = [(a + b) / 2 for a, b in zip(*spectra, strict=True)]
    apart = 2 * naive_entropy(mixed) - naive_entropy(spectra[0]) - naive_entropy(spectra[1])
    return 1 - apart / math.log(4)


@settings(max_examples=60, deadline=None)
@given(SPECTRA)
def test_similarities_equal_plain_loops(pair):
    one, other = pair
    rows = torch.from_numpy(one)[None], torch.from_numpy(other)[None]
    assert math.isclose(float(cosines(*rows)), naive_cosine(one, other), abs_tol=1e-9)
    weighed = [
        [(place + 1) ** 3 * value**0.6 for place, value in enumerate(spectrum)]
        for spectrum in (one, other)
    ]
    assert math.isclose(float(stein_scott(*rows)), naive_cosine(*weighed), abs_tol=1e-9)
    found = float(entropy_similarity(*rows))
    assert math.isclose(found, naive_entropy_similarity(one, other), abs_tol=1e-9)
    assert -1e-9 <= found <= 1 + 1e-9


@settings(max_examples=20, deadline=None)
@given(SPECTRA)
def test_a_spectrum_is_like_itself_whatever_its_scale(pair):
    row = torch.from_numpy(pair[0])[None]
    if float(row.sum()):
        for similarity in (cosines, stein_scott, entropy_similarity):
            assert math.isclose(float(similarity(row, 7 * row)), 1.0, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("smiles", "elements", "rings"),
    [
        ("CCCC", "hydrocarbon", "no rings"),
        ("C1CCCCC1O", "C, H and O only", "rings, none aromatic"),
        ("c1ccccc1N", "with nitrogen", "aromatic"),
        ("CCS", "with sulphur", "no rings"),
        ("ClCCN", "with halogens", "no rings"),
        ("C[Si](C)(C)OC", "with silicon", "no rings"),
    ],
)
def test_molecules_are_classed_by_elements_and_rings(smiles, elements, rings):
    words = pack_molecule(read_structure(smiles, "smiles")).atoms
    assert (element_class(words), ring_class(words)) == (elements, rings)


def test_peaks_are_scaled_to_a_base_of_999():
    root = torch.tensor([0.0, 1.0, 0.5, 0.001, 0.25])
    assert peak_list(root) == [(1.0, 999.0), (2.0, 999 / 4), (4.0, 999 / 16)]
    assert peak_list(torch.zeros(4)) == []


# -- a whole run -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["massspec", "massspec-teacher"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_store(request.param, folder / "store").close()
    made = run_recipe(settings_for(request.param, folder / "store", folder / "run"), device="cpu")
    return folder, as_json(made)


def test_a_run_is_evaluated_beside_the_nearest_neighbour(trained):
    _, made = trained
    evaluation = json.loads(json.dumps(made["evaluation"]))
    wanted = {"cosine", "weighted_cosine", "stein_scott_cosine", "entropy_similarity"}
    wanted |= {f"recall@{k}{more}" for k in (1, 5, 10) for more in ("", "_within_5da")}
    assert wanted == set(evaluation["metrics"])
    assert list(evaluation["baselines"]) == ["mean training spectrum", NEAREST]
    assert evaluation["examples"][0]["kind"] == "spectrum"
    assert math.isclose(
        evaluation["metrics"]["weighted_cosine"], made["test"]["weighted_cosine"], abs_tol=1e-5
    )
    for k in (1, 5, 10):
        assert math.isclose(evaluation["metrics"][f"recall@{k}"], made["test"][f"recall@{k}"])


def test_the_nearest_neighbour_is_the_best_tanimoto(trained):
    from stoker.recipes.massspec.evaluation import FinalSpectrumMetrics
    from stoker.recipes.massspec.recipe import MassSpecRecipe

    folder, _ = trained
    with open_store(folder / "store") as store:
        job = MassSpecRecipe().make_job(store, {"width": 8, "num_blocks": 1}, 0)
        final: FinalSpectrumMetrics = job.final_metrics()
        test, train = job.samples["test"], job.samples["train"]
        _, shares, _ = final._nearest(test, torch.device("cpu"))
        bits = [set(np.flatnonzero(row)) for row in fingerprint_rows(store, train).numpy()]
        for sample, share in zip(test, shares, strict=True):
            own = set(store.read_values("ecfp_bits", int(sample)).tolist())
            assert math.isclose(
                share, max(len(own & other) / len(own | other) for other in bits), rel_tol=1e-6
            )


def test_new_molecules_get_spectra_or_a_reason(trained):
    folder, _ = trained
    checkpoint = load_trained(folder / "run" / "best.pt")
    (folder / "new.smi").write_text("CCCCO butanol\nnot_a_molecule bad one\n\nCCCN\n")
    for _ in range(2):  # our own library is replaced
        report = predict_file(checkpoint, folder / "new.smi", folder / "new.msp", device="cpu")
    assert report.num_rows == 3
    assert "1 molecule without a spectrum; see 'reason'" in report.notes
    batches = list(read_msp(folder / "new.msp"))
    records = [record for batch in batches for record in batch.records]
    refused = [refusal for batch in batches for refusal in batch.refused]
    texts = (folder / "new.msp").read_text()
    assert "no spectrum: RDKit" in texts
    assert {"butanol", "line 4"} <= {record.meta["name"] for record in records} | {
        refusal.reason for refusal in refused
    }
    first = batches[0]
    peaks = first.intensity[: first.offsets[1]]
    assert peaks.max() == 999
    assert (peaks == np.rint(peaks)).all()
    assert records[0].meta["formula"] == "C4H10O"
    (folder / "mine.msp").write_text("Name: mine\nNum Peaks: 1\n1 2\n")
    with pytest.raises(InputError, match="stoker did not write it"):
        predict_file(checkpoint, folder / "new.smi", folder / "mine.msp", device="cpu")


def test_the_same_molecule_gets_the_same_spectrum_from_every_file(trained):
    from rdkit import Chem

    folder, _ = trained
    model = load_model(folder / "run" / "best.pt")
    (folder / "a.smi").write_text("CCCCO\tbutanol\n")
    (folder / "a.csv").write_text("id;smiles\nbutanol;CCCCO\n;\n")
    (folder / "a.sdf").write_text(
        "butanol" + Chem.MolToMolBlock(Chem.MolFromSmiles("CCCCO")) + "$$$$\n"
    )
    (folder / "a.msp").write_text(
        "Name: butanol\nSMILES: CCCCO\nNum Peaks: 1\n31 999\n\nName: bare\nNum Peaks: 1\n1 1\n"
    )
    tables = {
        ending: model.predict(folder / f"a.{ending}", device="cpu").to_pylist()
        for ending in ("smi", "csv", "sdf", "msp")
    }
    wanted = tables["smi"][0]
    for rows in tables.values():
        assert rows[0]["name"] == "butanol"
        assert rows[0]["formula"] == "C4H10O"
        assert np.allclose(rows[0]["spectrum"], wanted["spectrum"], atol=1e-6)
    assert tables["csv"][1]["reason"] == "the cell is empty"
    assert tables["msp"][1]["reason"] == "the record has neither SMILES nor InChI"
    assert tables["msp"][1]["spectrum"] is None


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet", ".msp"])
def test_predictions_replace_their_own_file_and_no_other(trained, ending):
    folder, _ = trained
    checkpoint = load_trained(folder / "run" / "best.pt")
    (folder / "two.smi").write_text("CCCCO butanol\nCCCN\n")
    for source in ("two.smi", "two.smi", "store", "store"):
        report = predict_file(checkpoint, folder / source, folder / f"own{ending}", device="cpu")
        assert report.num_rows == (2 if source == "two.smi" else len(open_store(folder / "store")))
    (folder / f"mine{ending}").write_text("name,mass,spectrum_0\na,1,2\n")
    with pytest.raises(InputError, match="stoker did not write it"):
        predict_file(checkpoint, folder / "two.smi", folder / f"mine{ending}", device="cpu")


def test_a_store_is_answered_as_a_library_under_its_names(trained):
    folder, _ = trained
    report = predict_file(
        load_trained(folder / "run" / "best.pt"),
        folder / "store",
        folder / "held-out.msp",
        split="test",
        device="cpu",
    )
    records = [each for batch in read_msp(folder / "held-out.msp") for each in batch.records]
    with open_store(folder / "store") as store:
        ids = [
            each for each in range(len(store)) if store.read_rows("split", each, each + 1)[0] == 2
        ]
        wanted = [store.read_text("name", each) for each in ids]
    assert [record.meta["name"] for record in records] == wanted
    assert report.num_rows == len(wanted) > 0


def test_a_table_without_structures_is_refused(tmp_path):
    with (tmp_path / "a.csv").open("w") as file:
        csv.writer(file).writerows([["mass", "colour"], [1, "red"]])
    with pytest.raises(InputError, match="mass, colour"):
        list(read_molecules_of(tmp_path / "a.csv"))


# -- MS/MS with its conditions ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "wanted"),
    [
        ({}, {"ms/ms": 1}),
        ({"precursor_type": "[M+H]+"}, {"ms/ms": 1, "positive": 1, "adduct [M+H]+": 1}),
        (
            {"adduct": "[M-H]-", "collision_energy": "HCD 35 %"},
            {"ms/ms": 1, "negative": 1, "adduct [M-H]-": 1, "energy": 0.35, "energy is known": 1},
        ),
        (
            {"adduct": "[M+Li]+", "ion_mode": "P", "collision_energy": "9000"},
            {"ms/ms": 1, "positive": 1, "other adduct": 1, "energy": 2.0, "energy is known": 1},
        ),
        ({"ion_mode": "Negative"}, {"ms/ms": 1, "negative": 1}),
    ],
)
def test_conditions_become_numbers(meta, wanted):
    found = dict(zip(CONDITION_COLUMNS, encode_conditions("MS/MS", meta), strict=True))
    assert {name: value for name, value in found.items() if value} == pytest.approx(wanted)


def test_a_model_of_ms_ms_reads_the_energy(tmp_path):
    records = []
    for number, (smiles, _) in enumerate(made_molecules()[:40]):
        for energy, peaks in (("10 eV", ((45.0, 999.0),)), ("60 eV", ((29.0, 999.0),))):
            told = {"Precursor_type": "[M+H]+", "Collision_energy": energy, "Spectrum_type": "MS2"}
            key = inchikey(smiles)
            records.append(
                msp_record(
                    f"c{number}",
                    peaks=peaks,
                    InChIKey=key,
                    SMILES=smiles,
                    ID=f"{number}{energy[0]}",
                    **told,
                )
            )
    (tmp_path / "library.msp").write_text("".join(records))
    source = MassSpecSource(
        tmp_path / "library.msp", max_mz=150, seed=3, train_ratio=0.6, val_ratio=0.1
    )
    pack(source, tmp_path / "store", PackOptions(jobs=1))
    made = run_recipe(
        settings_for(
            "massspec",
            tmp_path / "store",
            tmp_path / "run",
            "training.epochs=30",
            "training.patience=30",
            "training.lr=0.01",
        ),
        device="cpu",
    )
    assert "collision energy" in made.evaluation.groups
    # At 10 eV all compounds show one peak, at 60 eV another: a neighbour of like conditions is right.
    assert made.evaluation.baselines[NEAREST]["cosine"] == pytest.approx(1.0)
    count = made.evaluation.num_samples
    assert (
        f"neighbours of like conditions for {count} of {count} test spectra"
        in made.evaluation.notes
    )
    rows = (
        "smiles,collision_energy,adduct",
        "CCCCCO,10 eV,[M+H]+",
        "CCCCCO,60 eV,[M+H]+",
        "CCCCCO,,",
    )
    (tmp_path / "new.csv").write_text("\n".join(rows))
    predict_file(
        load_trained(tmp_path / "run" / "best.pt"),
        tmp_path / "new.csv",
        tmp_path / "out.msp",
        device="cpu",
    )
    (batch,) = read_msp(tmp_path / "out.msp")
    high, low = (
        dict(zip(batch.mz[start:stop].tolist(), batch.intensity[start:stop].tolist(), strict=True))
        for start, stop in zip(batch.offsets[:2], batch.offsets[1:3], strict=True)
    )
    # 45 is measured at 10 eV only, 29 at 60 eV only.
    assert high[45.0] / high[29.0] > 1.5 * low.get(45.0, 0.0) / low[29.0]
    assert batch.records[1].meta["collision_energy"] == "60 eV"


def test_conditions_are_alike_more_loosely_from_level_to_level(tmp_path):
    from stoker.recipes.massspec.evaluation import condition_levels
    from stoker.store.fields import Dense
    from store_makers import write_store

    told = [
        {"adduct": "[M+H]+", "collision_energy": "10"},
        {"adduct": "[M+H]+", "collision_energy": "14 eV"},
        {"adduct": "[M+H]+", "collision_energy": "40"},
        {"adduct": "[M+Na]+", "collision_energy": "40"},
        {"adduct": "[M-H]-"},
    ]
    rows = np.array([encode_conditions("MS/MS", meta) for meta in told], "f4")
    with write_store(tmp_path / "store", [{"conditions": Dense(rows, CONDITION_COLUMNS)}]) as store:
        levels = condition_levels(store)
    as_groups = [[codes.tolist().index(code) for code in codes] for codes in levels]
    assert as_groups == [[0, 0, 2, 3, 4], [0, 0, 0, 3, 4], [0, 0, 0, 0, 4], [0, 0, 0, 0, 0]]


def test_samples_of_rare_groups_stand_in_a_row_of_their_own():
    labels = np.array(["a"] * 7 + ["b"] * 6 + ["c", "d", "d"], dtype=object)
    rows = _by_label(labels, {"cosine": np.arange(16.0)})
    assert [(name, row["samples"]) for name, row in rows.items()] == [
        ("a", 7.0),
        ("b", 6.0),
        ("2 more", 3.0),
    ]
    assert rows["2 more"]["cosine"] == 14.0
    assert _by_label(labels[-3:], {"cosine": np.ones(3)}) == {}
