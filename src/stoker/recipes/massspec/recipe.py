"""The massspec recipes: predict the mass spectrum of a molecule, after NEIMS (electron ionisation).

Enters: a store of `stoker pack massspec`. Leaves: a `Job`: "massspec" trains the fingerprint student,
alone or with a trained teacher; "massspec-teacher" trains the GINE teacher. Costs: one read of the
training and validation spectra (some seconds for 300,000), and in memory 4 * bins bytes per training
compound: the library that predictions are searched in (0.5 GB for NIST17).

Spectra are binned, fingerprints expanded and graphs joined on the device, from the packed fields. With
exact batches (iterating a Loader) the number of peaks, atoms and bonds differs from batch to batch. For
a CUDA graph, `Loader.assemble(indices)` without totals pads them to the maximum of a batch; the offsets
tell the padding apart, and everything here ignores it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.config import Settings
from stoker.config.options import DISTILL
from stoker.errors import ConfigError, InputError
from stoker.loader.ragged import bin_spectra, expand_fingerprint
from stoker.loader.splits import split_by_group
from stoker.recipes.contract import (
    BATCH,
    Columns,
    Default,
    Facts,
    Job,
    Judge,
    Layout,
    Port,
    RawReader,
    Rebuilt,
    Recipe,
    Tensors,
)
from stoker.recipes.gate import complete_parts, drawn_parts, fill_parts, own_parts
from stoker.recipes.inference import load_trained
from stoker.recipes.massspec.evaluation import FinalSpectrumMetrics, SpectrumJudge
from stoker.recipes.massspec.metrics import (
    Ranking,
    SpectrumMetrics,
    chance_metrics,
    make_library,
    read_root_spectra,
    root_spectra,
)
from stoker.recipes.massspec.models import (
    DistillationLoss,
    RateAndTemperature,
    Student,
    Teacher,
    cosine_loss,
    graph_inputs,
    temperature_at,
)
from stoker.recipes.massspec.molecules import MoleculeReader, write_spectra
from stoker.recipes.massspec.options import MassSpecOptions, StudentOptions, TeacherOptions
from stoker.recipes.options import parse_options, require
from stoker.recipes.schedule import warmup_cosine
from stoker.sources.massspec import MassSpecSource
from stoker.sources.massspec.conditions import CONDITION_COLUMNS
from stoker.sources.molecules.packed import ECFP_SIZE, NUM_ATOM_FEATURES, NUM_BOND_FEATURES
from stoker.sources.msp import Rounding
from stoker.store.fields import Array
from stoker.store.reader import Store
from stoker.train.predict import Predicted

LEARNING_RATE = 1e-3
"""Learning rate of Adam, for 100 samples per update (NEIMS)."""

_MOLECULE_FIELDS = ("ecfp_bits", "ecfp_counts", "mol_weight")
_SPECTRUM_FIELDS = ("mz", "intensity", *_MOLECULE_FIELDS, "group")
_GRAPH_FIELDS = ("atoms", "bonds")
_SPECTRA_AT_ONCE = 65_536


class _SpectrumRecipe(Recipe):
    """Base of both recipes: the store, the learning rate, and predictions."""

    pack_command = "stoker pack massspec --msp LIBRARY.msp --mol-dir MOLS OUT"
    raw_kinds = "molecules as SMILES, SDF, MOL, CSV, Parquet, MSP, MGF or MassBank records"
    endings = (".msp",)
    label_fields = ("formula", "adduct", "ion_mode", "collision_energy")
    defaults = (
        Default("training.lr", LEARNING_RATE, "Adam, as NEIMS trains"),
        Default("training.epochs", 30, "as in the config that ships"),
        Default("training.batch_size", 100, "NEIMS"),
        Default("training.patience", 10, "epochs without a higher cosine; the best weights count"),
    )

    def make_source(self, **paths: Any) -> MassSpecSource:
        """Return the spectrum library `msp`, with the structures of `mol_dir`."""
        msp, mol_dir = paths.get("msp"), paths.get("mol_dir")
        if msp is None:
            raise InputError(
                f"--mol-dir is {mol_dir}, and there is no --msp.", "both", "--msp LIBRARY.msp"
            )
        return MassSpecSource(Path(msp), mol_dir)

    def describe(self, job: Job) -> dict[str, Any]:
        """Return the packed inputs, the number of bins, and how spectra are measured."""
        return dict(job.facts)

    def rebuild(self, options: MassSpecOptions, facts: Facts) -> Rebuilt:
        """Return the network, and the functions that read molecules and predict."""

        def predict(model: Any, inputs: Any) -> Columns:
            return dict(model(inputs))

        unpack = partial(read_molecules, graphs=isinstance(options, TeacherOptions))
        return Rebuilt(build_network(facts, options), facts["inputs"], unpack, predict)

    def read_truth(
        self, store: Store, samples: Array, made: Rebuilt, options: MassSpecOptions, facts: Facts
    ) -> Array | None:
        """Return the measured spectra of a store's samples."""
        if "mz" not in store.fields or "intensity" not in store.fields:
            return None
        rounding = store.manifest.attributes.get("rounding", "nearest")
        parts = read_root_spectra(store, samples, facts["num_bins"] - 1, rounding)
        return torch.cat([spectra for _, spectra in parts]).numpy()

    def make_judge(self, options: MassSpecOptions, facts: Facts) -> Judge:
        return SpectrumJudge(options.mass_power)

    def export_layout(self, made: Rebuilt, facts: Facts) -> Layout:
        """Return inputs for fingerprints, masses and graphs, as `read_molecules` makes them."""
        ports = [
            Port(
                "ecfp",
                (BATCH, ECFP_SIZE),
                torch.float32,
                f"counts of the {ECFP_SIZE} ECFP4 bits",
                below=3,
                name="fingerprint_counts",
            ),
            Port(
                "mol_weight",
                (BATCH,),
                torch.float32,
                "mass of the molecule in Da",
                below=facts["num_bins"],
            ),
        ]
        if usual := facts.get("usual_conditions"):
            about = f"how the spectrum is measured: {', '.join(CONDITION_COLUMNS)}"
            ports.append(Port("conditions", (BATCH, len(usual)), torch.float32, about, below=1))
        if "atoms" in facts["inputs"]:
            ports += _GRAPH_PORTS
        return Layout(ports, dict, made.predict)

    def open_raw(
        self, given: Any, made: Rebuilt, facts: Facts, told: Mapping[str, Any]
    ) -> RawReader | None:
        """Open molecules: SMILES, SDF, MOL, CSV, spectrum libraries, folders of them, or a frame."""
        return MoleculeReader.open(given, facts, int(told.get("batch_size", 256)))

    def write_answers(
        self, out: Path, answers: Iterable[Predicted], made: Rebuilt, facts: Facts
    ) -> int:
        """Write predicted spectra as an MSP library."""
        return write_spectra(out, answers, f"predicted by stoker, recipe {self.name}")


