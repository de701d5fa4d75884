"""`ChunkDataLoader`: the documented chunk loader, and a test for each of its nineteen bugs.

Bugs (REQUIREMENTS S0): a to l, q and s are the loader's own and tested here, m by running the loop of
the module's text, n with `GradientAccumulator`. The others belong to other rooms: o (checkpoint of a
tuple) to `train`, p (leak baseline) and r (`log_gpu_stats`) to `monitor`.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import threading

import h5py
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import stoker.compat.chunk_loader as door
from stoker.compat.chunk_loader import ChunkDataLoader, samples_that_fit
from stoker.errors import InputError, StoreError
from stoker.loader.gather import AHEAD_BYTES
from stoker.plan import array_facts, make_plan
from stoker.store.manifest import FieldInfo
from stoker.units import GIB

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)

N, T, F, TARGETS = 103, 6, 5, 3
BYTES = 4 * (T * F + TARGETS)


def write(path, features, targets):
    with h5py.File(path, "w") as file:
        file["features"] = features
        file["targets"] = targets
    return path


@pytest.fixture(scope="module")
def arrays():
    features = np.arange(N * T * F, dtype=np.float32).reshape(N, T, F)
    return features, np.arange(N * TARGETS, dtype=np.float32).reshape(N, TARGETS)


@pytest.fixture(scope="module")
def path(tmp_path_factory, arrays):
    return write(tmp_path_factory.mktemp("chunks") / "aligned_train.h5", *arrays)


def gib(num_samples, num_bytes=BYTES):
    """`chunk_size_gb` for exactly so many samples."""
    return (num_samples + 0.5) * num_bytes / 1024**3


def rows_of(batches):
    """Sample numbers of batches, from the first target of each row."""
    return [int(value) // TARGETS for _, targets in batches for value in targets[:, 0].tolist()]


# -- parity ----------------------------------------------------------------------------------------


@on_each_device
@given(
    batch_size=st.integers(1, 40),
    chunk=st.integers(1, 130),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_batches_are_the_h5py_slices_whatever_the_chunk(
    path, arrays, device, batch_size, chunk, drop_last, shuffle
):
    options = (path, batch_size, gib(chunk), device, shuffle, drop_last)
    if chunk < min(N, 2 * batch_size):
        with pytest.raises(InputError, match="chunk_size_gb="):
            ChunkDataLoader(*options)
        return
    assume(chunk >= min(N, 3 * batch_size))  # between the two it depends on the division
    loader = ChunkDataLoader(*options)
    with loader:
        batches = [(x.cpu(), y.cpu()) for x, y in loader]
        assert loader.device_bytes <= chunk * BYTES
    assert len(batches) == len(loader) == (N // batch_size if drop_last else -(-N // batch_size))
    order = rows_of(batches)
    full = N // batch_size * batch_size if drop_last else N
    assert len(set(order)) == len(order) == full
    if not shuffle:
        assert order == list(range(full))
    np.testing.assert_array_equal(torch.cat([x for x, _ in batches]).numpy(), arrays[0][order])
    np.testing.assert_array_equal(torch.cat([y for _, y in batches]).numpy(), arrays[1][order])


@on_each_device
def test_load_chunk_to_gpu_is_kept_as_documented(path, arrays, device):
    with ChunkDataLoader(path, 8, gib(40), device) as loader:
        for start, end in loader.chunk_ranges:
            features, targets = loader._load_chunk_to_gpu(start, end)
            assert features.device.type == targets.device.type == device
            np.testing.assert_array_equal(features.cpu(), arrays[0][start:end])
            np.testing.assert_array_equal(targets.cpu(), arrays[1][start:end])
        with pytest.raises(InputError, match="within 0 to 103"):
            loader._load_chunk_to_gpu(0, N + 1)


# -- S0-4, S0-5, S0-8: attributes and arithmetic ---------------------------------------------------


def test_documented_attributes(path):
    with ChunkDataLoader(path, 8, gib(40), "cpu") as loader:
        assert loader.num_samples == N
        assert loader.sequence_length == T
        assert loader.feature_count == F
        assert loader.target_length == TARGETS
        assert loader.bytes_per_sample == BYTES
        assert loader.samples_per_chunk == 40
        assert loader.chunk_ranges == [(0, 40), (40, 80), (80, 103)]


def test_s0_8_numbers():
    """53,547 samples of 360 x 167 and 36 targets in 12 GiB: the example's 51,779 are one chunk."""
    per_sample = 360 * 167 * 4 + 36 * 4
    assert samples_that_fit(12.0, per_sample) == 53_547
    assert samples_that_fit(12.0, per_sample) >= 51_779
    assert math.isclose(51_779 * 360 * 167 * 4 / 1e9, 12.45, abs_tol=0.005)
    assert math.isclose(51_779 * 360 * 167 * 4 / 1024**3, 11.60, abs_tol=0.005)


