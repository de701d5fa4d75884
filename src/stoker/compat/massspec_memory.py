"""`stoker bench memory`: what a library of mass spectra takes in RAM, measured and projected (S1-10 to S1-12).

Enters: an MSP library with its structures, a number of samples to measure with. Leaves: resident memory of
the dataset, lazy or with graphs in memory, and of a training; projected to the documents' library sizes.
Costs packing the samples once (0.8 ms of CPU each) and three small processes, about 20 s for 1,000.

Nothing is assumed: every figure comes from a process of its own that opens the packed samples and reads what
the kernel says it holds. A thousand samples are 70 kB, below what resident memory resolves; so bytes per
sample are those of the arrays that the dataset keeps, and the cost of a shard besides its arrays is found by
opening stores of few and of many shards many times. Projected:

    dataset(n) = n * bytes per sample + shards(n) * bytes per shard + the other cost of the first opening
    total(n)   = measured peak of a training + what n samples take more than the measured ones,
                 in the dataset and in the DataLoader's lists of indices

MB and GB here are 10^6 and 10^9 bytes.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from stoker.errors import InputError, StokerError
from stoker.lifetime import child_environment
from stoker.ownership import temporary_folder
from stoker.packing import PackOptions, pack
from stoker.sources.massspec import MassSpecSource
from stoker.strict_json import exact_text, parse_json
from stoker.units import GB, MB

Kind = Literal["lazy", "precomputed"]
KINDS: tuple[Kind, ...] = ("lazy", "precomputed")
MODES = ("estimate", *KINDS, "all")
SCENARIOS = {300_000: "Full NIST17", 100_000: "Large subset", 50_000: "Small subset"}
"""Samples of the documents' scenarios, and what they call them."""
NUM_ACCESSED = 100
BATCH_SIZE = 32
_NUM_STEPS = 25
_NUM_OPENED, _NUM_PARTS = 50, 10
_WIDTH = 60

RECOMMENDED, OK, TIGHT, TOO_MUCH = ("✅ RECOMMENDED", "✅ OK", "⚠ May be tight", "❌ Does not fit")
HALF, MOST = 0.5, 0.7
"""Of the RAM: up to half is recommended, since the page cache that makes reads fast lives in the rest; up to
0.7 (the documents' own threshold) is fine; above, little is left for anything else."""


