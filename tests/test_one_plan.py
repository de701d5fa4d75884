"""Every way in obeys one plan: same tier, same chunks, same bytes, and the bytes are what is allocated."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from run_makers import make_store, settings_for
from stoker import Loader, open_store
from stoker.compat.chunk_loader import ChunkDataLoader
from stoker.loader.columns import check_samples, column_facts, make_columns
from stoker.plan import Plan, make_plan
from stoker.plan.facts import even_chunks
from stoker.recipes.run import open_run, run_recipe
from stoker.store.fields import Dense, FieldData
from stoker.tune.trial import Effort, JobBench
from stoker.units import GIB
from store_makers import simple_shard, write_store
from test_recipe_tabular import class_table

ROW_BYTES = 4 * (6 + 2)


def dense_shard(rng: np.random.Generator, count: int) -> dict[str, FieldData]:
    return {
        "features": Dense(rng.normal(size=(count, 6)).astype("f4")),
        "targets": Dense(rng.normal(size=(count, 2)).astype("f4")),
    }


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """2,000 samples of features (6,) and targets (2,), in two shards."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("plan") / "dense"
    shards = [dense_shard(rng, 1200), dense_shard(rng, 800)]
    with write_store(folder, shards) as store:
        return store.path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Dense, ragged and series fields over two shards of different length."""
    rng = np.random.default_rng(1)
    folder = tmp_path_factory.mktemp("plan") / "mixed"
    with write_store(folder, [simple_shard(rng, 140), simple_shard(rng, 60)]) as store:
        return store.path


def layout(loader: Loader) -> tuple[object, ...]:
    """Return tier, number of chunks, and bytes of data: as they are, not as they were planned."""
    chunks = loader._data.ring.chunks
    return loader.tier, len(chunks), loader.device_bytes


def planned(plan: Plan, num_samples: int) -> tuple[object, ...]:
    chunks = even_chunks(num_samples, plan.chunk_rows or num_samples)
    return plan.tier, len(chunks), plan.data_bytes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    share=st.floats(0.01, 1.3),
    batch=st.integers(1, 64),
    shuffle=st.booleans(),
    ranks=st.integers(1, 3),
)
def test_loader_and_chunk_loader_report_and_allocate_what_the_plan_says(
    dense, share, batch, shuffle, ranks
):
    data_bytes = int(share * 2000 * ROW_BYTES)
    size_gb = data_bytes / GIB
    order = "shuffled" if shuffle else "sequential"
    refusal = None
    try:
        theirs = ChunkDataLoader(
            dense, batch, size_gb, "cpu", shuffle, rank=ranks - 1, world_size=ranks
        )
    except stoker.InputError as error:
        refusal = str(error)
    if refusal is not None:
        with pytest.raises(stoker.InputError) as caught:
            Loader(
                dense, batch, "cpu", data_bytes=max(1, int(size_gb * GIB)), order=order,
                rank=ranks - 1, world_size=ranks,
            )  # fmt: skip
        assert str(caught.value) == refusal
        return
    with (
        theirs,
        Loader(
            dense, batch, "cpu", order=order, data_bytes=max(1, int(size_gb * GIB)),
            rank=ranks - 1, world_size=ranks,
        ) as ours,
    ):  # fmt: skip
        assert layout(ours) == planned(ours.plan, 2000)
        assert layout(theirs._loader) == layout(ours)
        assert theirs.device_bytes <= data_bytes
        assert len(theirs.slot_ranges) == planned(ours.plan, 2000)[1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_bytes=st.integers(200, 60_000),
    batch=st.integers(1, 32),
    part=st.floats(0.2, 1.0),
    seed=st.integers(0, 3),
)
def test_uneven_fields_and_scattered_samples_are_counted_to_the_byte(
    mixed, num_bytes, batch, part, seed
):
    rng = np.random.default_rng(seed)
    samples = np.sort(rng.choice(200, size=max(1, int(part * 200)), replace=False))
    with open_store(mixed) as store:
        columns = make_columns(store, None, check_samples(samples, store))
        facts = column_facts(store, columns, len(samples))
        question = {"gpu_memory_bytes": None, "ram_bytes": GIB, "batch_size": batch}
        try:
            plan = make_plan(facts, data_bytes=num_bytes, **question)
        except stoker.InputError as refusal:
            advised = int(re.findall(r"data_bytes=(\d+)", refusal.fix)[0])
            plan = make_plan(facts, data_bytes=advised, **question)
        with Loader(store, batch, "cpu", plan=plan, samples=samples) as loader:
            assert layout(loader) == planned(plan, len(samples))
            for batch_made in loader:  # and the chunks do hold what the batches need
                assert len(batch_made["targets"])


def test_train_its_log_and_its_loader_have_one_plan(tmp_path):
    with make_store("tabular", tmp_path / "store") as store:
        path = store.path
    made = settings_for("tabular", path, tmp_path / "run")
    with open_run(made, device="cpu") as run:
        whole = run.make_train_loader()
        num_samples = len(run.job.samples["train"])
        whole_bytes = whole.device_bytes
        whole.close()
        data = replace(made.data, chunk_size_gb=whole_bytes // 2 / GIB, use_chunk_loader=True)
        told = replace(made, data=data)
        with run.with_settings(told).make_train_loader() as loader:
            assert loader.tier == "chunked"
            assert layout(loader) == planned(loader.plan, num_samples)
            assert loader.device_bytes <= whole_bytes // 2
            expected = loader.plan
    once = replace(told, training=replace(told.training, epochs=1))
    run_recipe(once, device="cpu")
    lines = [json.loads(line) for line in (tmp_path / "run" / "run.jsonl").read_text().splitlines()]
    logged = next(line["values"] for line in lines if line["event"] == "plan")
    names = ("tier", "chunk_rows", "num_slots", "slot_bytes")
    assert [logged[name] for name in names] == [getattr(expected, name) for name in names]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table whose first 160 rows of 200 are for training, and these rows as a store of their own."""
    folder = tmp_path_factory.mktemp("five")
    fields = class_table(200)
    split = Dense(np.repeat(np.arange(3, dtype="u1"), [160, 20, 20]))
    first = {name: Dense(field.values[:160]) for name, field in fields.items()}
    with write_store(folder / "store", [{**fields, "split": split}]) as store:
        path = store.path
    with write_store(folder / "alone", [first]) as alone:
        return path, alone.path, 160