def test_s0_8_example_is_one_chunk():
    infos = [
        FieldInfo(kind="dense", dtype="<f4", shape=[360, 167]),
        FieldInfo(kind="dense", dtype="<f4", shape=[36]),
    ]
    per_sample = sum(door.sample_bytes(info) for info in infos)
    assert per_sample == 240_624
    assert samples_that_fit(12.0, per_sample) >= 51_779


# -- the bugs --------------------------------------------------------------------------------------


def test_bug_a_target_length_is_set(path):
    with ChunkDataLoader(path, 8, device="cpu") as loader:
        assert loader.target_length == 3


def test_bug_b_shuffle_shuffles_anew_each_epoch_and_repeatably(path):
    def orders(seed, chunk):
        with ChunkDataLoader(path, 8, gib(chunk), "cpu", shuffle=True, seed=seed) as loader:
            return [rows_of(loader) for _ in range(2)]

    for chunk in (200, 60):
        first, second = orders(0, chunk)
        assert first != second != sorted(second)
        assert sorted(first) == sorted(second) == list(range(N))
        assert orders(0, chunk) == [first, second]
        assert orders(1, chunk)[0] != first


def test_bug_c_drop_last_drops_the_epochs_tail_and_nothing_else(path):
    with ChunkDataLoader(path, 8, gib(40), "cpu", drop_last=True) as loader:
        sizes = [len(features) for features, _ in loader]
    assert sizes == [8] * 12


@pytest.mark.parametrize("chunk", [33, 35, 50, 51, 99])
def test_bug_d_only_the_last_batch_of_the_epoch_is_short(path, chunk):
    with ChunkDataLoader(path, 8, gib(chunk), "cpu") as loader:
        assert len(loader.slot_ranges) > 1
        assert [len(features) for features, _ in loader] == [8] * 12 + [7]


def test_bug_e_length_epoch_seed_and_resume(path):
    for chunk in (200, 50):
        with ChunkDataLoader(path, 8, gib(chunk), "cpu", shuffle=True, seed=4) as loader:
            assert len(loader) == 13
            loader.set_epoch(2)
            whole = rows_of(loader)
            assert loader.epoch == 3
            loader.set_epoch(2)
            begun = []
            for batch in loader:
                begun += rows_of([batch])
                if len(begun) == 40:
                    break
            state = loader.state_dict()
        with ChunkDataLoader(path, 8, gib(chunk), "cpu", shuffle=True, seed=4) as other:
            other.load_state_dict(state)
            assert begun + rows_of(other) == whole
            assert other.epoch == 3
            assert len(rows_of(other)) == N, "the epoch after a resumed one is whole"


def test_an_iteration_begins_at_the_first_batch(path):
    with ChunkDataLoader(path, 8, device="cpu") as loader:
        for _ in range(2):
            assert rows_of([next(iter(loader))]) == list(range(8))
        assert rows_of(loader) == list(range(N))


@pytest.mark.parametrize("chunk", [200, 50])
@pytest.mark.parametrize("way", ["zip", "islice"])
def test_taking_exactly_all_batches_begins_the_next_epoch(path, chunk, way):
    with ChunkDataLoader(path, 8, gib(chunk), "cpu", shuffle=True, seed=4) as loader:
        expected = [rows_of(loader) for _ in range(3)]
        assert len({tuple(order) for order in expected}) == 3
        loader.set_epoch(0)
        seen = []
        for epoch in range(3):
            taken = (
                itertools.islice(loader, len(loader))
                if way == "islice"
                else (batch for _, batch in zip(range(len(loader)), loader))  # noqa: B905
            )
            seen.append(rows_of(taken))
            assert loader.epoch == epoch
        assert seen == expected
        fourth = rows_of(loader)
        assert loader.epoch == 4
        loader.set_epoch(3)
        assert rows_of(loader) == fourth


