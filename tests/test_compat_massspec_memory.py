"""`stoker bench memory`: the documented lines, figures that are measured, and one rule for the status."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molecule_makers import SMILES, write_library
from stoker.cli.main import app
from stoker.compat.massspec import LazyMassSpecDataset
from stoker.compat.massspec_memory import (
    OK,
    RECOMMENDED,
    TIGHT,
    TOO_MUCH,
    DatasetUse,
    MemoryReport,
    TrainingUse,
    bench_memory,
    judge,
    measure_dataset,
    project_all,
    report_lines,
)
from stoker.errors import StokerError
from stoker.machine import forget_peak, peak_rss_bytes, rss_bytes
from stoker.store.reader import open_store
from stoker.units import GB, MB

# Without single atoms and the like, which the packer refuses.
USUAL = tuple(smiles for smiles in SMILES if len(smiles) > 3 and "." not in smiles)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> tuple[Path, Path]:
    return write_library(tmp_path_factory.mktemp("library"), USUAL)


@pytest.fixture(scope="module")
def report(library) -> MemoryReport:
    return bench_memory(*library, num_samples=24)


# -- the rule --------------------------------------------------------------------------------------


def test_the_status_is_one_rule_of_the_share_of_ram():
    shares = {
        0.01: RECOMMENDED,
        0.5: RECOMMENDED,
        0.51: OK,
        0.7: OK,
        0.71: TIGHT,
        1.0: TIGHT,
        1.01: TOO_MUCH,
    }
    assert {share: judge(share * 32 * GB, 32 * GB) for share in shares} == shares


@given(st.floats(1, 1e13), st.floats(1, 1e13), st.floats(1e6, 1e13))
def test_less_memory_never_has_a_worse_status(one, other, ram):
    order = [RECOMMENDED, OK, TIGHT, TOO_MUCH]
    ranks = [order.index(judge(total, ram)) for total in sorted((one, other))]
    assert ranks == sorted(ranks)


def test_what_the_rule_says_of_the_documents_totals():
    """S1-12: its 15.3 GB of 32 cannot be both below the source's threshold and "tight"; here it is not."""
    assert [judge(total * GB, 32 * GB) for total in (10.1, 11.8, 15.3)] == [RECOMMENDED] * 3
    assert judge(15.3 * GB, 24 * GB) == OK
    assert judge(15.3 * GB, 16 * GB) == TIGHT


# -- projecting ------------------------------------------------------------------------------------

USE = DatasetUse(
    num_samples=1000,
    num_shards=1,
    before_bytes=250 * MB,
    after_init_bytes=250 * MB + 370_000,
    after_access_bytes=252 * MB,
    num_accessed=100,
    resident_bytes=70_000,
    shard_bytes=20_000.0,
    loader_bytes=80_000,
)
TRAINING = TrainingUse(600 * MB, 8_900_000, 32, 25)


def test_a_dataset_grows_by_its_samples_and_shards():
    assert USE.used_bytes == 370_000
    assert USE.project(1000) == pytest.approx(370_000)
    # 70 bytes a sample, 20 shards of 5,000, and the 280,000 bytes of a first opening.
    assert USE.project(100_000) == pytest.approx(7_000_000 + 20 * 20_000 + 280_000)


def test_a_total_is_the_measured_training_and_what_more_samples_take():
    uses = {
        "lazy": USE,
        "precomputed": replace(USE, resident_bytes=200_000, after_init_bytes=250_500_000),
    }
    found = project_all(uses, TRAINING, 32 * GB)
    assert [(f.num_samples, f.kind) for f in found] == [
        (300_000, "lazy"), (300_000, "precomputed"), (100_000, "lazy"), (100_000, "precomputed"),
        (50_000, "lazy"), (50_000, "precomputed"),
    ]  # fmt: skip
    lazy = found[2]
    more = USE.project(100_000) - USE.project(1000) + 99_000 * 80
    assert lazy.total_bytes == pytest.approx(600 * MB + more)
    assert lazy.dataset_bytes == USE.project(100_000)
    assert found[3].total_bytes - lazy.total_bytes == pytest.approx(
        uses["precomputed"].project(100_000) - USE.project(100_000)
    )
    assert found[0].total_bytes > lazy.total_bytes


# -- measuring -------------------------------------------------------------------------------------


@pytest.mark.slow  # three processes, one of which trains: 17 s
def test_figures_are_those_of_the_dataset_itself(report, library, tmp_path):
    made = {
        kind: LazyMassSpecDataset(
            *library,
            cache_dir=tmp_path,
            max_samples=24,
            precompute_graphs=kind == "precomputed",
            jobs=1,
        )
        for kind in ("lazy", "precomputed")
    }
    for kind, dataset in made.items():
        use = report.uses[kind]
        assert use.num_samples == len(dataset)
        assert use.resident_bytes == dataset.resident_bytes
        assert use.num_shards == 1
        assert use.num_accessed == use.num_samples
    assert report.uses["precomputed"].resident_bytes > report.uses["lazy"].resident_bytes


