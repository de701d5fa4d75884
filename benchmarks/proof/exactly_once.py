"""A million random ways to share an epoch, stop, and go on otherwise: is every sample trained on exactly once?

    python benchmarks/proof/exactly_once.py [--plans 1000000] [--seconds 3600] [--jobs 2] [--seed 0]

Enters: nothing. A plan is drawn from its number: samples, batch size, ranks, chunks, mode, drop_last, weights or not,
and one to three stops, after each of which other ranks with other batches and other chunks go on from the saved state,
which passes through JSON. Leaves: the counts in `benchmarks/results/proof_exactly_once-*.json`, from which it goes on.
Costs: about 1 ms a plan; no file is read and no torch is needed: this is the arithmetic that `Loader` runs on.

Held against every plan: no position (with weights: no draw) twice; what is left out is what `drop_last` allows; every
rank takes the same number of steps; no batch is empty or too long; every rank knows how many samples all take.
"""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from campaign import Campaign, Family, make_parser
from stoker.errors import InputError
from stoker.loader.drawing import Draws
from stoker.loader.elastic import find_resume_point, hand_over, save_state
from stoker.loader.order import Order

EPOCH = 3


def draw_order(rng: random.Random, first: Order | None) -> Order:
    """Return an order; a later one of the same samples, mode, weights and `drop_last` as the first."""
    if first is None:
        num_samples = rng.choice((rng.randint(1, 30), rng.randint(10, 300), rng.randint(200, 3000)))
        mode = rng.choice(("shuffled", "shuffled", "sequential", "time"))
        draws = None
        if mode == "shuffled" and rng.random() < 0.3:
            weights = np.random.default_rng(rng.getrandbits(32)).random(num_samples)
            weights[rng.randrange(num_samples)] = 1.0
            weights[weights < rng.choice((0.0, 0.5))] = 0.0
            draws = Draws(num_samples, weights, rng.randint(1, 2 * num_samples))
        drop_last, seed = rng.random() < 0.4, rng.randrange(1 << 31)
    else:
        num_samples, mode, draws = first.num_samples, first.mode, first.draws
        drop_last, seed = first.drop_last, first.seed
    offered = draws.num_draws if draws else num_samples
    ranks = rng.choice((1, 1, 2, 2, 2, 3, 4, rng.randint(1, 9)))
    # Batches so that an epoch has a few to some dozens of steps: more only repeat what these show.
    batch = rng.randint(max(1, offered // (40 * ranks)), max(1, offered // ranks))
    chunks = None
    if rng.random() < 0.6:
        inner = sorted(
            {rng.randint(1, num_samples) for _ in range(rng.randint(0, 8))} - {num_samples}
        )
        edges = [0, *inner, num_samples]
        chunks = tuple(pairwise(edges))
    return Order(num_samples, batch, mode, seed, 0, ranks, drop_last, chunks, draws=draws)


def accepted_order(rng: random.Random, first: Order | None) -> Order:
    """Return an order that stoker takes: it refuses, by name, more ranks than there are samples."""
    while True:
        try:
            return draw_order(rng, first)
        except InputError:
            continue


def trial(rng: random.Random) -> str:
    """Run one plan; raise where it is broken."""
    order = accepted_order(rng, None)
    offered, taken, step, state = order.num_offered, [], 0, None
    stages = rng.choice((2, 2, 2, 2, 2, 2, 3, 4))
    before, cut = None, False
    for stage in range(stages):
        if stage:
            order = accepted_order(rng, order)
        share = 1.0 if stage == stages - 1 else rng.choice((0.0, 1.0, *[rng.random()] * 6))
        ends, firsts = set(), set()
        in_batches, saver = rng.random() < 0.25, rng.randrange(order.world_size)
        # Every rank reads the state in one plan of eight; in the others the one that saves the next state does, and the
        # rest get what is left handed over in memory, by the same function, which is what takes the time.
        same = before is not None and (before.order.batch_size, before.order.world_size) == (
            order.batch_size,
            order.world_size,
        )
        in_memory = before is not None and cut and not same and rng.random() < 0.875
        together: list[int] = []
        for rank in range(order.world_size):
            own = replace(order, rank=rank) if rank else order
            if state is None:
                begun, first, cuts = own.epoch(EPOCH), 0, ()
            elif in_memory and rank != saver:
                begun, first = hand_over(before, own, step), step
            else:
                point = find_resume_point(own, state)
                begun = own.epoch(point.epoch) if point.begun is None else point.begun
                first, cuts = point.batch, point.cuts
                assert point.epoch == EPOCH, (point.epoch, EPOCH)
            stop = first + int(share * (begun.num_batches - first) + 0.5)
            ends.add((begun.num_batches, begun.num_offered - begun.num_used))
            firsts.add(first)
            if in_batches:
                sizes = []
                for batch in begun.batches(first):
                    if batch.step >= stop:
                        break
                    assert 1 <= len(batch.positions) <= order.batch_size, (
                        "an empty or too long batch"
                    )
                    assert not order.drop_last or len(batch.positions) == order.batch_size
                    assert sum(batch.chunk_rows) == len(batch.positions)
                    sizes.append((len(batch.positions), batch.num_together))
                    taken.append(batch.positions)
                assert len(sizes) == stop - first, "batches are missing"
                if rank == 0:
                    together = [0] * len(sizes)
                together = [all_ + size for all_, (size, _) in zip(together, sizes, strict=True)]
                if rank == order.world_size - 1:
                    assert together == [said for _, said in sizes], (
                        "a wrong number of samples together"
                    )
            else:
                taken.extend(begun.stream(first, stop))
            if rank == saver and stage < stages - 1:
                saved = save_state(own, begun, stop, cuts)
                kept = begun
        assert len(ends) == len(firsts) == 1, f"ranks differ: {ends} {firsts}"
        assert firsts == {step}, f"goes on at {firsts} instead of {step}"
        if stage < stages - 1:
            state = json.loads(json.dumps(saved))
            before, cut = kept, stop > step
            before.untaken = cache(before.untaken)  # the same for every rank that goes on
        step = stop
    ((_, unused),) = ends
    seen = np.concatenate([np.empty(0, np.int64), *taken])
    over = offered - len(seen)
    if order.drop_last:
        assert 0 <= over < order.batch_size * order.world_size, f"{over} left out"
    else:
        assert over == unused, f"{over} left out, {unused} said"
        assert over < order.world_size
    if order.draws is None:
        counts = np.bincount(seen, minlength=order.num_samples)
        assert len(counts) == order.num_samples, "a sample that is not there"
        assert counts.max(initial=0) <= 1, "a sample twice"
    else:
        drawn = np.bincount(order.draws.positions(order.seed, EPOCH), minlength=order.num_samples)
        counts = np.bincount(seen, minlength=order.num_samples)
        assert len(counts) == order.num_samples, "a sample that is not there"
        assert (counts <= drawn).all(), "a draw twice"
    return "right"


def prepare(scratch: Path):  # noqa: ARG001
    warnings.simplefilter("ignore")
    return trial


def main() -> None:
    options = make_parser(__doc__, "plans", 1_000_000).parse_args()
    family = Family("plans", prepare, block=5000)
    Campaign("exactly_once", [family], options.plans, options.seed, 60, options.out).run(
        options.seconds, options.jobs
    )


if __name__ == "__main__":
    main()