def test_only_the_last_batch_ends_an_epoch_and_a_place_that_is_set_counts(path):
    with ChunkDataLoader(path, 8, device="cpu", shuffle=True) as loader:
        whole = rows_of(loader)
        loader.set_epoch(0)
        assert rows_of(itertools.islice(loader, len(loader) - 1)) == whole[:-7]
        assert rows_of(itertools.islice(loader, len(loader))) == whole, "left early: begun again"
        loader.set_epoch(0)
        assert rows_of(itertools.islice(loader, 5)) == whole[:40]
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert rows_of(itertools.islice(loader, len(loader) - 5)) == whole[40:]
        assert rows_of(loader) != whole, "the rest was taken to its end"
        assert loader.epoch == 2
        loader.set_epoch(0)
        assert rows_of(itertools.islice(loader, len(loader))) == whole
        loader.set_epoch(0)
        assert rows_of(loader) == whole


@on_each_device
def test_bug_f_batches_are_no_views_of_a_chunk(path, arrays, device):
    """A held batch keeps no chunk alive, and no later chunk overwrites it."""
    with ChunkDataLoader(path, 8, gib(50), device) as loader:
        ring = loader.device_bytes
        held = list(loader)
        assert loader.device_bytes == ring <= gib(50) * 1024**3
        slots = [
            values.untyped_storage().data_ptr()
            for values in loader._loader._data.ring.tensors.values()
        ]
        for number, (features, _) in enumerate(held):
            assert features.untyped_storage().data_ptr() not in slots
            assert (
                features.untyped_storage().nbytes() <= AHEAD_BYTES
            )  # small batches lie beside others
            np.testing.assert_array_equal(features.cpu(), arrays[0][8 * number : 8 * number + 8])


@gpu
def test_bug_f_peak_memory_stays_within_the_budget_while_a_batch_is_held(tmp_path):
    features = np.zeros((4000, 64, 64), np.float32)
    path = write(tmp_path / "big.h5", features, np.zeros((4000, 1), np.float32))
    per_sample = 64 * 64 * 4 + 4
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with ChunkDataLoader(path, 100, gib(1000, per_sample), "cuda") as loader:
        for held in loader:  # noqa: B007  what the loop variable holds is the point
            pass
        torch.cuda.synchronize()
    batch = 100 * per_sample
    assert torch.cuda.max_memory_allocated() - before <= 1000 * per_sample + 4 * batch
    del held


def test_bug_g_the_next_slot_loads_while_this_one_is_used(path, monkeypatch):
    from stoker.loader.ring import Ring

    loaded, threads = [], set()
    original = Ring.load

    def load(self, chunk, *rest):
        loaded.append(chunk)
        threads.add(threading.current_thread().name)
        return original(self, chunk, *rest)

    monkeypatch.setattr(Ring, "load", load)
    with ChunkDataLoader(path, 8, gib(50), "cpu", shuffle=True) as loader:
        iterator = iter(loader)
        next(iterator)
        for _ in range(500):
            if len(loaded) >= 2:
                break
            threading.Event().wait(0.01)
        assert len(loaded) >= 2, "the second slot loads although only the first is in use"
        assert threading.current_thread().name not in threads
        iterator.close()


def test_bug_h_host_memory_is_a_few_slabs_not_two_chunks(path):
    """No copy of a chunk in host memory: reads go to slabs of 8 MB whatever the chunk's size."""
    from stoker.plan.budget import SLAB_BYTES

    with ChunkDataLoader(path, 8, device="cpu") as loader:
        uploader = loader._loader._data.uploader
        assert uploader.pinned_bytes in (0, (uploader.threads + 2) * SLAB_BYTES)


