"""The massspec recipes: formulas against numpy, padding and batching that change nothing, learning."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

pytest.importorskip("rdkit.Chem", reason="the extra 'chem' is not installed")

from molecule_makers import inchikey, msp_record, write_library
from recipe_loops import NoWaiting, judge_job, train_job
from stoker.cli.main import app
from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.loader.splits import select_samples
from stoker.packing import PackOptions, pack
from stoker.recipes.massspec import metrics as spectra_metrics
from stoker.recipes.massspec.metrics import (
    Library,
    Ranking,
    SpectrumMetrics,
    make_library,
    rank_queries,
    weighted_cosine,
    weighted_units,
)
from stoker.recipes.massspec.models import (
    BidirectionalHead,
    DistillationLoss,
    GineLayer,
    Student,
    Teacher,
    cosine_loss,
    highest_bin,
    mask_above,
    pool_graphs,
    reverse_from,
    soften,
    temperature_at,
)
from stoker.recipes.massspec.options import MassSpecOptions, TeacherOptions
from stoker.recipes.massspec.recipe import (
    MassSpecRecipe,
    MassSpecTeacherRecipe,
    check_apart,
    split_compounds,
)
from stoker.sources.massspec import MassSpecSource
from stoker.sources.msp import bin_spectrum
from stoker.store.fields import Dense, Ragged
from stoker.store.reader import open_store
from store_makers import write_store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL = {"width": 64, "num_blocks": 1, "dropout": 0.1}
GRAPH = {"num_layers": 2, "graph_width": 24}
TAILS = {  # SMILES to the mass that EI keeps of it
    "O": 31, "N": 30, "C(=O)C": 43, "C(=O)OC": 74, "c1ccccc1": 91, "Cl": 49, "C#N": 41, "SC": 61,
    "C(=O)N": 59, "C=C": 55,
}  # fmt: skip


def made_molecules() -> list[tuple[str, list[tuple[float, float]]]]:
    """Chains with an end group: peaks of the end, of the chain, and of the chain lost from the mass."""
    from rdkit import Chem
    from rdkit.Chem.Descriptors import ExactMolWt

    made = {}
    for tail, kept in TAILS.items():
        for left in range(1, 9):
            for branch in ("", "C(C)", "C(CC)"):
                smiles = "C" * left + branch + "C" + tail
                mass = round(ExactMolWt(Chem.MolFromSmiles(smiles)))
                peaks = {29: 300, 43: 400, kept: 999, mass: 350, mass - 15: 200, mass - 29: 500}
                made[smiles] = [(float(mz), float(peaks[mz])) for mz in sorted(peaks)]
    return list(made.items())


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """240 compounds, every fourth with a replicate whose peaks are a little off."""
    folder = tmp_path_factory.mktemp("spectra")
    records = []
    for number, (smiles, peaks) in enumerate(made_molecules()):
        about = {"InChIKey": inchikey(smiles), "SMILES": smiles, "ID": str(number)}
        records.append(msp_record(f"compound {number}", peaks=peaks, **about))
        if number % 4 == 0:
            again = [(mz, height * (0.8 + 0.05 * (mz % 7))) for mz, height in peaks]
            records.append(msp_record(f"compound {number} again", peaks=again, **about))
    (folder / "library.msp").write_text("".join(records))
    pack(
        MassSpecSource(folder / "library.msp", max_mz=200, seed=3),
        folder / "store",
        PackOptions(jobs=1),
    )
    return open_store(folder / "store")


@pytest.fixture(scope="module")
def student_job(store):
    return MassSpecRecipe().make_job(store, SMALL, 0)


@pytest.fixture(scope="module")
def teacher_job(store):
    return MassSpecTeacherRecipe().make_job(store, SMALL | GRAPH, 0)


def batches(store, job, batch_size=16, device="cpu"):
    return Loader(store, batch_size, device, fields=job.fields, samples=job.samples["train"])


# -- the head ------------------------------------------------------------------------------------


@given(masses=st.lists(st.floats(1, 60, width=32), min_size=1, max_size=6), bins=st.integers(1, 40))
def test_masking_and_reversing_equal_a_loop(masses, bins):
    raw = np.random.default_rng(bins).normal(size=(len(masses), bins)).astype("f4")
    highest = highest_bin(torch.tensor(masses))
    assert highest.tolist() == [int(np.rint(np.float32(mass))) + 5 for mass in masses]
    masked, reverse = np.zeros_like(raw), np.zeros_like(raw)
    for row, top in enumerate(highest.tolist()):
        for j in range(bins):
            if j <= top:
                masked[row, j] = raw[row, j]
            if 0 <= top - j < bins:
                reverse[row, j] = raw[row, top - j]
    assert (mask_above(torch.from_numpy(raw), highest).numpy() == masked).all()
    assert (reverse_from(torch.from_numpy(raw), highest).numpy() == reverse).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_head_is_the_gated_formula(device):
    torch.manual_seed(0)
    head = BidirectionalHead(8, 30).to(device)
    features, masses = torch.randn(5, 8, device=device), torch.tensor([4.0, 17.5, 18.5, 29.0, 55.0])
    got = head(features, masses.to(device)).detach().cpu().numpy()
    ahead, back, gate = np.split(head.bins(features).detach().cpu().numpy(), 3, axis=1)
    gate = 1 / (1 + np.exp(-gate))
    for row, top in enumerate([9, 23, 23, 34, 60]):  # halves round to even, plus 5
        for j in range(30):
            forward = ahead[row, j] if j <= top else 0.0
            reverse = back[row, top - j] if 0 <= top - j < 30 else 0.0
            want = max(0.0, gate[row, j] * forward + (1 - gate[row, j]) * reverse)
            assert got[row, j] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("num_bins", [1, 2, 77, 501])
def test_no_bin_above_the_mass_and_five_is_ever_filled(num_bins):
    torch.manual_seed(1)
    model = Student(num_bins, 0, MassSpecOptions(width=32, num_blocks=1))
    masses = torch.tensor([16.0, 60.4, 300.0, 900.0])
    inputs = {"ecfp": torch.randint(0, 4, (4, 4096)).float(), "mol_weight": masses}
    spectra = model(inputs)["spectrum"]
    assert spectra.shape == (4, num_bins)
    assert (spectra >= 0).all()
    for row, mass in enumerate(masses.tolist()):
        assert not spectra[row, round(mass) + 6 :].any()
    if num_bins > 21:
        assert spectra[0, :22].any()
        assert spectra[3].any()


def test_the_default_student_is_neims_with_lighter_layers():
    model = Student(501, 0, MassSpecOptions())
    count = sum(parameter.numel() for parameter in model.parameters())
    width, narrow, bins = 1024, 512, 501
    block = 2 * width * narrow + 2 * narrow + width + 2 * width + narrow  # two Linear, two norms
    want = 4096 * width + width + 3 * block + 2 * width + 3 * bins * (width + 1)
    assert count == want
    assert [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)] == [
        0.25
    ] * 3


# -- GINE ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_gine_layer_equals_its_dense_form(device):
    torch.manual_seed(2)
    layer = GineLayer(6).to(device)
    with torch.no_grad():
        layer.own.fill_(0.3)
    bonds = [(0, 1), (1, 2), (2, 0), (3, 1)]
    edge_index = torch.tensor([pair for a, b in bonds for pair in ((a, b), (b, a))]).T
    edge_attr = torch.rand(len(bonds), 6).repeat_interleave(2, dim=0)
    atoms = torch.randn(5, 6)
    got = layer(atoms.to(device), edge_index.to(device), edge_attr.to(device)).cpu()
    layer = layer.cpu()
    normal, wanted = layer.norm(atoms), []
    attributes = dict(zip(map(tuple, edge_index.T.tolist()), edge_attr, strict=True))
    for i in range(5):
        heard = torch.zeros(6)
        for j in range(5):
            if (j, i) in attributes:
                heard += torch.relu(normal[j] + layer.bond(attributes[j, i]))
        wanted.append(atoms[i] + layer.mix(1.3 * normal[i] + heard))
    assert_allclose(got.detach(), torch.stack(wanted).detach(), atol=1e-5)


def test_pooling_is_the_mean_and_the_sum_of_each_graph():
    atoms = torch.randn(7, 3)
    owner = torch.tensor([0, 0, 2, 2, 2, 3, 3])  # graph 1 has no atom, 3 is padding
    mean, total = pool_graphs(atoms, owner, 3).chunk(2, dim=1)
    assert_allclose(
        total, torch.stack([atoms[:2].sum(0), torch.zeros(3), atoms[2:5].sum(0)]), atol=1e-6
    )
    assert_allclose(mean[2], atoms[2:5].mean(0), atol=1e-6)
    assert not mean[1].any()


@pytest.mark.parametrize("device", DEVICES)
def test_predictions_do_not_depend_on_the_batch_or_on_padding(store, teacher_job, device):
    model = teacher_job.model.to(device).eval()
    loader = batches(store, teacher_job, 7, device)
    index = next(iter(loader.index_batches()))
    inputs, targets = teacher_job.unpack(loader.assemble(index.indices, index.totals))
    together = model(inputs)["spectrum"]
    padded_inputs, padded_targets = teacher_job.unpack(loader.assemble(index.indices))
    assert padded_inputs["x"].shape[0] > inputs["x"].shape[0]
    assert_allclose(
        model(padded_inputs)["spectrum"].detach().cpu(), together.detach().cpu(), atol=1e-5
    )
    for name in ("ecfp", "mol_weight"):
        assert torch.equal(padded_inputs[name], inputs[name])
    for name in ("spectrum", "mol_weight", "group"):
        assert torch.equal(padded_targets[name], targets[name])
    for row in range(7):
        columns = index.indices[:, row : row + 1]
        alone, _ = teacher_job.unpack(loader.assemble(columns))
        assert_allclose(
            model(alone)["spectrum"].detach().cpu()[0], together[row].detach().cpu(), atol=1e-5
        )


def test_padding_without_a_spare_atom_is_harmless(teacher_job):
    """The largest molecules fill their capacity: padded bonds then point past the last atom."""
    model = teacher_job.model.cpu().eval()
    inputs = {
        "x": torch.rand(4, 48),
        "edge_index": torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]),
        "edge_attr": torch.rand(2, 6).repeat_interleave(2, dim=0),
        "batch": torch.tensor([0, 0, 1, 1]),
        "ecfp": torch.zeros(2, 4096),
        "mol_weight": torch.tensor([50.0, 80.0]),
    }
    past = torch.full((2, 6), 4)
    more = inputs | {
        "edge_index": torch.cat([inputs["edge_index"], past], dim=1),
        "edge_attr": torch.cat([inputs["edge_attr"], torch.ones(6, 6)]),
    }
    assert torch.equal(model(more)["spectrum"], model(inputs)["spectrum"])


def test_dropped_bonds_are_silent_both_ways_and_only_in_training():
    torch.manual_seed(3)
    options = TeacherOptions(**GRAPH, width=16, num_blocks=1, drop_edge=0.5)
    model = Teacher(10, 0, options)
    kept = model._draw_edges(400, torch.zeros(1))
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(kept[0::2], kept[1::2])
    assert 0.35 < kept.mean() < 0.65
    assert model.eval()._draw_edges(400, torch.zeros(1)) is None


# -- cosine and loss -----------------------------------------------------------------------------


def cosine_by_hand(first, second, power=1.0):
    weights = np.arange(1, len(first) + 1, dtype=np.float64) ** power
    a, b = first * weights, second * weights
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / norms) if norms else 0.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_weighted_cosine_is_the_formula(device, power):
    rng = np.random.default_rng(4)
    first, second = rng.random((2, 6, 40)) * (rng.random((2, 6, 40)) < 0.3)
    first[2] = 0
    got = weighted_cosine(
        torch.tensor(first, dtype=torch.float32, device=device),
        torch.tensor(second, dtype=torch.float32, device=device),
        power,
    )
    want = [cosine_by_hand(a, b, power) for a, b in zip(first, second, strict=True)]
    assert_allclose(got.cpu(), want, atol=1e-5)
    assert got[2] == 0


def test_measured_spectra_are_roots_of_length_one(store, student_job):
    batch = next(iter(batches(store, student_job)))
    _, targets = student_job.unpack(batch)
    sample = int(batch.sample_ids[3])
    mz, offsets = store.read_ragged("mz", sample, sample + 1)
    intensity, _ = store.read_ragged("intensity", sample, sample + 1)
    binned = bin_spectrum(mz.astype("f8"), intensity.astype("f4"), offsets, 200).spectra[0]
    roots = np.sqrt(binned)
    assert_allclose(targets["spectrum"][3], roots / np.linalg.norm(roots), atol=1e-6)
    assert targets["spectrum"].shape == (16, 201)


def test_losses_are_means_over_samples():
    torch.manual_seed(5)
    outputs = {"spectrum": torch.rand(6, 30)}
    targets = {"spectrum": torch.rand(6, 30), "teacher": torch.rand(6, 30)}
    for loss in (cosine_loss, DistillationLoss((0.3, 0.5, 0.2), 3.0)):
        rows = [
            loss(
                {"spectrum": outputs["spectrum"][row : row + 1]},
                {name: value[row : row + 1] for name, value in targets.items()},
            )
            for row in range(6)
        ]
        assert_allclose(loss(outputs, targets), torch.stack(rows).mean(), atol=1e-6)


# -- distillation --------------------------------------------------------------------------------


def soften_by_hand(row, temperature):
    scaled = row / np.linalg.norm(row)
    return (scaled + 1e-3) ** (1 / temperature) - 1e-3 ** (1 / temperature)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 2.5, 4.0])
def test_the_distillation_loss_is_its_three_terms(device, temperature):
    rng = np.random.default_rng(6)
    student, teacher, measured = rng.random((3, 4, 25)) * (rng.random((3, 4, 25)) < 0.5)
    terms = [
        0.3 * (1 - cosine_by_hand(student[row], measured[row]))
        + 0.5
        * (
            1
            - cosine_by_hand(
                soften_by_hand(student[row], temperature), soften_by_hand(teacher[row], temperature)
            )
        )
        + 0.2 * (1 - cosine_by_hand(student[row], teacher[row], 0.0))
        for row in range(4)
    ]
    loss = DistillationLoss((0.3, 0.5, 0.2), 4.0)
    loss.set_temperature(temperature)

    def tensor(values):
        return torch.tensor(values, dtype=torch.float32, device=device)

    targets = {"spectrum": tensor(measured), "teacher": tensor(teacher)}
    assert_allclose(loss({"spectrum": tensor(student)}, targets).cpu(), np.mean(terms), atol=1e-5)
    # It is on the device now, and a new temperature must still reach it.
    loss.set_temperature(1.5)
    assert loss.temperature == pytest.approx(1.5)


def test_softening_keeps_zero_and_has_a_finite_slope():
    spectra = torch.zeros(2, 9)
    spectra[0, 3], spectra[0, 5] = 4.0, 0.04
    spectra.requires_grad_()
    for temperature in (1.0, 4.0):
        soft = soften(spectra, torch.tensor(temperature))
        assert not soft[1].any()
        assert not soft[0, [0, 1, 2, 4]].any()
        (slope,) = torch.autograd.grad(soft.sum(), spectra)
        assert torch.isfinite(slope).all()
    cold, hot = (soften(spectra, torch.tensor(t))[0].detach() for t in (1.0, 4.0))
    assert_allclose(cold, spectra[0].detach() / spectra[0].detach().norm(), atol=1e-6)
    assert hot[5] / hot[3] > 10 * cold[5] / cold[3]  # small peaks are raised


def test_the_temperature_falls_from_four_to_one_with_the_updates(store, teacher_job):
    job = MassSpecRecipe().make_job(store, SMALL | {"teacher": teacher_job.model}, 0)
    assert "temperature 4 to 1" in job.notes[-1]
    optimizer = job.make_optimizer(job.model.parameters(), 1e-3)
    schedule = job.make_schedule(optimizer, 11)
    seen = []
    for _ in range(11):
        seen.append(job.criterion.temperature)
        optimizer.step()
        schedule.step()
    assert_allclose(seen, np.linspace(4, 1, 11), atol=1e-6)
    assert job.criterion.temperature == 1.0  # past the end it stays
    state = None
    schedule = job.make_schedule(optimizer, 11)
    assert job.criterion.temperature == 4.0
    for _ in range(4):
        schedule.step()
    state, rate = schedule.state_dict(), schedule.get_last_lr()
    resumed = job.make_schedule(job.make_optimizer(job.model.parameters(), 1e-3), 11)
    assert job.criterion.temperature == 4.0
    resumed.load_state_dict(state)
    assert job.criterion.temperature == pytest.approx(temperature_at(4, 11, 4, 1))
    assert resumed.get_last_lr() == rate


def test_a_distilled_student_is_the_same_module(store, teacher_job):
    alone = MassSpecRecipe().make_job(store, SMALL, 7)
    distilled = MassSpecRecipe().make_job(store, SMALL | {"teacher": teacher_job.model}, 7)
    assert alone.model.state_dict().keys() == distilled.model.state_dict().keys()
    for name, value in alone.model.state_dict().items():
        assert torch.equal(value, distilled.model.state_dict()[name])
    inputs, targets = distilled.unpack(next(iter(batches(store, distilled))))
    assert set(inputs) == {"ecfp", "mol_weight"}
    assert targets["teacher"].shape == targets["spectrum"].shape
    assert not targets["teacher"].requires_grad
    assert teacher_job.model.layers[
        0
    ].own.requires_grad  # the caller's own teacher is left as it was


# -- ranking -------------------------------------------------------------------------------------


def rank_by_hand(library, predicted, measured, groups, masses, tolerance):
    """NEIMS's rule in loops: one entry per compound, ties against the prediction."""
    entries = [
        (int(group), float(mass), units)
        for group, mass, units in zip(library.groups, library.masses, library.units, strict=True)
    ]
    for row, group in enumerate(groups):
        if int(group) not in [entry[0] for entry in entries]:
            entries.append((int(group), float(masses[row]), predicted[row]))
    ranks = []
    for row, group in enumerate(groups):
        own = next(float(measured[row] @ units) for g, _, units in entries if g == int(group))
        better = sum(
            float(measured[row] @ units) >= own - 1e-6
            for g, mass, units in entries
            if g != int(group)
            and (tolerance is None or abs(mass - float(masses[row])) <= tolerance)
        )
        ranks.append(1 + better)
    return ranks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tolerance", [None, 5.0])