_ATOMS, _EDGES = "atoms", "edges"
_GRAPH_PORTS = (
    Port(
        "x",
        (_ATOMS, NUM_ATOM_FEATURES),
        torch.float32,
        "features of all atoms of the batch",
        below=2,
        name="atom_features",
    ),
    Port(
        "edge_index",
        (2, _EDGES),
        torch.int64,
        "from and to: numbers of atoms over the batch; every bond twice, there and back",
        below=_ATOMS,
        name="bond_atoms",
    ),
    Port(
        "edge_attr",
        (_EDGES, NUM_BOND_FEATURES),
        torch.float32,
        "features of bonds, in the order of bond_atoms",
        below=2,
        name="bond_features",
    ),
    Port(
        "batch",
        (_ATOMS,),
        torch.int64,
        "molecule of each atom, from 0",
        below=BATCH,
        name="atom_molecule",
    ),
)


class MassSpecRecipe(_SpectrumRecipe):
    """Builds student jobs.

    In the options mapping of `make_job`, `teacher` may also be a trained `Teacher` instead of a path, or any
    module with the same inputs and outputs.
    """

    name = "massspec"
    Options = StudentOptions
    files = ("teacher",)

    def note_settings(self, settings: Settings, options: StudentOptions) -> list[str]:
        """Raise if the config has keys of the distillation stage but no teacher."""
        keys = ("training.batch_size", "training.gradient_accumulation_steps")
        origins = [settings.origins[key] for key in keys]
        stage = [str(origin) for origin in origins if origin.key.startswith(f"{DISTILL}.")]
        if stage and options.teacher is None:
            raise ConfigError(
                f"{'; '.join(stage)}: a distillation, and no teacher is named.",
                "recipe.options.teacher, the checkpoint of a run of massspec-teacher; or training.batch_size and "
                "training.gradient_accumulation_steps for a training without one",
                "--set recipe.options.teacher=runs/massspec-teacher/best.pt",
            )
        return []

    def make_job(self, store: Store, options: StudentOptions | Mapping[str, Any], seed: int) -> Job:
        """Build the job; see `Recipe`."""
        teacher = None
        if isinstance(options, Mapping) and not isinstance(options.get("teacher"), str | None):
            teacher = options["teacher"]
            options = {name: value for name, value in options.items() if name != "teacher"}
        chosen = parse_options(StudentOptions, options, self.name)
        if chosen.teacher is not None:
            teacher = load_trained(chosen.teacher, MassSpecTeacherRecipe.name).model
        job = _make_job(store, chosen, seed)
        return job if teacher is None else _distil(job, teacher, chosen)


