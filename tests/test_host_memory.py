"""Memory of batches on the host: used again, but never while somebody holds it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from stoker.host_memory import Recycled
from stoker.loader.loader import Loader
from stoker.store.fields import Dense, Series
from store_makers import write_store


def test_memory_comes_back_when_its_last_view_is_gone():
    memory = Recycled()
    lent = memory.lend("x", 8192)
    place, view = lent.ctypes.data, torch.from_numpy(lent).view(torch.float32)[5:9]
    del lent
    assert memory.num_free == 0
    del view
    assert memory.num_free == 1
    again = memory.lend("x", 2048)
    assert again.ctypes.data == place
    assert len(again) == 2048
    assert memory.lend("y", 100).ctypes.data != place


@pytest.mark.parametrize(("before", "now"), [(10, 1_000_000), (1_000_000, 10)])
def test_a_buffer_of_another_size_is_freed(before, now):
    memory = Recycled()
    memory.lend("x", before)
    assert memory.num_free == 1
    lent = memory.lend("x", now)
    assert len(lent) == len(lent.base) == now
    assert memory.num_free == 0


def test_few_are_kept_and_none_after_closing():
    memory = Recycled()
    held = [memory.lend("x", 10) for _ in range(50)]
    held.clear()
    assert memory.num_free <= 4
    last = memory.lend("x", 10)
    memory.close()
    del last
    assert memory.num_free == 0


def test_threads_never_get_the_same_memory():
    memory = Recycled()

    def use(mark):
        for _ in range(300):
            lent = memory.lend("x", 4096)
            lent[:] = mark
            if not (lent == mark).all():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(8)))


KINDS = ["f4", "u2", "u4", "i8", "u1", "f2"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Fields whose batches of 64 are large, of every kind that is gathered."""
    values = np.random.default_rng(0).integers(0, 200, (208, 20_000), "u1")
    fields = {kind: Dense(values.astype(kind)) for kind in KINDS}
    return write_store(tmp_path_factory.mktemp("large") / "store", [fields])


def test_large_batches_are_the_rows_of_the_store(store):
    rows = {kind: store.read_rows(kind, 0, 208) for kind in KINDS}
    with Loader(store, 64, "cpu", order="shuffled", seed=3) as loader:
        assert loader._data.is_resident
        for batch in loader:
            for kind in KINDS:
                expected = rows[kind][batch.sample_ids]
                assert batch[kind].numpy().dtype == expected.dtype
                np.testing.assert_array_equal(batch[kind].numpy(), expected)


def test_large_windows_are_the_rows_of_the_series(tmp_path):
    rows, ends = np.arange(600 * 200, dtype="f4").reshape(600, 200), np.arange(50, 450)
    series = Series(
        rows=rows,
        time=np.arange(600),
        ends=ends,
        window=50,
        gap=np.zeros(600, np.uint8),
        columns=tuple(map(str, range(200))),
        duration_ns=1,
    )
    store = write_store(tmp_path / "store", [{"M1": series}])
    with Loader(store, 64, "cpu", order="shuffled") as loader:
        held = list(loader)
    for batch in held:
        expected = np.stack([rows[end - 50 : end] for end in ends[batch.sample_ids]])
        np.testing.assert_array_equal(batch["M1"].numpy(), expected)
    assert len({batch["M1"].data_ptr() for batch in held}) == len(held)


def test_held_batches_keep_their_values_and_changes_stay_their_own(store):
    with Loader(store, 64, "cpu", fields=["f4"], order="shuffled") as loader:
        held = list(loader)
        copies = [batch["f4"].clone() for batch in held]
        for batch in held[::2]:
            batch["f4"].zero_()
        loader.set_epoch(0)
        again = [batch["f4"].clone() for batch in loader]
    assert all(torch.equal(one, two) for one, two in zip(again, copies, strict=True))
    assert all(torch.equal(b["f4"], c) for b, c in zip(held[1::2], copies[1::2], strict=True))


def test_a_loop_lives_on_two_buffers(store):
    with Loader(store, 64, "cpu", fields=["f4"], order="shuffled") as loader:
        places = {batch["f4"].data_ptr() for _ in range(3) for batch in loader}
        assert len(places) == 2
        gc.collect()
        assert loader._assembler._memory.num_free == 2
    assert loader._assembler._memory.num_free == 0


def test_threads_that_assemble_get_their_own(store):
    with Loader(store, 64, "cpu", fields=["f4"], order="shuffled") as loader:
        indices = list(loader.index_batches())
        expected = [loader.assemble(index)["f4"].clone() for index in indices]

        def check(number):
            place = number % len(indices)
            return torch.equal(loader.assemble(indices[place])["f4"], expected[place])

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(check, range(60)))


def test_gradients_and_inference_mode(store):
    with Loader(store, 64, "cpu", fields=["f4"]) as loader:
        weight = torch.nn.Parameter(torch.ones(20_000))
        for batch in loader:
            x = batch["f4"].requires_grad_()
            (x @ weight).sum().backward()
            assert torch.equal(x.grad, weight.detach().expand_as(x))
        with torch.inference_mode():
            total = sum(float(batch["f4"].double().sum()) for batch in loader)
    assert total == store.read_rows("f4", 0, 208).astype("f8").sum()


def test_torch_compile_and_another_default_device_get_memory_on_the_cpu():
    memory = Recycled()

    def make():
        return memory.empty("x", (1 << 20,), torch.uint8).fill_(3)

    assert all((torch.compile(make, backend="eager")() == 3).all() for _ in range(2))
    with torch.device("meta"):
        assert memory.empty("x", (3,), torch.uint8).device.type == "cpu"