@given(seed=st.integers(0, 200), num=st.integers(1, 12), size=st.integers(0, 9))
def test_ranks_equal_a_search_by_hand(device, tolerance, seed, num, size):
    rng = np.random.default_rng(seed)

    def spectra(count):
        drawn = rng.random((count, 5)) * (rng.random((count, 5)) < 0.6)
        return weighted_units(torch.tensor(drawn.reshape(count, 5), dtype=torch.float32))

    library = Library(
        spectra(size), torch.arange(size), torch.tensor(rng.integers(50, 70, size)).float()
    )
    predicted, measured = spectra(num), spectra(num)
    predicted[num // 2] = predicted[0]  # a tie
    groups = torch.tensor(rng.integers(100, 106, num))
    masses = torch.tensor(rng.integers(50, 70, num)).float()
    want = rank_by_hand(library, predicted, measured, groups, masses, tolerance)
    moved = [value.to(device) for value in (predicted, measured, groups, masses)]
    old = spectra_metrics._BLOCK_QUERIES, spectra_metrics._BLOCK_LIBRARY
    try:
        for block in (old, (3, 2)):  # blocks change nothing
            spectra_metrics._BLOCK_QUERIES, spectra_metrics._BLOCK_LIBRARY = block
            assert rank_queries(library, *moved, tolerance).tolist() == want
    finally:
        spectra_metrics._BLOCK_QUERIES, spectra_metrics._BLOCK_LIBRARY = old


def test_metrics_do_not_depend_on_how_batches_are_cut():
    rng = np.random.default_rng(8)
    library = Library(weighted_units(torch.rand(5, 20)), torch.arange(5), torch.full((5,), 60.0))
    outputs = {"spectrum": torch.rand(9, 20)}
    targets = {
        "spectrum": torch.rand(9, 20),
        "mol_weight": torch.tensor(rng.uniform(50, 70, 9), dtype=torch.float32),
        "group": torch.tensor(rng.integers(90, 95, 9)),
    }
    whole, parts = (SpectrumMetrics(library, Ranking((1, 3))) for _ in range(2))
    whole.update(outputs, targets)
    for rows in (slice(0, 4), slice(4, 5), slice(5, 9)):
        parts.update(
            {"spectrum": outputs["spectrum"][rows]},
            {name: value[rows].clone() for name, value in targets.items()},
        )
    assert parts.compute() == pytest.approx(whole.compute(), abs=1e-6)
    want = np.mean(
        [
            cosine_by_hand(a.numpy(), b.numpy())
            for a, b in zip(outputs["spectrum"], targets["spectrum"], strict=True)
        ]
    )
    assert whole.compute()["weighted_cosine"] == pytest.approx(want, abs=1e-5)
    assert set(whole.compute()) == {
        "weighted_cosine", "recall@1", "recall@3", "recall@1_within_5da", "recall@3_within_5da",
    }  # fmt: skip
    assert SpectrumMetrics(library, Ranking()).compute() == {}


def test_perfect_predictions_are_found_and_one_for_all_is_not():
    units = weighted_units(torch.eye(30)[:20] + 0.01)
    empty = Library(torch.empty(0, 30), torch.empty(0, dtype=torch.int64), torch.empty(0))
    groups, masses = torch.arange(20), torch.full((20,), 100.0)
    assert rank_queries(empty, units, units, groups, masses).tolist() == [1] * 20
    same = units[:1].expand(20, -1).contiguous()
    assert rank_queries(empty, same, units, groups, masses).tolist() == [20] * 20


def test_the_library_has_each_training_compound_once(store, student_job):
    train = student_job.samples["train"]
    library, mean = make_library(store, train, 200, "nearest", 1.0)
    groups = store.read_rows("group", 0, store.num_samples)
    assert sorted(library.groups.tolist()) == sorted(set(groups[train].tolist()))
    _, targets = student_job.unpack(next(iter(batches(store, student_job, len(train)))))
    assert_allclose(mean, targets["spectrum"].mean(dim=0), atol=1e-6)
    for entry in (0, 7, len(library.groups) - 1):
        first = int(train[groups[train] == int(library.groups[entry])][0])
        row = int(np.flatnonzero(train == first)[0])
        assert_allclose(library.units[entry], weighted_units(targets["spectrum"])[row], atol=1e-6)
        assert library.masses[entry] == targets["mol_weight"][row]


def test_the_baseline_is_the_mean_spectrum_and_a_random_rank(store, student_job):
    samples = student_job.samples
    groups = store.read_rows("group", 0, store.num_samples)
    masses = store.read_rows("mol_weight", 0, store.num_samples)
    _, mean = make_library(store, samples["train"], 200, "nearest", 1.0)
    held_out = replace(student_job, samples={"train": samples["val"]})
    _, targets = student_job.unpack(next(iter(batches(store, held_out, len(samples["val"])))))
    cosines = [cosine_by_hand(row.numpy(), mean.numpy()) for row in targets["spectrum"]]
    baseline = student_job.baseline
    assert baseline["weighted_cosine"] == pytest.approx(np.mean(cosines), abs=1e-5)
    compounds = {}
    for sample in (*samples["train"], *samples["val"]):
        compounds.setdefault(int(groups[sample]), float(masses[sample]))
    assert baseline["recall@10"] == pytest.approx(10 / len(compounds))
    near = [
        min(1, 10 / sum(abs(mass - masses[sample]) <= 5 for mass in compounds.values()))
        for sample in samples["val"]
    ]
    assert baseline["recall@10_within_5da"] == pytest.approx(np.mean(near))


# -- splits --------------------------------------------------------------------------------------


def test_splits_never_share_a_compound(store, student_job):
    groups = store.read_rows("group", 0, store.num_samples)
    sides = [set(groups[ids].tolist()) for ids in student_job.samples.values()]
    assert all(len(side) for side in sides)
    assert not sides[0] & sides[1] | sides[0] & sides[2] | sides[1] & sides[2]
    assert sum(map(len, student_job.samples.values())) == store.num_samples
    assert (student_job.samples["val"] == select_samples(store, "val")).all()


def write_spectra(folder, groups, split=None):
    count = len(groups)
    ones = np.arange(count + 1)
    words = {"atoms": "u4", "bonds": "u4", "ecfp_bits": "u2", "ecfp_counts": "u1", "mz": "f4"}
    fields = {name: Ragged(np.ones(count, dtype), ones) for name, dtype in words.items()}
    fields["intensity"] = Ragged(np.ones(count, "f2"), ones)
    fields["mol_weight"] = Dense(np.full(count, 50, "f4"))
    fields["group"] = Dense(np.asarray(groups, "i8"))
    if split is not None:
        fields["split"] = Dense(np.asarray(split, "u1"))
    return write_store(folder, [fields])


def test_a_store_that_leaks_is_refused(tmp_path):
    leaking = write_spectra(tmp_path / "a", [1, 1, 2, 3], [0, 1, 1, 2])
    with pytest.raises(InputError, match="compound 1 is in train and in val"):
        MassSpecRecipe().make_job(leaking, SMALL, 0)
    check_apart(np.array([1, 1, 2]), {"train": np.array([0, 1]), "val": np.array([2])})


def test_a_store_without_a_split_is_divided_by_compound(tmp_path):
    groups = np.repeat(np.arange(60), 3)
    plain = write_spectra(tmp_path / "a", groups)
    samples, note = split_compounds(plain, (0.6, 0.2, 0.2), 1)
    sides = [set(groups[ids].tolist()) for ids in samples.values()]
    assert sum(map(len, sides)) == 60  # no compound twice
    assert min(map(len, sides)) > 0
    assert "by compound, seed 1" in note
    other, _ = split_compounds(plain, (0.6, 0.2, 0.2), 2)
    assert other["train"].tolist() != samples["train"].tolist()


# -- the job -------------------------------------------------------------------------------------


def test_the_job_follows_the_store_and_the_seed(store, student_job):
    assert student_job.model.num_bins == 201  # the store's max_mz
    assert student_job.monitor == ("weighted_cosine", True)
    wider = MassSpecRecipe().make_job(store, SMALL | {"max_mz": 99}, 0)
    assert wider.model.num_bins == 100
    same, other = (MassSpecRecipe().make_job(store, SMALL, seed).model for seed in (0, 1))
    first = student_job.model.head.bins.weight
    assert not torch.equal(other.head.bins.weight, first)
    assert torch.equal(
        same.head.bins.weight, MassSpecRecipe().make_job(store, SMALL, 0).model.head.bins.weight
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"widht": 3}, "no option 'widht'"),
        ({"width": "8e2"}, "'width'"),
        ({"width": 0}, "1 or more"),
        ({"dropout": 1.0}, "below 1"),
        ({"temperature_end": 0.5}, "'temperature_end' is 0.5"),
        ({"distill_weights": [0, 0, 0]}, "not all 0"),
        ({"recall_at": []}, "'recall_at'"),
        ({"teacher": 5}, "'teacher' is 'int'"),
        ({"teacher": Teacher(5, 0, TeacherOptions(graph_width=4, width=4))}, "a model of 5 bins"),
    ],
)
def test_options_that_make_no_sense_are_refused(store, options, words):
    with pytest.raises(InputError, match=words):
        MassSpecRecipe().make_job(store, options, 0)