class MassSpecTeacherRecipe(_SpectrumRecipe):
    """Builds teacher jobs."""

    name = "massspec-teacher"
    Options = TeacherOptions

    def make_job(self, store: Store, options: TeacherOptions | Mapping[str, Any], seed: int) -> Job:
        """Build the job; see `Recipe`."""
        return _make_job(store, parse_options(TeacherOptions, options, self.name), seed)


def build_network(facts: Facts, options: MassSpecOptions) -> Student | Teacher:
    """Return the student or the teacher with initial weights."""
    sizes = facts["num_bins"], len(facts.get("usual_conditions", ()))
    if isinstance(options, TeacherOptions):
        return Teacher(*sizes, options)
    return Student(*sizes, options)


def _make_job(store: Store, options: MassSpecOptions, seed: int) -> Job:
    """Return the job of a model that learns from measured spectra only."""
    graphs = isinstance(options, TeacherOptions)
    facts = find_facts(store, options.max_mz, graphs)
    num_bins, rounding = facts["num_bins"], facts["rounding"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_network(facts, options)
    samples, note = split_compounds(store, options.ratios, seed)
    samples, told = _with_spectra(store, samples)
    library, mean = make_library(
        store, samples["train"], num_bins - 1, rounding, options.mass_power
    )
    ranking = Ranking(options.recall_at, options.mass_tolerance, options.mass_power)
    return Job(
        model=model,
        criterion=partial(cosine_loss, mass_power=options.mass_power),
        unpack=partial(unpack_spectra, num_bins=num_bins, rounding=rounding, graphs=graphs),
        metrics=partial(SpectrumMetrics, library, ranking),
        final_metrics=partial(
            FinalSpectrumMetrics, store, samples["train"], library, mean, ranking, rounding
        ),
        baseline=chance_metrics(store, samples["val"], library, mean, ranking, rounding),
        samples=samples,
        make_optimizer=make_adam,
        make_schedule=partial(warmup_cosine, warmup_share=options.warmup_share),
        fields=list(dict.fromkeys([*_SPECTRUM_FIELDS, *facts["inputs"]])),
        monitor=("weighted_cosine", True),
        notes=(
            note,
            f"{num_bins} bins ({rounding}); square roots of intensities, each spectrum of length 1",
            f"recall@k: held-out spectra among {len(library.groups):,} measured training compounds and all predictions",
            *told,
            *_peaks_above(store, num_bins - 1, rounding),
        ),
        facts=facts,
    )


def _peaks_above(store: Store, max_mz: int, rounding: Rounding) -> list[str]:
    """Return a note on peaks above the last bin, if any; packing keeps them."""
    end = max_mz + (0.5 if rounding == "nearest" else 1.0)
    above = found = 0
    highest = 0.0
    for low in range(0, store.num_samples, _SPECTRA_AT_ONCE):
        mz, _ = store.read_ragged("mz", low, min(low + _SPECTRA_AT_ONCE, store.num_samples))
        above += int((mz >= end).sum())
        found += len(mz)
        highest = max(highest, float(mz.max(initial=0)))
    if not above:
        return []
    told = (
        f"{above:,} of {found:,} peaks lie above m/z {max_mz} and are neither learned nor counted"
    )
    return [f"{told}; --set recipe.options.max_mz={math.ceil(highest)} takes all"]


def _with_spectra(store: Store, samples: Mapping[str, Array]) -> tuple[dict[str, Array], list[str]]:
    """Return the split without samples that have no peak (packed for prediction), and notes on kinds of spectra."""
    lengths = np.concatenate([np.diff(shard.whole("mz/offsets")) for shard in store.shards])
    kept = {name: ids[lengths[ids] > 0] for name, ids in samples.items()}
    told = []
    if left := sum(map(len, samples.values())) - sum(map(len, kept.values())):
        told.append(f"{left:,} samples without a spectrum are left out")
    if not len(kept["train"]):
        raise InputError(
            f"{store.name} has no spectrum to train on.", "training samples with peaks", ""
        )
    kinds = store.manifest.attributes.get("spectrum_kinds") or {}
    others = [f"{count:,} {kind}" for kind, count in kinds.items() if kind != "EI"]
    if others:
        sees = (
            "the model sees kind, ion mode, energy and adduct beside the molecule"
            if "conditions" in store.fields
            else "the model sees the molecule, not adduct or energy; a store packed anew has them"
        )
        told.append(f"the store holds {', '.join(others)} spectra: {sees}")
    return kept, told


def _distil(job: Job, given: Any, options: StudentOptions) -> Job:
    """Return the student's job with a frozen copy of the teacher, which predicts in `unpack`."""
    require(
        isinstance(given, torch.nn.Module),
        "teacher",
        type(given).__name__,
        "a trained module of the recipe massspec-teacher, or none",
        "make_job(store, {'teacher': job.model}, seed)",
    )
    teacher = copy.deepcopy(given).eval().requires_grad_(False)
    num_bins: int = job.facts["num_bins"]
    other: int = getattr(teacher, "num_bins", num_bins)
    require(
        other == num_bins,
        "teacher",
        f"a model of {other} bins",
        f"{num_bins} bins, as the student has",
        f"max_mz={other - 1}",
    )
    loss = DistillationLoss(options.distill_weights, options.temperature_start, options.mass_power)
    start, end = options.temperature_start, options.temperature_end

    def make_schedule(optimizer: torch.optim.Optimizer, num_updates: int) -> RateAndTemperature:
        return RateAndTemperature(
            warmup_cosine(optimizer, num_updates, options.warmup_share),
            loss.set_temperature,
            lambda update: temperature_at(update, num_updates, start, end),
        )

    hard, soft, shape = options.distill_weights
    return replace(
        job,
        criterion=loss,
        unpack=partial(
            unpack_with_teacher,
            teacher=teacher,
            num_bins=num_bins,
            rounding=job.facts["rounding"],
        ),
        make_schedule=make_schedule,
        fields=[*(job.fields or ()), *_GRAPH_FIELDS],
        notes=(
            *job.notes,
            f"distilled: {hard:g} hard + {soft:g} soft + {shape:g} shape, temperature {start:g} to {end:g}",
        ),
    )


def make_adam(parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Adam:
    """Return Adam without decay, as NEIMS trains."""
    return torch.optim.Adam(parameters, lr=lr)


# -- batches -------------------------------------------------------------------------------------


def unpack_spectra(
    batch: Tensors, num_bins: int, rounding: Rounding, graphs: bool
) -> tuple[Columns, Columns]:
    """Return (inputs, targets) of a batch, exact or padded; device work only.

    Inputs are those of `read_molecules`. Targets are `spectrum (batch, bins)`, `mol_weight` and `group`.
    """
    spectra = bin_spectra(
        batch["mz"], batch["intensity"], batch["mz/offsets"], num_bins - 1, rounding
    )
    targets = {
        "spectrum": root_spectra(spectra),
        "mol_weight": batch["mol_weight"],
        "group": batch["group"],
    }
    return read_molecules(batch, graphs), targets


def read_molecules(batch: Tensors, graphs: bool) -> Columns:
    """Return `ecfp (batch, 4096)`, `mol_weight (batch,)` and, if asked for, one graph of all molecules."""
    counts = batch["ecfp_bits"], batch["ecfp_counts"], batch["ecfp_bits/offsets"]
    inputs = {"ecfp": expand_fingerprint(*counts), "mol_weight": batch["mol_weight"]}
    if "conditions" in batch:
        inputs["conditions"] = batch["conditions"]
    return inputs | graph_inputs(batch) if graphs else inputs


def unpack_with_teacher(
    batch: Tensors, teacher: torch.nn.Module, num_bins: int, rounding: Rounding
) -> tuple[Columns, Columns]:
    """Return (inputs, targets) with the teacher's prediction among the targets, in float32."""
    inputs, targets = unpack_spectra(batch, num_bins, rounding, graphs=True)
    device = inputs["ecfp"].device
    if next(teacher.parameters()).device != device:
        teacher.to(device)  # once, by the first batch
    with torch.no_grad():
        targets["teacher"] = teacher(inputs)["spectrum"].float()
    own = ("ecfp", "mol_weight", "conditions")
    return {name: inputs[name] for name in own if name in inputs}, targets


# -- from a store --------------------------------------------------------------------------------


def split_compounds(
    store: Store, ratios: tuple[float, float, float], seed: int
) -> tuple[dict[str, Array], str]:
    """Return the samples of each split, by compound, and a note.

    Args:
        store: Has the field `group`. Its field `split`, if any, decides.
        ratios: Expected shares of compounds, for a store without a split.
        seed: Seed for a store without a split, or with an empty val or test part.
    """
    groups = store.read_rows("group", 0, store.num_samples)
    samples: dict[str, Array]
    if "split" in store.fields:
        samples, made = complete_parts(own_parts(store), seed, groups)
        note = f"split: the store's own{made}"
    else:
        division = split_by_group(groups, ratios, seed)
        samples = drawn_parts(division)
        samples, filled = fill_parts(samples, ratios, seed, groups, "compounds")
        note = f"split: by compound, seed {seed}{filled}"
    check_apart(groups, samples)
    if not len(samples["train"]):
        raise InputError(
            f"{store.name} has no training samples.",
            "a split with a share for training",
            "stoker pack massspec --msp LIBRARY.msp OUT --split 0.8,0.1,0.1",
        )
    sizes = ", ".join(
        f"{name} {len(ids):,} spectra of {len(np.unique(groups[ids])):,} compounds"
        for name, ids in samples.items()
    )
    return samples, f"{note}; {sizes}"


def check_apart(groups: Array, samples: Mapping[str, Array]) -> None:
    """Raise if a compound is in two splits: the model would be tested on compounds that it has seen."""
    seen: dict[int, str] = {}
    for name, ids in samples.items():
        for group in np.unique(groups[ids]).tolist():
            if group in seen:
                raise InputError(
                    f"compound {group} is in {seen[group]} and in {name}.",
                    "each compound in one split, with all its replicates and stereoisomers",
                    "leave the field 'split' out, or make it with stoker.loader.splits.split_by_group",
                )
            seen[group] = name


def find_facts(store: Store, max_mz: int | None, graphs: bool) -> dict[str, Any]:
    """Return the inputs, bins and conditions of a model; see `Recipe.describe`."""
    missing = [name for name in (*_SPECTRUM_FIELDS, *_GRAPH_FIELDS) if name not in store.fields]
    if missing:
        raise InputError(
            f"{store.name} has no field {', '.join(missing)}.",
            "a store of mass spectra",
            "stoker pack massspec --msp library.msp --mol-dir mols OUT",
        )
    about = store.manifest.attributes
    usual: list[float] = []
    ranges: list[list[float]] = []
    if "conditions" in store.fields:
        rows = store.read_rows("conditions", 0, store.num_samples)
        known, counts = np.unique(rows, axis=0, return_counts=True)
        usual = known[counts.argmax()].tolist() if len(known) else [0.0] * rows.shape[1]
        if len(known):
            ranges = np.stack([known.min(0), known.max(0)], axis=1).tolist()
    read = [*_MOLECULE_FIELDS, *(_GRAPH_FIELDS if graphs else ()), *(["conditions"] * bool(usual))]
    return {
        "inputs": read,
        "num_bins": int(max_mz or about.get("max_mz", 500)) + 1,
        "rounding": about.get("rounding", "nearest"),
        # The most common conditions of the spectra, and the range of each; empty if the store has none.
        "usual_conditions": usual,
        "condition_ranges": ranges,
    }
