"""What `stoker bench memory` projects from 1,000 samples, against 100,000 that are really there."""

from __future__ import annotations

from pathlib import Path

import pytest

from molecule_makers import write_library
from stoker.compat.massspec_memory import bench_memory, measure_dataset, measure_training
from stoker.packing import PackOptions, pack
from stoker.sources.massspec import MassSpecSource
from test_compat_massspec_memory import USUAL

NUM_SAMPLES = 100_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_estimates_are_within_a_tenth_of_a_hundred_thousand_samples(tmp_path):
    msp, mols = write_library(tmp_path, USUAL)
    record = msp.read_text()
    many = tmp_path / "many.msp"
    many.write_text(record * -(-NUM_SAMPLES // len(USUAL)))
    report = bench_memory(many, mols)
    _check(report, MassSpecSource(many, mols, max_samples=NUM_SAMPLES), tmp_path / "store")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_estimates_are_within_a_tenth_of_real_spectra_replicated(tmp_path, shared_data):
    import gzip

    real = shared_data / "massspec" / "massbank_ei.msp.gz"
    mols = shared_data / "massspec" / "massbank_ei_mol.zip"
    many = tmp_path / "many.msp"
    with gzip.open(real, "rb") as file:
        many.write_bytes((file.read() + b"\n") * 8)
    report = bench_memory(real, mols)
    _check(report, MassSpecSource(many, mols, max_samples=NUM_SAMPLES), tmp_path / "store")


def _check(report, source: MassSpecSource, store: Path) -> None:
    pack(source, store, PackOptions(on_bad="quarantine", bad_budget="100%"))
    for kind in ("lazy", "precomputed"):
        projected = next(
            found
            for found in report.projections
            if (found.num_samples, found.kind) == (NUM_SAMPLES, kind)
        )
        dataset = measure_dataset(str(store), kind)
        training = measure_training(str(store), kind)
        print(
            kind,
            projected.dataset_bytes / dataset.used_bytes,
            projected.total_bytes / training.peak_bytes,
        )
        assert dataset.num_samples == NUM_SAMPLES
        assert projected.dataset_bytes == pytest.approx(dataset.used_bytes, rel=0.1)
        assert projected.total_bytes == pytest.approx(training.peak_bytes, rel=0.1)