def test_another_kind_of_store_is_refused(tmp_path):
    images = write_store(tmp_path / "a", [{"images": Dense(np.zeros((2, 3, 4, 4), "u1"))}])
    with pytest.raises(InputError, match="no field mz, intensity") as caught:
        MassSpecTeacherRecipe().make_job(images, {}, 0)
    assert "stoker pack massspec" in caught.value.fix


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_waits_for_the_device(store, teacher_job, device):
    job = MassSpecRecipe().make_job(store, SMALL | {"teacher": teacher_job.model}, 0)
    loader = batches(store, job, 8, device)
    index = next(iter(loader.index_batches()))
    batch, model, metrics = loader.assemble(index.indices), job.model.to(device), job.metrics()
    job.criterion(model(job.unpack(batch)[0]), job.unpack(batch)[1])  # the first call moves things
    with NoWaiting():
        inputs, targets = job.unpack(batch)
        outputs = model(inputs)
        job.criterion(outputs, targets).backward()
        metrics.update(outputs, targets)
    with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
        metrics.compute()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # a CPU without bf16
@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_changes_predictions_a_little(store, teacher_job, device):
    model = teacher_job.model.to(device).eval()
    inputs, targets = teacher_job.unpack(next(iter(batches(store, teacher_job, 8, device))))
    exact = model(inputs)["spectrum"]
    with torch.autocast(device, torch.bfloat16):
        rough = model(inputs)["spectrum"]
    assert rough.dtype == torch.bfloat16
    assert weighted_cosine(rough, exact).min() > 0.99
    teacher_job.criterion({"spectrum": rough.float()}, targets).backward()
    assert torch.isfinite(model.layers[0].own.grad)