@on_each_device
@pytest.mark.parametrize(
    ("dtype", "target_shape", "target_dtype"),
    [("f8", (36, 1), "i8"), ("f2", (), "i4"), ("u1", (2, 2), "f4"), ("i2", (3,), "u2")],
)
def test_bug_i_true_types_and_target_ranks(tmp_path, device, dtype, target_shape, target_dtype):
    rng = np.random.default_rng(0)
    features = rng.integers(0, 100, (20, 4, 3)).astype(dtype)
    targets = rng.integers(0, 100, (20, *target_shape)).astype(target_dtype)
    path = write(tmp_path / "t.h5", features, targets)
    with ChunkDataLoader(path, 6, device=device) as loader:
        width = math.prod(target_shape)
        assert loader.target_length == width
        assert loader.bytes_per_sample == features[0].nbytes + width * targets.dtype.itemsize
        batches = list(loader)
        xs = np.concatenate([x.cpu().numpy() for x, _ in batches])
        ys = np.concatenate([y.cpu().numpy() for _, y in batches])
    assert (xs.dtype, ys.dtype) == (features.dtype, targets.dtype)
    np.testing.assert_array_equal(xs, features)
    np.testing.assert_array_equal(ys, targets)


def test_bug_j_neither_the_number_of_samples_nor_the_budget_is_exceeded(path):
    with ChunkDataLoader(path, 500, device="cpu") as loader:  # a batch larger than the data
        assert loader.samples_per_chunk == N
        assert [len(features) for features, _ in loader] == [N]
    with pytest.raises(
        InputError, match=r"all of it is 13\.3 KiB \(103 samples\)[\s\S]*chunk_size_gb="
    ) as caught:
        ChunkDataLoader(path, 64, gib(10), "cpu")
    typed = float(caught.value.fix.split("chunk_size_gb=")[1].split()[0])
    with ChunkDataLoader(path, 32, typed, "cpu") as loader:
        assert rows_of(loader) == list(range(N))


def test_bug_k_the_cpu_works_and_cuda_without_a_gpu_says_so(path):
    with ChunkDataLoader(path, 8, device="cpu") as loader:
        assert all(x.device.type == "cpu" for x, _ in loader)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match=r"'cuda'[\s\S]*device='cpu'"):
            ChunkDataLoader(path)


def test_bug_l_gb_is_gib_as_documented_and_free_memory_decides():
    assert samples_that_fit(1.0, 1024) == 2**20
    assert "2^30" in door.__doc__
    facts = array_facts(53_547, {"features": ("<f4", (360, 167)), "targets": ("<f4", (36,))})
    question = {"ram_bytes": 32 * GIB, "batch_size": 128, "data_bytes": 12 * GIB}
    assert make_plan(facts, gpu_memory_bytes=16 * GIB, **question).tier == "resident"
    with pytest.raises(InputError, match=r"12.0 GiB[\s\S]*of 8.00 GiB") as caught:
        make_plan(facts, gpu_memory_bytes=8 * GIB, **question)
    advised = float(caught.value.fix.split("chunk_size_gb=")[1].split()[0])
    question["data_bytes"] = int(advised * GIB)
    assert make_plan(facts, gpu_memory_bytes=8 * GIB, **question).tier == "chunked"


def test_bug_m_the_documented_loop_trains(path, monkeypatch):
    """The loop in the module's text, run as it stands; without zero_grad the loss would blow up."""
    text = door.__doc__.split("complete:\n")[1].split("`Trainer(")[0]
    code = textwrap.dedent(text)
    assert code.index("zero_grad") < code.index("backward")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(T * F, TARGETS))
    losses = []

    def loss_function(output, targets):
        losses.append(torch.nn.functional.mse_loss(output / 100, targets / 1000))
        return losses[-1]

    names = {
        "ChunkDataLoader": lambda _, **options: ChunkDataLoader(path, device="cpu", **options),
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), 1e-3),
        "loss_function": loss_function,
        "epochs": 30,
    }
    exec(code, names)
    assert len(losses) == 30
    assert losses[-1] < losses[0] / 2
    names["loader"].close()


def test_bug_n_the_last_window_of_accumulation_steps_too(path):
    from stoker.compat.basics import GradientAccumulator

    with ChunkDataLoader(path, 8, device="cpu") as loader:
        accumulator = GradientAccumulator(4, len(loader))
        updates = [number for number, _ in enumerate(loader, 1) if accumulator.should_update()]
    assert updates == [4, 8, 12, 13]


