"""The S2 family: the chapter's names, and each of its bugs done right."""

from __future__ import annotations

import gc
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.compat.basics import (
    BatchSampler,
    Compose,
    CustomDataset,
    DataLoader,
    Dataset,
    GradientAccumulator,
    ImageDataset,
    IndexOutOfBounds,
    Normalize,
    ParallelDataLoader,
    PinnedMemoryAllocator,
    PipelinedDataLoader,
    PrefetchBuffer,
    PrefetchingDataLoader,
    RandomCrop,
    RandomHorizontalFlip,
    RandomSampler,
    SampleError,
)
from stoker.errors import InputError

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def numbers(n=10):
    return CustomDataset(torch.arange(n) * 10, torch.arange(n))


class Rotten(CustomDataset):
    """Fails on sample 7."""

    def get(self, index):
        if index == 7:
            raise OSError("disk says no")
        return super().get(index)


def num_threads(prefix):
    return sum(thread.name.startswith(prefix) for thread in threading.enumerate())


def ended(prefix):
    for _ in range(6000):
        if not num_threads(prefix):
            return True
        time.sleep(0.01)
    return False


# -- S2-1 datasets -------------------------------------------------------------------------------


def test_dataset_len_is_empty_and_get():
    dataset = numbers()
    assert len(dataset) == 10
    assert not dataset.is_empty()
    assert numbers(0).is_empty()
    assert dataset.get(3)[0].item() == dataset[3][0].item() == 30
    with pytest.raises(TypeError, match="abstract"):
        Dataset()


@pytest.mark.parametrize("index", [10, 99, -1])
def test_index_out_of_bounds_is_an_index_error_with_the_documented_text(index):
    with pytest.raises(IndexError, match="Index out of bounds") as caught:
        numbers().get(index)
    assert isinstance(caught.value, IndexOutOfBounds)
    assert "0 to 9" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).given == caught.value.given


@pytest.mark.parametrize(
    "index", [slice(1, 3), 1.5, "1", None, np.array([1, 2])], ids=lambda index: type(index).__name__
)
def test_an_index_that_is_no_whole_number_says_what_is_allowed(index):
    with pytest.raises(InputError, match="the index is") as caught:
        numbers()[index]
    assert "Subset" in caught.value.fix
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("index", [np.int64(3), torch.tensor(3)])
def test_whole_numbers_of_any_kind_are_indices(index):
    assert CustomDataset(list(range(10)), list(range(10)))[index] == (3, 3)


def test_what_the_message_says_to_type_works():
    subset = torch.utils.data.Subset(numbers(), range(1, 3))
    assert [int(label) for _, label in (subset[k] for k in range(len(subset)))] == [1, 2]


def test_iterating_a_dataset_ends():
    assert [int(label) for _, label in numbers(4)] == [0, 1, 2, 3]


def test_image_dataset_from_arrays_splits_the_first_axis():
    data = np.arange(4 * 3 * 2 * 2, dtype=np.uint8).reshape(4, 3, 2, 2)
    dataset = ImageDataset.from_arrays(data, [0, 1, 2, 3])
    image, label = dataset.get(2)
    assert label == 2
    np.testing.assert_array_equal(image, data[2])
    assert not np.shares_memory(image, data)  # the chapter clones