@pytest.mark.usefixtures("one_thread")
@settings(max_examples=4)
@given(share=st.floats(0.3, 1.2), batch=st.integers(1, 48))
def test_five_ways_in_have_one_plan(table, tmp_path_factory, share, batch):
    """`Loader`, `ChunkDataLoader`, `stoker train`, `stoker tune` and the run log, for one budget and batch."""
    path, alone, num_samples = table
    with Loader(alone, batch, "cpu") as whole:
        size_gb = share * whole.device_bytes / GIB
    folder = tmp_path_factory.mktemp("run")
    given = [
        f"data.chunk_size_gb={size_gb!r}",
        f"training.batch_size={batch}",
        "training.max_steps=1",
    ]
    made = settings_for("tabular", path, folder / "run", *given)
    with Loader(alone, batch, "cpu", data_bytes=int(size_gb * GIB)) as loader:
        expected = layout(loader)
        plan = loader.plan
    assert expected == planned(plan, num_samples)
    with ChunkDataLoader(alone, batch, size_gb, "cpu", shuffle=True) as chunks:
        assert layout(chunks._loader) == expected
    with open_run(made, device="cpu") as run:
        with run.make_train_loader() as loader:
            assert layout(loader) == expected
        tried = JobBench(run, Effort(0.02, 2)).measure(made)
    assert (tried.tier, tried.device_data_bytes) == (expected[0], expected[2])
    run_recipe(made, device="cpu")
    lines = [json.loads(line) for line in (folder / "run" / "run.jsonl").read_text().splitlines()]
    logged = next(line["values"] for line in lines if line["event"] == "plan")
    names = ("tier", "chunk_rows", "num_slots", "slot_bytes")
    assert [logged[name] for name in names] == [getattr(plan, name) for name in names]
