"""`tune_loader`: workers and depth for any DataLoader, measured together with the training step.

Enters: a function that makes the loader, and the training step. Leaves: the fastest `LoaderChoice` and all
tries. Costs some seconds for each try, and starting the workers.

Only for loaders that are not stoker's: `stoker.Loader` reads with threads of the training process and needs no such
tuning. The search begins at `min(cores // 2, 8)` workers, at least one, where `cores` are those that this process may
use (affinity and cgroups respected); from there it measures more and fewer.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from stoker.errors import InputError
from stoker.loader.prefetch import prefetch
from stoker.loader.slabs import usable_device
from stoker.machine import Machine, probe
from stoker.measure.laps import Patience, Stopwatch, block_rates
from stoker.measure.search import NOISY, Outcome, choose, climb
from stoker.tune.trial import Effort, agree

_WARM_UP_BATCHES = 2
_MANY_BATCHES = 1_000_000


@dataclass(frozen=True)
class LoaderChoice:
    """Numbers of workers, of batches ahead per worker (None without workers), and of batches ahead on the device."""

    num_workers: int
    prefetch_factor: int | None
    depth: int = 2


@dataclass(frozen=True, kw_only=True)
class LoaderTry(Outcome):
    """One try. `rate` is in batches per second; `spread` is (largest - smallest) / median rate of its slices."""

    choice: LoaderChoice
    spread: float


@dataclass(frozen=True)
class TunedLoader:
    """Result of a tuning: the chosen values, all tries in order, and the gain over the first try in words."""

    choice: LoaderChoice
    tries: tuple[LoaderTry, ...]
    reason: str


def first_workers(machine: Machine) -> int:
    """Return the usual number of workers: half the usable cores, at least 1 and at most 8; 1 if unknown."""
    return max(1, min((machine.cores_usable or 2) // 2, 8))


def tune_loader(
    make_loader: Callable[[int, int | None], Any],
    step: Callable[[Any], object],
    device: str | torch.device | None = None,
    *,
    effort: Effort | None = None,
    machine: Machine | None = None,
) -> TunedLoader:
    """Find the fastest workers, batches ahead per worker, and batches ahead on the device.

    Args:
        make_loader: Returns a DataLoader for `(num_workers, prefetch_factor)`, with the `persistent_workers` of the
            training if there are workers. Called for every try; its resources must be freed with the loader.
        step: One training step on a batch that is on the device; called as often as the tries need.
        device: Device of the batches; the first GPU by default, else the CPU.
        effort: Duration of each try.
        machine: Result of `probe`, which is called by default.
    """
    target = usable_device(device)
    machine = machine or probe()
    cores = machine.cores_usable or 2
    start = first_workers(machine)
    bench = _LoaderBench(make_loader, step, target, effort or Effort())
    choice = LoaderChoice(start, 2)
    most = max(start, 2 * cores)
    halved = (start >> times for times in range(start.bit_length()))
    doubled = (start << times for times in range(most.bit_length()) if start << times <= most)
    choice = bench.improve(choice, "num_workers", sorted({0, *halved, *doubled}))
    if choice.num_workers:
        choice = bench.improve(choice, "prefetch_factor", [1, 2, 4, 8])
    if target.type == "cuda":
        choice = bench.improve(choice, "depth", [1, 2, 4])
    first, best = bench.known[LoaderChoice(start, 2)], bench.known[choice]
    gain = (best.rate or 0.0) / (first.rate or 1.0)
    began = f"started at {start} workers, half of {cores} usable cores, 8 at most and 1 at least"
    gained = f"{gain:.2f} times that rate"
    told = "which nothing beats by 2 %" if choice == first.choice else gained
    noise = max(first.spread, best.spread)
    if noise > NOISY and gain < 1 + noise / 2:
        told += f"; slices of one try differ by up to {noise:.0%}, which is too noisy to tell"
    return TunedLoader(choice, tuple(bench.known.values()), f"{began}; {told}")


class _LoaderBench:
    def __init__(
        self,
        make_loader: Callable[[int, int | None], Any],
        step: Callable[[Any], object],
        device: torch.device,
        effort: Effort,
    ) -> None:
        self._make_loader, self._step = make_loader, step
        self._device, self._effort = device, effort
        self.known: dict[LoaderChoice, LoaderTry] = {}

    def improve(self, choice: LoaderChoice, name: str, values: list[int]) -> LoaderChoice:
        """Return the choice with the best of `values` for the field `name`."""

        def made(level: int) -> LoaderChoice:
            changed = replace(choice, **{name: values[level]})
            if name == "num_workers":
                factor = choice.prefetch_factor if changed.num_workers else None
                changed = replace(changed, prefetch_factor=factor)
            return changed

        start = values.index(getattr(choice, name))
        tried = climb(len(values), start, lambda level: self.measure(made(level)))
        if name == "num_workers":
            # One worker is often slower than both none and two, so none is always tried.
            tried[0] = self.measure(made(0))
        taken = choose(tried, start)
        return made(start if taken is None else taken)

    def measure(self, choice: LoaderChoice) -> LoaderTry:
        """Return the result of training with a choice, which is measured only once."""
        if choice not in self.known:
            self.known[choice] = agree(self._run(choice))
        return self.known[choice]

    def _run(self, choice: LoaderChoice) -> LoaderTry:
        with warnings.catch_warnings():
            # torch warns about more workers than cores, but here their effect is measured.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            rates = self._rates(choice)
        rate = statistics.median(rates)
        return LoaderTry(rate, True, choice=choice, spread=(max(rates) - min(rates)) / rate)

    def _rates(self, choice: LoaderChoice) -> list[float]:
        loader = self._make_loader(choice.num_workers, choice.prefetch_factor)
        num_slices = self._effort.num_slices
        warm_up = _WARM_UP_BATCHES + choice.depth + choice.num_workers
        patience = Patience(warm_up, _MANY_BATCHES, self._effort.seconds, 2 * num_slices)
        watch = Stopwatch(patience, self._device)
        with (
            prefetch(loader, self._device, depth=choice.depth) as batches,
            closing(_forever(batches)) as stream,
        ):
            for batch in watch.timed(stream):
                self._step(batch)
        return block_rates(watch.laps(), num_slices, count=lambda _: 1)


def _forever(batches: Any) -> Any:
    """Yield epoch after epoch; an empty loader ends it with an error."""
    while True:
        count = 0
        for batch in batches:
            count += 1
            yield batch
        if not count:
            raise InputError(
                "the loader yields no batch.",
                "one batch at least",
                "a loader with drop_last=False, or more data",
            )