@dataclass(frozen=True)
class DatasetUse:
    """Memory of a dataset, measured in a process of its own."""

    num_samples: int  # samples of the dataset
    num_shards: int  # shards of its store
    before_bytes: int  # resident before it is made, libraries loaded
    after_init_bytes: int  # after it is made
    after_access_bytes: int  # after reading `num_accessed` samples
    num_accessed: int  # samples read, drawn at random
    resident_bytes: int  # bytes of the arrays that it keeps
    shard_bytes: float  # cost of one shard besides its arrays
    loader_bytes: int  # lists of indices that a shuffled DataLoader over it keeps

    @property
    def used_bytes(self) -> int:
        """Memory that the process gained when the dataset was made."""
        return self.after_init_bytes - self.before_bytes

    def project(self, num_samples: int) -> float:
        """Return the bytes of such a dataset with another number of samples."""
        shards = -(-num_samples // MassSpecSource.molecules_per_part)
        known = self.resident_bytes + self.num_shards * self.shard_bytes
        fixed = max(0.0, self.used_bytes - known)
        per_sample = self.resident_bytes / self.num_samples
        return num_samples * per_sample + shards * self.shard_bytes + fixed


@dataclass(frozen=True)
class TrainingUse:
    """Memory of training the recipe's student on the CPU from the lazy dataset, in a process of its own.

    `peak_bytes` is the most that was resident: libraries, dataset, model, gradients, optimizer, batches.
    """

    peak_bytes: int
    num_weights: int
    batch_size: int
    num_steps: int


@dataclass(frozen=True)
class Projection:
    """The projected memory of one scenario, for one kind of dataset."""

    num_samples: int
    kind: Kind
    dataset_bytes: float
    total_bytes: float
    status: str


@dataclass(frozen=True)
class MemoryReport:
    """All measurements and projections, for a machine with `ram_bytes`. Parts not asked for are None or empty.

    `is_of_public_data`: nothing was measured now, and the figures are those of a public library.
    """

    ram_bytes: int
    uses: dict[Kind, DatasetUse]
    training: TrainingUse | None
    projections: tuple[Projection, ...]
    is_of_public_data: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


# Measured by this module: `stoker bench memory` with the first 1,000 records of MassBank's 13,342 EI spectra, torch on
# the CPU. An estimate without data is made from them.
_KNOWN: dict[Kind, DatasetUse] = {
    "lazy": DatasetUse(1000, 1, 263_696_384, 264_286_208, 268_623_872, 100, 68_048, 32_829.9, 75_896),
    "precomputed": DatasetUse(1000, 1, 263_696_384, 264_478_720, 268_759_040, 100, 196_580, 30_022.7, 75_896),
}  # fmt: skip
_KNOWN_TRAINING = TrainingUse(668_233_728, 8_897_503, 32, 25)


def estimate_memory(ram_bytes: int) -> MemoryReport:
    """Return the projections without any data, from measurements with a public library."""
    found = project_all(_KNOWN, _KNOWN_TRAINING, ram_bytes)
    return MemoryReport(ram_bytes, dict(_KNOWN), _KNOWN_TRAINING, found, is_of_public_data=True)


def judge(total_bytes: float, ram_bytes: float) -> str:
    """Return the status of a total, by the one rule: half the RAM, 0.7 of it, all of it."""
    share = total_bytes / ram_bytes
    if share <= HALF:
        return RECOMMENDED
    if share <= MOST:
        return OK
    return TIGHT if share <= 1 else TOO_MUCH


def project_all(
    uses: dict[Kind, DatasetUse], training: TrainingUse, ram_bytes: int
) -> tuple[Projection, ...]:
    """Return every scenario for both kinds of dataset."""
    found = []
    lazy = uses["lazy"]
    per_sample = lazy.loader_bytes / lazy.num_samples
    for num_samples in SCENARIOS:
        more = per_sample * (num_samples - lazy.num_samples) - lazy.project(lazy.num_samples)
        for kind in KINDS:
            dataset = uses[kind].project(num_samples)
            total = training.peak_bytes + more + dataset
            found.append(Projection(num_samples, kind, dataset, total, judge(total, ram_bytes)))
    return tuple(found)


# -- measuring -------------------------------------------------------------------------------------


def bench_memory(
    msp: Path,
    mol_dir: Path | None = None,
    *,
    mode: str = "all",
    ram_bytes: int = 32 * GB,
    num_samples: int = 1000,
    say: Callable[[str], None] = lambda _: None,
) -> MemoryReport:
    """Measure with the first samples of a library, and project to the documents' sizes.

    Structures are in `mol_dir`, or are the library's SMILES. `mode` is one of `MODES`; "estimate" and "all" need every
    measurement. The projections are judged for a machine with `ram_bytes`.
    """
    if mode not in MODES:
        raise InputError(f"--mode is {mode!r}.", ", ".join(MODES), "--mode all")
    if num_samples < 1 or ram_bytes < 1:
        raise InputError(
            f"{num_samples} samples and {ram_bytes / GB:g} GB of RAM.",
            "1 sample or more, and some RAM",
            "--samples 1000 --ram-gb 32",
        )
    projects = mode in ("estimate", "all")
    kinds = KINDS if projects else tuple(kind for kind in KINDS if kind == mode)
    with temporary_folder("stoker-memory-") as folder:
        say(f"packing up to {num_samples:,} samples of {msp}")
        whole = MassSpecSource(
            msp, mol_dir, max_samples=num_samples, structure_advice="--mol-dir FOLDER"
        )
        store = _pack(whole, folder / "whole")
        few = min(num_samples, 10 * _NUM_PARTS)
        parts = replace(whole, max_samples=few, molecules_per_part=-(-few // _NUM_PARTS))
        in_parts = _pack(parts, folder / "parts")
        uses: dict[Kind, DatasetUse] = {}
        for kind in kinds:
            say(f"measuring the {kind} dataset in a process of its own")
            uses[kind] = measure_dataset(store, kind, in_parts)
        training = None
        if projects:
            say(f"training {_NUM_STEPS} steps in a process of its own")
            training = measure_training(store, "lazy")
    found = () if training is None else project_all(uses, training, ram_bytes)
    return MemoryReport(ram_bytes, uses, training, found)


def _pack(source: MassSpecSource, folder: Path) -> str:
    # Libraries always have records without a structure: they are left out, as the dataset does.
    pack(source, folder, PackOptions(on_bad="quarantine", bad_budget="100%"))
    return str(folder)


def measure_dataset(store: str, kind: Kind, in_parts: str | None = None) -> DatasetUse:
    """Measure the memory of a packed dataset in a new process.

    `in_parts` is a store of the same kind with more shards, to learn what a shard costs.
    """
    return DatasetUse(**_in_new_process("_dataset", store, kind, in_parts))


def measure_training(store: str, kind: Kind) -> TrainingUse:
    """Measure the memory of training on a packed dataset in a new process."""
    return TrainingUse(**_in_new_process("_training", store, kind))


def _in_new_process(task: str, *arguments: str | None) -> dict[str, Any]:
    """Run a task of this module in a fresh process, whose memory nothing else has used."""
    # The arguments go through a pipe: all users of the machine can read a command line.
    code = (
        f"from stoker.lifetime import end_with_parent; end_with_parent({os.getpid()}); "
        f"from {__name__} import answer; answer()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=exact_text([task, *arguments]),
        capture_output=True,
        text=True,
        check=False,
        env=child_environment(),
    )
    if done.returncode:
        raise StokerError(
            f"the process that measures memory ended with {done.returncode}:",
            "a process that reads the samples, and memory for them",
            "--samples 10, to see whether fewer fit",
            done.stderr[-2000:].splitlines(),
        )
    values: dict[str, Any] = parse_json(done.stdout.splitlines()[-1])
    return values


def answer() -> None:
    """Run the task on stdin and write its values as one line of JSON; the child's side of `_in_new_process`."""
    task, *arguments = parse_json(sys.stdin.read())
    tasks: dict[str, Callable[..., dict[str, Any]]] = {"_dataset": _dataset, "_training": _training}
    sys.stdout.write(exact_text(tasks[task](*arguments)) + "\n")


def _open(store: str, kind: Kind) -> Any:
    from stoker.compat.massspec import LazyMassSpecDataset

    return LazyMassSpecDataset.from_store(store, precompute_graphs=kind == "precomputed")


def _dataset(store: str, kind: Kind, in_parts: str | None) -> dict[str, Any]:
    import gc

    import numpy as np

    import stoker.compat.massspec  # noqa: F401  libraries are loaded before the first reading
    from stoker.machine import rss_bytes

    gc.collect()
    before = rss_bytes()
    dataset = _open(store, kind)
    after_init = rss_bytes()
    num_accessed = min(NUM_ACCESSED, len(dataset))
    for index in np.random.default_rng(0).permutation(len(dataset))[:num_accessed]:
        dataset[int(index)]
    after_access = rss_bytes()
    num_shards = len(dataset.store.shards)
    resident = int(dataset.resident_bytes)
    shard_bytes = 0.0
    if in_parts is not None:
        (few, at_few), (many, at_many) = (_overhead(path, kind) for path in (store, in_parts))
        shard_bytes = max(0.0, (at_many - at_few) / max(1, many - few))
    use = DatasetUse(
        len(dataset), num_shards, before, after_init, after_access, num_accessed, resident, shard_bytes,
        _loader_bytes(dataset),
    )  # fmt: skip
    return asdict(use)


def _overhead(store: str, kind: Kind) -> tuple[int, float]:
    """Return a store's number of shards, and the cost of opening it besides its arrays, when all is warm."""
    from stoker.machine import rss_bytes

    first = _open(store, kind)
    before = rss_bytes()
    opened = [_open(store, kind) for _ in range(_NUM_OPENED)]
    each = (rss_bytes() - before) / len(opened)
    return len(first.store.shards), each - first.resident_bytes


def _loader_bytes(dataset: Any) -> int:
    """Return the bytes that loaders over a dataset keep: the samples of each, and this epoch's order."""
    import tracemalloc

    from stoker.compat.massspec import NISTDataLoader

    tracemalloc.start()
    loaders = NISTDataLoader.create_dataloaders(dataset, BATCH_SIZE, num_workers=0)
    order = iter(loaders[0].sampler)
    next(order)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return int(held)


def _training(store: str, kind: Kind) -> dict[str, Any]:
    from functools import partial

    from stoker.compat.massspec import NISTDataLoader
    from stoker.machine import peak_rss_bytes
    from stoker.recipes.massspec.models import Student, cosine_loss
    from stoker.recipes.massspec.options import MassSpecOptions
    from stoker.recipes.massspec.recipe import LEARNING_RATE, make_adam
    from stoker.train.trainer import Trainer

    options = MassSpecOptions()
    dataset = _open(store, kind)
    train = NISTDataLoader.create_dataloaders(dataset, BATCH_SIZE, num_workers=0)[0]
    batches = list(itertools.islice(train, _NUM_STEPS))
    model = Student(dataset.max_mz + 1, 0, options)
    trainer = Trainer(
        model,
        batches,
        None,
        partial(cosine_loss, mass_power=options.mass_power),
        make_adam(model.parameters(), LEARNING_RATE),
        None,
        {"epochs": 1, "capture": "off"},
        "cpu",
        unpack=_unpack,
    )
    trainer.fit(quiet=True)
    return {
        "peak_bytes": peak_rss_bytes(),
        "num_weights": sum(weight.numel() for weight in model.parameters()),
        "batch_size": BATCH_SIZE,
        "num_steps": len(batches),
    }


def _unpack(batch: Any) -> tuple[Any, Any]:
    from stoker.recipes.massspec.metrics import root_spectra

    inputs = {name: batch[name] for name in ("ecfp", "mol_weight")}
    return inputs, {"spectrum": root_spectra(batch["spectrum"]), "mol_weight": batch["mol_weight"]}


# -- as documented ---------------------------------------------------------------------------------


def report_lines(report: MemoryReport, mode: str) -> list[str]:
    """Return the report as the documents print it (S1-11), with the figures of this machine."""
    ram = f"{report.ram_bytes / GB:g}GB"
    lines = [*_banner("NEIMS v2.0 Memory Benchmark"), f"System RAM: {ram}"]
    if mode != "estimate":
        for kind, use in report.uses.items():
            lines += [
                *_banner(f"{kind.capitalize()} Dataset Benchmark ({use.num_samples} samples)"),
                f"Memory before: {_megabytes(use.before_bytes)}",
                f"Memory after init: {_megabytes(use.after_init_bytes)}",
                f"Memory used by dataset: {_megabytes(use.used_bytes)}",
                f"Accessing {use.num_accessed} random samples...",
                f"Memory after accessing samples: {_megabytes(use.after_access_bytes)}",
                f"Memory increase: {_megabytes(use.after_access_bytes - use.after_init_bytes)}",
            ]
    if report.training is None:
        return lines
    training, lazy = report.training, report.uses["lazy"]
    measured = (
        "Measured before, with a public library of" if report.is_of_public_data else "Measured with"
    )
    lines += [
        *_banner(f"Recommendations for {ram} RAM System"),
        f"{measured} {lazy.num_samples:,} samples: "
        + ", ".join(
            f"{use.resident_bytes / use.num_samples:.0f} bytes per sample {kind}"
            for kind, use in report.uses.items()
        ),
        (
            f"Training: {training.num_weights / 1e6:.1f} million weights, Adam, batch {training.batch_size}, "
            f"{training.num_steps} steps on the CPU: {_megabytes(training.peak_bytes)} at most"
        ),
        f"Up to {HALF:.0%} of the RAM is RECOMMENDED, up to {MOST:.0%} OK, up to all of it tight",
    ]
    for found in report.projections:
        if found.kind == "lazy":
            lines += ["", f"{found.num_samples:,} samples ({SCENARIOS[found.num_samples]}):"]
        lines += [
            f"  {found.kind.capitalize()}:",
            f"    Dataset: {_megabytes(found.dataset_bytes)}",
            f"    Total: ~{found.total_bytes / GB:.1f} GB (dataset + model + training)",
            f"    Status: {found.status}",
        ]
    return lines


def _banner(title: str) -> list[str]:
    return ["=" * _WIDTH, title, "=" * _WIDTH]


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / MB:.1f} MB"