def test_the_chapters_own_example():
    dataset = CustomDataset(torch.randn(1000, 3, 32, 32), torch.randint(0, 10, (1000,)))
    batches = list(DataLoader(dataset, batch_size=32, shuffle=True))
    assert len(batches) == 32
    assert batches[0][0].shape == (32, 3, 32, 32)
    assert batches[-1][0].shape == (8, 3, 32, 32)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CustomDataset([1, 2], [1]), "2 items but 1 labels"),
        (lambda: ImageDataset([np.zeros((3, 2, 2)), np.zeros((3, 4, 4))], [0, 1]), "one shape"),
        (lambda: ImageDataset([np.zeros((2, 2))], [0]), "channels, height, width"),
        (lambda: ImageDataset.from_arrays(np.zeros((4, 2, 2)), [0] * 4), "channel axis"),
        (RandomSampler, "one of the two"),
        (lambda: RandomSampler(10, num_samples=10), "one of the two"),
        (lambda: RandomSampler(10).sample(11), "11 of 10 samples"),
        (lambda: RandomSampler(10).sample(2.5), "n is 2.5"),
        (lambda: RandomSampler(10).sample(-1), "n is -1"),
        (lambda: RandomSampler(num_samples=5.5), "num_samples is 5.5"),
        (lambda: RandomSampler(num_samples=-1), "num_samples is -1"),
        (lambda: RandomSampler(num_samples=True), "num_samples is True"),
        (lambda: RandomSampler(-1), "num_samples is -1"),
        (lambda: RandomSampler(5.5), "data_source is 5.5, which has no length"),
        (lambda: RandomSampler(10, seed=-1), "seed is -1"),
        (lambda: RandomSampler(10, seed=1.5), "seed is 1.5"),
        (lambda: RandomSampler(10).set_epoch(-1), "epoch is -1"),
        (lambda: RandomSampler(10).set_epoch("1"), "epoch is '1'"),
        (lambda: DataLoader(numbers(), seed=-1), "seed is -1"),
        (lambda: ParallelDataLoader(numbers()).set_epoch(-1), "epoch is -1"),
        (lambda: BatchSampler(range(3), True), "batch_size is True"),
        (lambda: BatchSampler(range(3), 0), "batch_size is 0"),
        (lambda: BatchSampler(range(3), 2.5), "batch_size is 2.5"),
        (lambda: DataLoader(numbers(), num_workers="4-6"), "num_workers is '4-6'"),
        (lambda: ParallelDataLoader(numbers(), prefetch_factor=0), "prefetch_factor is 0"),
        (lambda: PrefetchBuffer(0), "capacity is 0"),
        (lambda: PrefetchBuffer(1).push(None), "None was pushed"),
        (lambda: PinnedMemoryAllocator("cpu").alloc_pinned(-1), "size is -1"),
        (lambda: PipelinedDataLoader("cpu", 0), "num_streams is 0"),
        (lambda: PipelinedDataLoader("cpu").synchronize(3), "batch 3 is not under way"),
        (lambda: GradientAccumulator(0), "steps is 0"),
    ],
)
def test_bad_input_says_what_is_allowed(make, words):
    with pytest.raises(InputError) as caught:
        make()
    assert words in str(caught.value)
    assert caught.value.allowed


# -- S2-2, S2-3 samplers -------------------------------------------------------------------------