@pytest.mark.parametrize("chunk", [200, 50])
@pytest.mark.parametrize("shuffle", [False, True])
def test_bug_q_ranks_share_the_epoch_in_equal_steps_without_repeats(path, shuffle, chunk):
    seen, steps = [], set()
    for rank in range(3):
        with ChunkDataLoader(
            path, 8, gib(chunk), "cpu", shuffle, rank=rank, world_size=3
        ) as loader:
            batches = list(loader)
            steps.add(len(batches))
            assert len(batches) == len(loader)
            seen += rows_of(batches)
            if not shuffle:
                own = rows_of(batches)
                assert own == list(range(own[0], own[0] + len(own))), "a contiguous block of time"
    assert sorted(seen) == list(range(N))
    assert len(steps) == 1


@gpu
def test_bug_s_no_allocation_and_no_empty_cache_per_chunk(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("empty_cache was called"))
    with ChunkDataLoader(path, 8, gib(50), "cuda") as loader:
        list(loader)
        segments = torch.cuda.memory_stats()["segment.all.allocated"]
        for _ in range(5):
            for _ in loader:
                pass
        assert torch.cuda.memory_stats()["segment.all.allocated"] == segments


def test_bug_s_the_ring_is_allocated_once(path):
    with ChunkDataLoader(path, 8, gib(50), "cpu") as loader:
        places = {name: t.data_ptr() for name, t in loader._loader._data.ring.tensors.items()}
        for _ in range(3):
            list(loader)
        assert {n: t.data_ptr() for n, t in loader._loader._data.ring.tensors.items()} == places


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": np.int64(0)}, "batch_size is np.int64(0)"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"world_size": "2"}, "world_size is '2'"),
        ({"chunk_size_gb": True}, "chunk_size_gb is True"),
        ({"chunk_size_gb": 0}, "chunk_size_gb is 0"),
        ({"chunk_size_gb": "12GB"}, "chunk_size_gb is '12GB'"),
        ({"chunk_size_gb": float("nan")}, "chunk_size_gb is nan"),
        ({"device": "tpu"}, "'tpu'"),
        ({"rank": 2, "world_size": 2}, "rank"),
    ],
)
def test_bad_input_says_what_is_allowed(path, options, words):
    with pytest.raises(InputError) as caught:
        ChunkDataLoader(path, **{"device": "cpu", **options})
    assert words in str(caught.value)
    assert caught.value.allowed


def test_numbers_of_numpy_are_numbers(path):
    numpys = {
        "batch_size": np.int64(4),
        "chunk_size_gb": np.float32(1),
        "seed": np.int32(3),
        "rank": np.int64(1),
        "world_size": np.uint8(2),
    }
    plain = {name: value.item() for name, value in numpys.items()}
    orders = []
    for options in (numpys, plain):
        with ChunkDataLoader(path, device="cpu", shuffle=True, **options) as loader:
            assert (loader.batch_size, type(loader.batch_size)) == (4, int)
            orders.append(rows_of(loader))
    assert orders[0] == orders[1]
    assert samples_that_fit(np.int64(12), 240_624) == samples_that_fit(12, 240_624) == 53_547


def test_files_without_the_two_arrays_are_named(tmp_path):
    path = tmp_path / "other.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((4, 2))
        file["targets"] = np.zeros(4)
    with pytest.raises(InputError, match=r"no dense field 'features'; it has[\s\S]*fields="):
        ChunkDataLoader(path, device="cpu")
    with pytest.raises(StoreError, match="missing"):
        ChunkDataLoader(tmp_path / "missing.h5", device="cpu")
    empty = write(tmp_path / "empty.h5", np.zeros((0, 3), "f4"), np.zeros(0, "f4"))
    with pytest.raises(InputError, match="holds no samples"):
        ChunkDataLoader(empty, device="cpu")


def test_what_people_give_a_dataloader_is_answered(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["features"], file["targets"] = np.zeros((9, 2, 3), "f4"), np.zeros(9, "f4")
    with pytest.warns(UserWarning, match="needs no num_workers"):
        assert len(ChunkDataLoader(path, 4, 1.0, "cpu", num_workers=0)) == 3
    with pytest.raises(InputError, match="a ChunkDataLoader has no argument 'sampler'"):
        ChunkDataLoader(path, 4, 1.0, "cpu", sampler=[1, 2])