@pytest.mark.slow
def test_memory_is_that_of_new_processes_that_really_ran(report):
    for use in report.uses.values():
        assert 50 * MB < use.before_bytes <= use.after_init_bytes <= use.after_access_bytes < 2 * GB
        assert 0 <= use.shard_bytes < MB
        assert 0 < use.loader_bytes < MB
    training = report.training
    weights = 4 * training.num_weights
    assert training.num_weights > 8e6
    assert training.num_steps >= 1
    # Weights, gradients and two moments, beside what the process holds without them.
    assert training.peak_bytes > report.uses["lazy"].before_bytes + 3 * weights
    assert training.peak_bytes < 4 * GB


def test_the_peak_of_a_process_is_seen_and_forgotten():
    forget_peak()
    before = peak_rss_bytes()
    held = bytearray(b"x") * (200 << 20)
    del held
    assert peak_rss_bytes() >= before + (190 << 20)
    forget_peak()
    assert peak_rss_bytes() < before + (100 << 20)
    assert rss_bytes() <= peak_rss_bytes() + MB


# -- the command -----------------------------------------------------------------------------------


def test_lines_are_as_documented():
    uses = {"lazy": USE, "precomputed": USE}
    report = MemoryReport(32 * GB, uses, TRAINING, tuple(project_all(uses, TRAINING, 32 * GB)))
    lines = report_lines(report, "all")
    assert [line for line in lines if line.startswith("=")] == ["=" * 60] * 8
    text = "\n".join(lines)
    count = report.uses["lazy"].num_samples
    for pattern in (
        r"^NEIMS v2.0 Memory Benchmark$",
        r"^System RAM: 32GB$",
        rf"^Lazy Dataset Benchmark \({count} samples\)$",
        rf"^Precomputed Dataset Benchmark \({count} samples\)$",
        r"^Memory before: \d+\.\d MB$",
        r"^Memory after init: \d+\.\d MB$",
        r"^Memory used by dataset: \d+\.\d MB$",
        rf"^Accessing {USE.num_accessed} random samples\.\.\.$",
        r"^Memory after accessing samples: \d+\.\d MB$",
        r"^Memory increase: \d+\.\d MB$",
        r"^Recommendations for 32GB RAM System$",
        r"^300,000 samples \(Full NIST17\):$",
        r"^100,000 samples \(Large subset\):$",
        r"^    Dataset: \d+\.\d MB$",
        r"^    Total: ~\d+\.\d GB \(dataset \+ model \+ training\)$",
        r"^    Status: ✅ RECOMMENDED$",
        r"Up to 50% of the RAM is RECOMMENDED, up to 70% OK",
    ):
        assert re.search(pattern, text, re.MULTILINE), pattern
    assert "Dataset Benchmark" not in "\n".join(report_lines(report, "estimate"))


def test_the_command_prints_what_was_asked_for(library, capsys, monkeypatch):
    msp, mols = library
    asked = []

    def measure(task, store, kind, in_parts=None):
        asked.append((task, kind, len(open_store(store)), len(open_store(in_parts).shards)))
        return asdict(replace(USE, num_samples=9))

    monkeypatch.setattr("stoker.compat.massspec_memory._in_new_process", measure)
    app(["bench", "memory", "--msp", str(msp), "--mol-dir", str(mols), "--mode", "lazy", "--samples", "9",
         "--ram-gb", "16"], standalone_mode=False)  # fmt: skip
    out = capsys.readouterr().out
    assert "System RAM: 16GB" in out
    assert asked == [("_dataset", "lazy", 9, 9)]
    assert "Lazy Dataset Benchmark (9 samples)" in out
    assert "Memory used by dataset: 0.4 MB" in out
    assert "Precomputed" not in out
    assert "Recommendations" not in out


def test_the_command_as_json(library, capsys, monkeypatch):
    made = MemoryReport(32 * GB, {"lazy": USE}, None, ())
    monkeypatch.setattr("stoker.compat.massspec_memory.bench_memory", lambda *a, **k: made)
    app(["bench", "memory", "--msp", "x.msp", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(made.to_json()))


def test_a_process_that_the_system_ends_names_no_folder_that_is_gone(monkeypatch):
    ended = subprocess.CompletedProcess([], -9, stdout="", stderr="Killed")
    monkeypatch.setattr(subprocess, "run", lambda *args, **named: ended)
    with pytest.raises(StokerError, match="ended with -9") as refused:
        measure_dataset("/tmp/stoker-memory-1/whole", "lazy")
    assert refused.value.fix.startswith("--samples 10")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no library"),
        (["--msp", "none.msp"], "none.msp"),
        (["--msp", "LIB", "--mode", "quick"], "--mode is 'quick'"),
        (["--msp", "LIB", "--ram-gb", "0"], "--ram-gb is 0"),
        (["--msp", "LIB", "--samples", "0"], "0 samples"),
        (["--msp", "BARE"], "no sample is left"),
    ],
)
def test_what_cannot_be_measured_says_what_to_type(words, said, library, tmp_path):
    bare = tmp_path / "bare.msp"
    bare.write_text("Name: a\nNum Peaks: 1\n15 10\n\n")
    places = {"LIB": str(library[0]), "BARE": str(bare)}
    with pytest.raises(StokerError, match=said) as refused:
        app(["bench", "memory", *(places.get(word, word) for word in words)], standalone_mode=False)
    assert refused.value.fix