@given(n=st.integers(0, 60), batch=st.integers(1, 20), drop=st.booleans(), shuffle=st.booleans())
def test_batches_are_consecutive_pieces_of_one_permutation(n, batch, drop, shuffle):
    sampler = RandomSampler(num_samples=n, shuffle=shuffle, seed=3)
    made = BatchSampler(sampler, batch, drop)
    batches = made.batches()
    assert len(made) == len(batches) == (n // batch if drop else -(-n // batch))
    flat = [index for indices in batches for index in indices]
    assert len(set(flat)) == len(flat) == (n // batch * batch if drop else n)
    assert all(len(indices) == batch for indices in batches[:-1])
    if not shuffle:
        assert flat == list(range(len(flat)))


def test_orders_come_from_seed_and_epoch_alone():
    one, two = RandomSampler(numbers(100), seed=5), RandomSampler(num_samples=100, seed=5)
    first, second = one.sample(), one.sample()
    assert first != second
    assert [two.sample(), two.sample()] == [first, second]
    two.set_epoch(1)
    assert list(two) == second
    assert RandomSampler(100, seed=6).sample() != first
    assert RandomSampler(100, shuffle=False).sample(3) == [0, 1, 2]


def test_sample_n_gives_n_different_indices():
    drawn = RandomSampler(num_samples=50).sample(20)
    assert len(set(drawn)) == 20
    assert len(RandomSampler(num_samples=50)) == 50


@pytest.mark.parametrize("number", [np.int64(5), np.uint8(5), np.array(5), torch.tensor(5)])
def test_samplers_take_whole_numbers_of_any_kind(number):
    expected = RandomSampler(5, seed=5)
    expected.set_epoch(5)
    for sampler in (RandomSampler(number, seed=number), RandomSampler(num_samples=number, seed=5)):
        sampler.set_epoch(number)
        assert (len(sampler), type(len(sampler))) == (5, int)
        expected.set_epoch(5)
        assert sampler.sample(number) == expected.sample()


def test_a_one_axis_array_is_a_dataset_not_a_number():
    assert len(RandomSampler(torch.tensor([7]))) == len(RandomSampler(np.array([7]))) == 1


def test_an_error_of_a_datasets_own_length_is_not_hidden():
    class Broken:
        def __len__(self):
            raise TypeError("the index file is torn")

    with pytest.raises(TypeError, match="the index file is torn"):
        RandomSampler(Broken())


def test_sizes_of_numpy_are_sizes():
    four = np.int64(4)
    assert BatchSampler(range(10), four).batches() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(DataLoader(numbers(10), four, num_workers=np.int64(0))) == 3
    assert len(list(ParallelDataLoader(numbers(10), four, np.int64(2), np.int64(1)))) == 3
    assert PrefetchBuffer(four).capacity == 4
    assert PinnedMemoryAllocator("cpu").alloc_pinned(four).numel() == 4


# -- S2-4 DataLoader -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_every_sample_once_in_every_epoch(num_workers):
    loader = DataLoader(
        numbers(23), 4, shuffle=True, num_workers=num_workers, multiprocessing_context="fork"
    )
    for _ in range(2):
        labels = [int(label) for _, batch in loader.iter() for label in batch]
        assert sorted(labels) == list(range(23))
    assert len(loader) == 6


def test_batches_are_fixed_at_iter():
    loader = DataLoader(numbers(40), 4, shuffle=True)
    first, second = loader.iter(), loader.iter()
    loader.set_epoch(0)
    assert [b[1].tolist() for b in first] == [b[1].tolist() for b in loader.iter()]
    loader.set_epoch(1)
    assert [b[1].tolist() for b in second] == [b[1].tolist() for b in loader.iter()]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failing_sample_is_an_error_with_its_index_and_never_a_hole(num_workers):
    loader = DataLoader(
        Rotten(range(12), range(12)), 4, num_workers=num_workers, multiprocessing_context="fork"
    )
    seen = []
    with pytest.raises(SampleError, match="sample 7 of Rotten failed") as caught:
        seen.extend(loader.iter())
    assert "disk says no" in str(caught.value)
    assert len(seen) <= 1
    # Torch's iterator goes with it: one that the collector finds waits 5 s for each worker.
    caught.value.__traceback__ = None
    del caught


# -- S2-5, S2-6, S2-7 transforms -----------------------------------------------------------------

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_normalize_subtracts_the_mean_and_divides_by_the_deviation():
    image = torch.rand(3, 5, 6)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    torch.testing.assert_close(Normalize(MEAN, STD).apply(image), (image - mean) / std)
    with pytest.raises(InputError, match="mean has 3 numbers and the images have 4 channels"):
        Normalize(MEAN, STD).apply(torch.rand(4, 5, 6))


def test_flips_come_as_often_as_asked():
    image = torch.rand(3, 5, 6)
    for p, low, high in ((0.0, 0, 0), (0.5, 30, 70), (1.0, 100, 100)):
        flip = RandomHorizontalFlip(p)
        made = [flip.apply(image) for _ in range(100)]
        flipped = [torch.equal(picture, image.flip(-1)) for picture in made]
        assert low <= sum(flipped) <= high
        kept = [picture for picture, was in zip(made, flipped, strict=True) if not was]
        assert all(torch.equal(picture, image) for picture in kept)


def test_crops_of_the_padded_image_reach_every_corner_and_refuse_what_is_too_large():
    image = torch.ones(1, 3, 3)
    image[0, 1, 1] = 0.5
    crop = RandomCrop(3, padding=1)
    centres = {
        tuple((made == 0.5).nonzero()[0, 1:].tolist())
        for made in (crop.apply(image) for _ in range(200))
    }
    assert centres == {(y, x) for y in range(3) for x in range(3)}
    assert crop.apply(image).min() >= 0.0
    with pytest.raises(InputError, match="a crop of 6x6 from an image of 3x3 with padding 1"):
        RandomCrop(6, padding=1).apply(image)


@pytest.mark.parametrize("kind", [torch.tensor, np.array], ids=["torch", "numpy"])
@pytest.mark.parametrize("shape", [(1, 4, 5), (40, 1, 4, 5)], ids=["image", "batch"])
def test_values_outside_of_the_usual_range_are_transformed_as_those_inside(kind, shape):
    image = torch.arange(20.0).view(1, 4, 5) * 9 - 3
    given = image.expand(shape)
    kept = kind(given.tolist())
    assert torch.equal(torch.as_tensor(Normalize(3.0, 2.0).apply(kept)).float(), (given - 3) / 2)
    with pytest.raises(InputError, match="mean has 2 numbers and the images have 1 channels"):
        Normalize((1, 2), (1, 2)).apply(kept)

    padded = torch.nn.functional.pad(image, (2,) * 4, mode="reflect")
    windows = {
        tuple(window.flatten().tolist())
        for window in padded.unfold(1, 3, 1).unfold(2, 4, 1).flatten(0, 2)
    }
    crop = RandomCrop((3, 4), padding=2, padding_mode="reflect")
    made = torch.as_tensor(crop.apply(kept)).float()
    assert made.shape == (*shape[:-2], 3, 4)
    assert {tuple(one.flatten().tolist()) for one in made.view(-1, 12)} <= windows
    with pytest.raises(InputError, match="a reflected padding of 4 on an image of 4x5"):
        RandomCrop(3, padding=4, padding_mode="reflect").apply(kept)
    with pytest.raises(InputError, match="a crop of 9x9 from an image of 4x5 with padding 1"):
        RandomCrop(9, padding=1).apply(kept)


def test_each_image_of_a_batch_has_draws_of_its_own_whatever_its_values():
    batch = torch.arange(20.0).view(1, 1, 4, 5).repeat(60, 1, 1, 1)
    made = Compose([RandomCrop(3), RandomHorizontalFlip()]).apply(batch)
    seen = {tuple(one.flatten().tolist()) for one in made}
    assert len(seen) > 6, "2 x 3 windows, each both ways"


def test_compose_applies_in_sequence_to_images_of_a_dataset():
    transform = Compose([RandomCrop(32, padding=4), RandomHorizontalFlip(), Normalize(MEAN, STD)])
    made = transform.apply(torch.rand(3, 32, 32))
    assert made.shape == (3, 32, 32)
    black = (0.0 - torch.tensor(MEAN)) / torch.tensor(STD)
    cut = Compose([RandomCrop((1, 1), padding=40), Normalize(MEAN, STD)])
    torch.testing.assert_close(cut.apply(torch.ones(3, 1, 1)).flatten(), black)
    with pytest.raises(InputError, match="the mean colour, not black"):
        Compose([Normalize(MEAN, STD), RandomCrop(32, padding=4)])


# -- S2-13 ParallelDataLoader --------------------------------------------------------------------


@given(
    n=st.integers(0, 40),
    batch=st.integers(1, 9),
    workers=st.integers(1, 4),
    factor=st.integers(1, 4),
)
def test_parallel_keeps_the_order_and_gives_ceil_n_over_b(n, batch, workers, factor):
    loader = ParallelDataLoader(numbers(n), batch, workers, factor)
    batches = list(loader)
    assert len(batches) == len(loader) == -(-n // batch)
    assert [int(label) for _, labels in batches for label in labels] == list(range(n))


def test_parallel_shuffles_and_drops_like_the_others():
    loader = ParallelDataLoader(numbers(10), 3, shuffle=True, drop_last=True, seed=1)
    labels = [int(label) for _, batch in loader for label in batch]
    assert len(labels) == len(set(labels)) == 9
    loader.set_epoch(0)
    assert [int(label) for _, batch in loader for label in batch] == labels


class Meeting(CustomDataset):
    """Every get waits until three threads are inside."""

    def __init__(self, n):
        super().__init__(range(n), range(n))
        self.barrier = threading.Barrier(3, timeout=60)
        self.names = set()

    def get(self, index):
        self.barrier.wait()
        self.names.add(threading.current_thread().name)
        return super().get(index)


def test_parallel_really_uses_its_workers_even_within_one_batch():
    dataset = Meeting(9)
    assert len(list(ParallelDataLoader(dataset, 9, num_workers=3, prefetch_factor=1))) == 1
    assert len(dataset.names) == 3


@pytest.mark.parametrize("factor", [1, 3])
def test_parallel_is_bounded_in_total(factor):
    asked = []

    class Counting(CustomDataset):
        def get(self, index):
            asked.append(index)
            return super().get(index)

    loader = ParallelDataLoader(Counting(range(40), range(40)), 2, 4, factor)
    for taken, _ in enumerate(loader, start=1):
        time.sleep(0.01)
        assert len(asked) <= 2 * (taken + factor)
    assert len(asked) == 40


def test_parallel_stops_when_the_receiver_goes_away():
    asked = []

    class Slow(CustomDataset):
        def get(self, index):
            asked.append(index)
            time.sleep(0.001)
            return super().get(index)

    for _ in ParallelDataLoader(Slow(range(10_000), range(10_000)), 4, 2, 2):
        break
    gc.collect()
    assert ended("stoker-parallel")
    assert len(asked) <= 4 * 3 + 2


def test_parallel_names_the_failing_sample_and_ends():
    with pytest.raises(SampleError, match="sample 7 of Rotten") as caught:
        list(ParallelDataLoader(Rotten(range(12), range(12)), 3))
    assert isinstance(caught.value.__cause__, OSError)
    assert ended("stoker-parallel")


# -- S2-14 prefetching ---------------------------------------------------------------------------


def test_prefetch_buffer_is_a_bounded_queue():
    buffer = PrefetchBuffer(2)
    assert buffer.pop() is None
    assert buffer.push("a")
    assert buffer.push("b")
    assert buffer.is_full()
    assert not buffer.push("c")
    assert len(buffer) == 2
    assert [buffer.pop(), buffer.pop(), buffer.pop()] == ["a", "b", None]
    assert not buffer.is_full()


def test_prefetch_buffer_under_many_threads_loses_and_repeats_nothing():
    buffer, got = PrefetchBuffer(3), []
    done = threading.Event()

    def produce(start):
        for item in range(start, start + 100):
            while not buffer.push(item):
                time.sleep(0)

    def consume():
        while not done.is_set() or len(buffer):
            if (item := buffer.pop()) is not None:
                got.append(item)

    producers = [threading.Thread(target=produce, args=(k * 100,)) for k in range(4)]
    consumers = [threading.Thread(target=consume) for _ in range(2)]
    for thread in producers + consumers:
        thread.start()
    for thread in producers:
        thread.join()
    done.set()
    for thread in consumers:
        thread.join()
    assert sorted(got) == list(range(400))


def test_prefetching_loader_gives_every_batch_then_none_then_the_next_epoch():
    loader = PrefetchingDataLoader(range(5), prefetch_size=2)
    for _ in range(2):
        assert [loader.next_batch() for _ in range(6)] == [0, 1, 2, 3, 4, None]
    assert list(loader) == [0, 1, 2, 3, 4]
    assert len(loader) == 5
    assert ended("stoker-prefetching")


def test_prefetching_loader_raises_behind_the_batches_before():
    def bad():
        yield 1
        raise ValueError("torn page")

    loader = PrefetchingDataLoader(bad())
    assert loader.next_batch() == 1
    with pytest.raises(ValueError, match="torn page"):
        loader.next_batch()
    assert ended("stoker-prefetching")


def test_prefetching_loader_ends_with_its_owner():
    loader = PrefetchingDataLoader(iter(int, 1))
    assert loader.next_batch() == 0
    del loader
    gc.collect()
    assert ended("stoker-prefetching")


# -- S2-9, S2-10 pinned memory -------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_alloc_pinned_and_copy(device):
    allocator = PinnedMemoryAllocator(device)
    host = allocator.alloc_pinned(1000)
    host.copy_(torch.arange(1000))
    assert host.is_pinned() == (device == "cuda")
    stream = torch.cuda.Stream() if device == "cuda" else None
    copy = allocator.copy_to_device_async(host, stream)
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
        stream.synchronize()
    host.zero_()
    assert copy.device.type == device
    assert torch.equal(copy.cpu(), torch.arange(1000, dtype=torch.float32))
    assert ("pinned for" in allocator.reason) == (device == "cuda")


@gpu
def test_a_pageable_source_is_refused():
    with pytest.raises(InputError, match="cannot be asynchronous"):
        PinnedMemoryAllocator("cuda").copy_to_device_async(torch.zeros(4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("make", [PinnedMemoryAllocator, PipelinedDataLoader])
def test_cuda_without_a_gpu_says_so(make):
    with pytest.raises(InputError, match=r"torch sees 0 CUDA devices[\s\S]*device='cpu'"):
        make()


@pytest.mark.parametrize("device", DEVICES)
def test_pipelined_loader_overlaps_and_trains_like_a_plain_loop(device):
    torch.manual_seed(0)
    batches = [(torch.randn(16, 4), torch.randn(16, 1)) for _ in range(12)]

    def train(feed):
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in feed:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return model.weight.detach().cpu()

    def pipelined():
        loader = PipelinedDataLoader(device, num_streams=2)
        loader.load_batch_async(0, batches[0])
        for k in range(len(batches)):
            if k + 1 < len(batches):
                loader.load_batch_async(k + 1, batches[k + 1])
            yield loader.synchronize(k)

    plain = train((x.to(device), y.to(device)) for x, y in batches)
    assert torch.equal(train(pipelined()), plain)


@pytest.mark.parametrize("device", DEVICES)
def test_pipelined_loader_lets_a_batch_be_reused_at_once(device):
    loader = PipelinedDataLoader(device)
    x, y, label = torch.zeros(5), torch.zeros(3, dtype=torch.int64), "first"
    loader.load_batch_async(0, {"x": x, "parts": [(y, label)]})
    x.fill_(1)
    y.fill_(1)
    loader.load_batch_async(1, {"x": x, "parts": [(y, "second")]})
    x.fill_(2)
    y.fill_(2)
    for number, name in enumerate(("first", "second")):
        batch = loader.synchronize(number)
        assert batch["x"].device.type == device
        assert batch["x"].tolist() == [number] * 5
        assert batch["parts"][0][0].tolist() == [number] * 3
        assert batch["parts"][0][1] == name


def test_pipelined_loader_on_the_cpu_copies_what_moves_by_its_own_method():
    source, sparse = torch.ones(3), torch.eye(2).to_sparse()
    packed = torch.nn.utils.rnn.pack_sequence([source, torch.ones(2)])
    grown = torch.ones(2, requires_grad=True) * 3
    loader = PipelinedDataLoader("cpu")
    loader.load_batch_async(0, (packed, sparse, grown))
    packed.data.zero_()
    sparse.values().zero_()
    mine, mine_sparse, mine_grown = loader.synchronize(0)
    assert type(mine) is type(packed)
    assert mine.data.sum().item() == 5
    assert mine_sparse.to_dense().sum().item() == 2
    assert mine_grown.requires_grad


def test_pipelined_loader_refuses_more_than_it_was_given_room_for():
    loader = PipelinedDataLoader("cpu", num_streams=2)
    loader.load_batch_async(0, torch.zeros(1))
    loader.load_batch_async(1, torch.zeros(1))
    with pytest.raises(InputError, match=r"synchronize\(0\) first"):
        loader.load_batch_async(2, torch.zeros(1))
    loader.synchronize(0)
    loader.load_batch_async(2, torch.zeros(1))


# -- S2-12 accumulation --------------------------------------------------------------------------


@pytest.mark.parametrize(("num_batches", "expected"), [(10, [4, 8, 10]), (8, [4, 8]), (3, [3])])
def test_every_window_of_an_epoch_updates_the_last_one_too(num_batches, expected):
    accumulator = GradientAccumulator(4, num_batches)
    for _ in range(2):
        updates = [k for k in range(1, num_batches + 1) if accumulator.should_update()]
        assert updates == expected


def test_without_the_number_of_batches_full_windows_update():
    accumulator = GradientAccumulator(4)
    assert [accumulator.should_update() for _ in range(9)] == [False, False, False, True] * 2 + [
        False
    ]


@given(steps=st.integers(1, 5), num_batches=st.integers(1, 12))
def test_the_gradient_is_that_of_one_large_batch(steps, num_batches):
    data = torch.arange(num_batches * 3, dtype=torch.float64).view(num_batches, 3)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    accumulator = GradientAccumulator(steps, num_batches)
    start = 0
    for number, batch in enumerate(data):
        accumulator.scale_loss((weight * batch).mean()).backward()
        if accumulator.should_update():
            assert weight.grad.item() == pytest.approx(data[start : number + 1].mean().item())
            weight.grad, start = None, number + 1
    assert start == num_batches