@pytest.mark.gpu
def test_the_padded_step_can_be_captured(store, teacher_job):
    job = MassSpecTeacherRecipe().make_job(
        store, SMALL | GRAPH | {"drop_edge": 0.0, "dropout": 0.0}, 0
    )
    model = job.model.cuda()
    loader = batches(store, job, 8, "cuda")
    indices = [
        index.indices.clone() for index, _ in zip(loader.index_batches(), range(3), strict=False)
    ]

    def loss_of(static):
        inputs, targets = job.unpack(loader.assemble(static))
        return job.criterion(model(inputs), targets)

    static = indices[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss_of(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = loss_of(static)
    for one in indices:
        static.copy_(one)
        graph.replay()
        assert_allclose(captured.item(), loss_of(one).item(), rtol=1e-4)


# -- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_student_teacher_and_distilled_student_learn(store, device):
    """Compounds of validation were never seen; chance is the mean spectrum and a random rank."""
    torch.manual_seed(0)
    student = MassSpecRecipe().make_job(store, SMALL, 0)
    chance = student.baseline
    _, losses, metrics = train_job(student, store, epochs=5, batch_size=32, lr=3e-3, device=device)
    assert losses[-1] < 0.5 * losses[0]
    assert metrics["weighted_cosine"] > chance["weighted_cosine"] + 0.4
    assert metrics["recall@10"] > 10 * chance["recall@10"]
    teacher = MassSpecTeacherRecipe().make_job(store, SMALL | GRAPH, 0)
    trained, _, taught = train_job(teacher, store, epochs=5, batch_size=32, lr=3e-3, device=device)
    assert taught["weighted_cosine"] > chance["weighted_cosine"] + 0.4
    pupil = MassSpecRecipe().make_job(store, SMALL | {"teacher": trained}, 0)
    _, _, learned = train_job(pupil, store, epochs=5, batch_size=32, lr=3e-3, device=device)
    assert learned["weighted_cosine"] > chance["weighted_cosine"] + 0.4
    assert learned["recall@10"] > 10 * chance["recall@10"]
    assert math.isfinite(judge_job(pupil, store, pupil.model, 16, device, "test")["recall@1"])


@pytest.mark.slow  # real data, where it is there; what is made is learned above
def test_it_learns_massbank(shared_data, tmp_path):
    """1,000 real spectra, a small student, seconds."""
    folder = shared_data / "massspec"
    pack(
        MassSpecSource(
            folder / "massbank_ei.msp.gz", folder / "massbank_ei_mol.zip", max_samples=1000
        ),
        tmp_path / "s",
        PackOptions(jobs=1, on_bad="quarantine", bad_budget="100%"),
    )
    with open_store(tmp_path / "s") as real:
        job = MassSpecRecipe().make_job(real, {"width": 128, "num_blocks": 1}, 0)
        _, _, metrics = train_job(job, real, epochs=4, batch_size=50, lr=2e-3)
        assert metrics["weighted_cosine"] > job.baseline["weighted_cosine"] + 0.15
        assert metrics["recall@10"] > 10 * job.baseline["recall@10"]


# ----------------------------------------------------------------------------------------- one command


def test_from_a_library_and_its_molecules_to_metrics_in_one_command(tmp_path, monkeypatch, capsys):
    """S1's train_student: `stoker train` packs first when it is given the library."""
    monkeypatch.chdir(tmp_path)
    chains = tuple("C" * length + tail for length in range(2, 10) for tail in TAILS)
    msp, mols = write_library(tmp_path, chains)
    Path("c.yaml").write_text(
        "recipe: {name: massspec, store: store, options: {width: 32}}\n"
        "training: {epochs: 1, batch_size: 16}\n"
    )
    words = ["train", "--config", "c.yaml", "--device", "cpu", "--msp", str(msp), "--mol-dir"]
    app([*words, str(mols), "--run-dir", "first", "--json"], standalone_mode=False)
    facts = json.loads(capsys.readouterr().out)
    assert facts["ended"] == "done"
    assert 0 <= facts["test"]["recall@10"] <= 1
    assert len(open_store("store")) == len(chains)
    app([*words, str(mols), "--run-dir", "second"], standalone_mode=False)
    assert "store is up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("tabular", ["--msp", "x.msp"], "the recipe is tabular"),
        ("massspec", ["--mol-dir", "mols"], "there is no --msp"),
    ],
)
def test_a_library_for_another_recipe_or_molecules_alone_are_refused(tmp_path, name, words, said):
    (tmp_path / "c.yaml").write_text(f"recipe: {{name: {name}, store: store}}\n")
    with pytest.raises(InputError, match=said):
        app(["train", "--config", str(tmp_path / "c.yaml"), *words], standalone_mode=False)
