"""`prefetch`: the wrapped loader's batches, sample for sample, and no thread left behind.

`LateEngine` stands in for CUDA: it does every copy as late as a device may, at the moment somebody
waits for it. A slab or a source that is written too early shows as wrong content.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import traceback
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from stoker.errors import InputError
from stoker.loader.background import Background
from stoker.loader.prefetch import Prefetcher, prefetch
from stoker.loader.slabs import CudaEngine, Stager, map_batch

gpu = pytest.mark.gpu
Point = namedtuple("Point", "x y")


class LateMark:
    def __init__(self, engine, upto):
        self.engine, self.upto = engine, upto

    def query(self):
        return False

    def synchronize(self):
        self.engine.waits += 1
        self.engine.run(self.upto)


class LateEngine:
    """Copies happen when somebody waits for them, and not before."""

    def __init__(self):
        self.queue, self.done = [], 0
        self.pins, self.copies, self.waits, self.moves = [], 0, 0, 0
        self.pinned, self.here, self.kept = set(), set(), []
        self.lock = threading.RLock()

    def run(self, upto):
        with self.lock:
            while self.done < upto:
                target, source = self.queue[self.done]
                target.copy_(source)
                self.queue[self.done] = None
                self.done += 1

    def home(self):
        return contextlib.nullcontext()

    def copying(self):
        return contextlib.nullcontext()

    def pin(self, num_bytes):
        memory = torch.full((num_bytes,), 0xAB, dtype=torch.uint8)
        self.pins.append(num_bytes)
        self.claim(memory)
        return memory

    def claim(self, memory):
        self.kept.append(memory)
        self.pinned.add(memory.untyped_storage().data_ptr())

    def place(self, tensor):
        self.kept.append(tensor)
        self.here.add(tensor.untyped_storage().data_ptr())
        return tensor

    def is_pinned(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.pinned

    def is_here(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.here

    def empty_like(self, tensor):
        return self.place(torch.empty_like(tensor))

    def copy(self, target, source):
        assert self.is_pinned(source), "an asynchronous copy from pageable memory"
        assert self.is_here(target)
        with self.lock:
            self.copies += 1
            self.queue.append((target, source))

    def mark_copies(self):
        return LateMark(self, len(self.queue))

    def mark_user(self):
        return LateMark(self, 0)

    def move(self, thing):
        self.moves += 1
        return thing.clone() if isinstance(thing, torch.Tensor) else thing.to("cpu")

    def receive(self, tensors, marks):
        assert all(tensor.layout is torch.strided for tensor in tensors), "record_stream refuses it"
        for mark in marks:
            self.run(mark.upto)


def late(loader, **options):
    engine = LateEngine()
    return Prefetcher(loader, "cpu", engine=lambda: engine, **options), engine


def num_threads():
    return sum(thread.name.startswith("stoker-prefetch") for thread in threading.enumerate())


def settled(collect=False):
    for _ in range(6000):
        if collect:
            # Again and again: it does nothing while another thread is inside a collection.
            gc.collect()
        if not num_threads():
            return True
        time.sleep(0.01)
    return False


def table(n=103, width=7):
    return TensorDataset(torch.arange(n * width).reshape(n, width), torch.arange(n))


both_ways = pytest.mark.parametrize("background", [True, False], ids=["thread", "next"])


# -- parity ------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_is_the_plain_loader_sample_for_sample(depth, background):
    plain = DataLoader(table(), batch_size=8)
    wrapped, _ = late(plain, depth=depth, background=background)
    assert len(wrapped) == len(plain)
    for _ in range(2):  # two epochs
        batches = list(wrapped)
        assert len(batches) == len(plain)
        for mine, theirs in zip(batches, plain, strict=True):
            assert isinstance(mine, list)
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@both_ways
def test_a_shuffled_loader_draws_the_same_order(background):
    plain = DataLoader(table(), batch_size=8, shuffle=True)
    wrapped, _ = late(plain, background=background)
    torch.manual_seed(7)
    expected = [batch[1].tolist() for batch in plain]
    torch.manual_seed(7)
    assert [batch[1].tolist() for batch in wrapped] == expected


@both_ways
def test_a_loader_that_refills_its_own_buffer_is_not_read_too_late(background):
    def reusing(memory):
        for number in range(50):
            memory.fill_(number)
            yield {"x": memory, "number": number}

    held = list(late(reusing(torch.zeros(1000)), background=background)[0])
    assert [batch["number"] for batch in held] == list(range(50))
    assert all((batch["x"] == batch["number"]).all() for batch in held)


@both_ways
def test_pinned_memory_is_not_staged_and_is_waited_for_before_the_next_batch(background):
    engine = LateEngine()
    memory = torch.zeros(300_000)
    engine.claim(memory)

    def reusing():
        for number in range(20):
            memory.fill_(number)
            yield memory

    held = list(Prefetcher(reusing(), "cpu", engine=lambda: engine, background=background))
    assert engine.pins == []
    assert engine.copies == 20
    assert all((batch == number).all() for number, batch in enumerate(held))


@both_ways
def test_what_is_on_the_device_is_handed_on_as_it_is(background):
    engine = LateEngine()
    batches = [engine.place(torch.arange(5)) for _ in range(6)]
    received = list(Prefetcher(batches, "cpu", engine=lambda: engine, background=background))
    assert all(mine is theirs for mine, theirs in zip(received, batches, strict=True))
    assert (engine.copies, engine.moves) == (0, 0)


def test_the_cpu_hands_the_loaders_own_batches_on_and_says_why():
    batches = [torch.arange(3), {"x": torch.arange(4)}]
    wrapped = prefetch(batches, "cpu")
    assert all(mine is theirs for mine, theirs in zip(wrapped, batches, strict=True))
    assert "nothing to copy" in wrapped.reason
    assert num_threads() == 0


# -- staging -----------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.lists(st.integers(0, 700), max_size=5), max_size=12),
    num_slabs=st.integers(1, 4),
    slab_bytes=st.sampled_from([256, 512, 4096]),
)
def test_any_sizes_survive_any_slabs(sizes, num_slabs, slab_bytes):
    engine = LateEngine()
    stager = Stager(engine, slab_bytes, num_slabs)
    made = []
    for number, batch in enumerate(sizes):
        tensors = [torch.arange(size, dtype=torch.int32) + 1000 * number for size in batch]
        made.append((stager.stage(tensors), [tensor.clone() for tensor in tensors]))
        for tensor in tensors:
            tensor.fill_(-1)  # the source may change once it is staged
    for staged, expected in made:
        engine.receive(staged.tensors, staged.marks)
        for mine, theirs in zip(staged.batch, expected, strict=True):
            assert torch.equal(mine, theirs)
    assert stager.pinned_bytes <= num_slabs * slab_bytes


def test_slabs_are_pinned_once_whatever_the_number_of_batches():
    engine = LateEngine()
    wrapped = Prefetcher([torch.zeros(5000)] * 200, "cpu", engine=lambda: engine)
    for _ in range(3):
        assert sum(1 for _ in wrapped) == 200
    assert len(engine.pins) == 4
    assert all(size & (size - 1) == 0 for size in engine.pins)
    assert wrapped.pinned_bytes == sum(engine.pins)


def test_slabs_grow_with_the_batches_up_to_their_cap_and_large_batches_flow_through():
    engine = LateEngine()
    stager = Stager(engine, max_slab_bytes=1 << 20)
    for count in (10, 100_000, 100_000, 3_000_000):
        source = torch.randn(count)
        staged = stager.stage(source)
        engine.receive(staged.tensors, staged.marks)
        assert torch.equal(staged.batch, source)
    assert stager.pinned_bytes <= 4 << 20
    assert max(engine.pins) == 1 << 20


def test_host_waits_are_for_slabs_and_old_batches_only():
    """One wait per batch for the memory of the batch four steps back; copies are never awaited."""
    engine = LateEngine()
    for _ in Prefetcher([torch.zeros(10)] * 50, "cpu", engine=lambda: engine, depth=2):
        pass
    assert engine.waits == (50 - 4) + (50 - 4)  # 4 slabs; depth + 2 batches


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(1, 1).expand(5, 7),
        torch.randn(20)[::3],
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.randn(8).bfloat16(),
        torch.tensor([True, False]),
        torch.arange(6, dtype=torch.uint8).view(2, 3)[:, 1:],
        torch.tensor([1, 2, 65535], dtype=torch.uint16),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}".removeprefix("torch."),
)
def test_layouts_and_types(tensor):
    engine = LateEngine()
    staged = Stager(engine).stage(tensor)
    engine.receive(staged.tensors, staged.marks)
    assert staged.batch.dtype == tensor.dtype
    assert torch.equal(staged.batch, tensor)
    if tensor.is_contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else False:
        assert staged.batch.stride() == tensor.stride()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.ones(3, requires_grad=True) * 2,
        lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
    ],
    ids=["coo", "csr", "parameter", "gradient", "packed sequence"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_what_cannot_be_staged_moves_by_its_own_method(make):
    odd, engine = make(), LateEngine()
    staged = Stager(engine).stage((odd, "text"))
    assert (engine.moves, engine.copies) == (1, 0)
    engine.receive(staged.tensors, staged.marks)
    moved, text = staged.batch
    assert text == "text"
    if isinstance(odd, torch.Tensor):
        assert moved.layout == odd.layout
        assert moved.requires_grad == odd.requires_grad
        assert torch.equal(moved.to_dense(), odd.to_dense())
    else:
        assert torch.equal(moved.data, odd.data)


# -- structures --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    note: str


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    parts: list


class Tagged(dict):
    step = 0


def double(leaf):
    return leaf * 2


def test_every_container_keeps_its_type_and_its_other_content():
    tagged = Tagged(x=torch.ones(2))
    tagged.step = 9
    batch = {
        "tuple": (torch.ones(1), "a", 3, None),
        "list": [torch.ones(1), [torch.ones(2)]],
        "point": Point(torch.ones(1), 5),
        "ordered": OrderedDict(a=torch.ones(1), b=b"raw"),
        "proxy": MappingProxyType({"x": torch.ones(1)}),
        "frozen": Frozen(torch.ones(1), "kept"),
        "slotted": Slotted(torch.ones(1), [torch.ones(1)]),
        "tagged": tagged,
    }
    moved = map_batch(batch, double)
    assert moved["tuple"][0].item() == 2
    assert moved["tuple"][1:] == ("a", 3, None)
    assert moved["list"][1][0].tolist() == [2, 2]
    assert isinstance(moved["point"], Point)
    assert moved["point"].y == 5
    assert isinstance(moved["ordered"], OrderedDict)
    assert list(moved["ordered"]) == ["a", "b"]
    assert moved["proxy"]["x"].item() == 2
    assert isinstance(moved["frozen"], Frozen)
    assert (moved["frozen"].x.item(), moved["frozen"].note) == (2, "kept")
    assert moved["slotted"].parts[0].item() == 2
    assert isinstance(moved["tagged"], Tagged)
    assert moved["tagged"].step == 9
    assert batch["tuple"][0].item() == 1, "the loader's own batch is not touched"


def test_what_has_no_tensor_comes_back_as_the_same_object():
    import numpy as np

    for thing in ("text", 3, None, [1, [2]], {"a": (1, 2)}, np.ones(3), object(), int, Point(1, 2)):
        assert map_batch(thing, double) is thing


# -- passing through ---------------------------------------------------------------------------


def test_the_wrapped_loaders_attributes_are_found():
    plain = DataLoader(table(), batch_size=8)
    wrapped = prefetch(plain, "cpu")
    assert wrapped.dataset is plain.dataset
    assert wrapped.sampler is plain.sampler
    assert wrapped.batch_size == 8
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = wrapped.nothing_like_it
    with pytest.raises(TypeError):
        len(prefetch((x for x in ()), "cpu"))


def test_set_epoch_reaches_the_sampler_and_changes_the_order():
    data = table()
    sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=True)
    wrapped, _ = late(DataLoader(data, batch_size=8, sampler=sampler))
    orders = []
    for epoch in (0, 1, 0):
        wrapped.set_epoch(epoch)
        orders.append([i for batch in wrapped for i in batch[1].tolist()])
    assert orders[0] == orders[2] != orders[1]
    prefetch([1], "cpu").set_epoch(3)  # nobody to tell is no error


class Stateful:
    """Knows how far it is, like stoker.Loader or torchdata's StatefulDataLoader."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 10:
            self.position += 1
            yield torch.tensor(self.position - 1)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@both_ways
def test_the_state_is_of_the_batch_you_have_seen_not_of_the_one_fetched(background):
    loader = Stateful()
    wrapped, _ = late(loader, depth=3, background=background)
    assert wrapped.state_dict() == {"position": 0}
    seen = []
    for batch in wrapped:
        seen.append(batch.item())
        if len(seen) == 4:
            break
    del batch
    state = wrapped.state_dict()
    assert state == {"position": 4}
    wrapped.load_state_dict(state)
    assert loader.position == 4
    assert [batch.item() for batch in wrapped] == [4, 5, 6, 7, 8, 9]
    assert wrapped.state_dict() == {"position": 0}


# -- ends --------------------------------------------------------------------------------------


def failing(at):
    for number in range(at):
        yield torch.tensor(number)
    raise KeyError("row 17 of shard 3")


@both_ways
def test_an_error_arrives_behind_the_batches_before_it_with_its_traceback(background):
    wrapped, _ = late(failing(5), background=background)
    iterator = iter(wrapped)
    assert [next(iterator).item() for _ in range(5)] == list(range(5))
    with pytest.raises(KeyError, match="row 17 of shard 3") as caught:
        next(iterator)
    assert "in failing" in "".join(traceback.format_exception(caught.value))
    assert "took batch 5 from generator" in "".join(caught.value.__notes__)
    with pytest.raises(StopIteration):
        next(iterator)
    assert settled()


def test_a_workers_error_arrives_too():
    class Bad(TensorDataset):
        def __getitem__(self, index):
            if index == 11:
                raise RuntimeError("sample 11 is rotten")
            return super().__getitem__(index)

    plain = DataLoader(
        Bad(torch.arange(20)), batch_size=4, num_workers=1, multiprocessing_context="fork"
    )
    wrapped, _ = late(plain)
    seen = []
    with pytest.raises(RuntimeError, match="sample 11 is rotten") as caught:
        seen.extend(wrapped)
    assert settled()
    # Torch's iterator goes with it: one that the collector finds waits 5 s for its worker.
    caught.value.__traceback__ = None
    del caught


def endless():
    while True:
        yield torch.zeros(100)


@pytest.mark.parametrize("how", ["break", "close", "collect", "cycle", "context"])
def test_the_thread_ends(how):
    wrapped, engine = late(endless())
    iterator = iter(wrapped)
    next(iterator)
    next(iterator)
    assert num_threads() == 1
    if how == "break":
        for _ in iterator:
            break
        del iterator
    elif how == "close":
        wrapped.close()
        with pytest.raises(InputError, match="closed after 2 batches"):
            next(iterator)
    elif how == "collect":
        del iterator, wrapped
    elif how == "cycle":
        iterator.me = iterator
        del iterator
    else:
        with wrapped:
            pass
    assert settled(collect=how == "cycle")
    assert len(engine.pins) <= 4


def test_an_iteration_that_never_began_has_no_thread():
    wrapped, _ = late(endless())
    iterator = iter(wrapped)
    assert num_threads() == 0
    del iterator
    wrapped.close()


def test_the_loaders_iterator_is_let_go_when_the_iteration_ends():
    closed = threading.Event()

    def watched():
        try:
            yield from endless()
        finally:
            closed.set()

    loader = watched()
    wrapped, _ = late([0])
    wrapped.loader = type("Once", (), {"__iter__": lambda self: watched()})()
    del loader
    for _ in wrapped:
        break
    gc.collect()
    assert closed.wait(60)


def test_after_a_break_the_next_epoch_is_whole_and_uses_the_same_slabs():
    wrapped, engine = late(DataLoader(table(), batch_size=8))
    for _ in range(5):
        for _ in wrapped:
            break
        assert len(list(wrapped)) == 13
    assert len(engine.pins) <= 4


def test_two_iterations_at_once_do_not_mix():
    wrapped, _ = late(DataLoader(table(), batch_size=8))
    for left, right in zip(wrapped, wrapped, strict=True):
        assert torch.equal(left[0], right[0])


def test_it_never_fetches_further_than_its_depth():
    fetched = []

    def counting():
        for number in range(30):
            fetched.append(number)
            yield torch.tensor(number)

    wrapped, _ = late(counting(), depth=2)
    for taken, _ in enumerate(wrapped, start=1):
        time.sleep(0.002)
        assert len(fetched) <= taken + 2 + 1


def test_a_thread_lost_in_a_fork_is_an_error_and_no_hang():
    work = Background(lambda: 1, 1, "stoker-prefetch-test")
    work._thread = threading.Thread(target=lambda: None)
    work._thread.start()
    work._thread.join()
    with pytest.raises(Exception, match="is gone"):
        work.take()


def test_the_interpreter_exits_with_an_iteration_open():
    import subprocess
    import sys

    code = (
        "import itertools\nfrom stoker.loader.background import Background\n"
        "work = Background(itertools.count().__next__, 2, 'x')\nprint(work.take())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


class Ordered(list):
    """Looks like a stoker.Loader."""

    def order_digest(self):
        return ""


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: prefetch(5, "cpu"), "cannot be iterated"),
        (lambda: prefetch("a.h5"), "the path 'a.h5'"),
        (lambda: prefetch(Ordered([]), "cpu"), "already on their device"),
        (lambda: prefetch([], "cpu", depth=0), "depth is 0"),
        (lambda: prefetch([], "cpu", depth=1.5), "depth is 1.5"),
        (lambda: prefetch([], "gpu"), "'gpu' is no device"),
        (lambda: prefetch([], "meta"), "'meta'"),
        (lambda: prefetch([], "cuda:99"), "torch sees"),
    ],
)
def test_bad_input_says_what_is_allowed(make, words):
    with pytest.raises(InputError, match=words) as caught:
        make()
    assert caught.value.allowed
    assert caught.value.fix


def test_the_device_is_the_first_gpu_or_the_cpu():
    wanted = "cuda:0" if torch.cuda.is_available() else "cpu"
    batches = [torch.arange(3.0)] * 2
    with prefetch(batches) as loader:
        assert str(loader.device) == wanted
        assert [batch.tolist() for batch in loader] == [[0.0, 1.0, 2.0]] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_a_gpu_says_so():
    with pytest.raises(InputError, match=r"torch sees 0 CUDA devices[\s\S]*device='cpu'"):
        prefetch([], "cuda")


# -- the same on a GPU -------------------------------------------------------------------------


def busy(milliseconds=2):
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def stress(num_batches, reuse):
    """Batches of ever different shapes; `reuse` writes all of them into the same buffers."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.empty(4 << 20)
    for number in range(num_batches):
        count = int(torch.randint(1, 3 << 20, (), generator=generator))
        x = pool[:count] if reuse else torch.empty(count)
        x.fill_(number)
        yield {
            "x": x,
            "y": torch.full((number % 5,), number),
            "number": number,
            "name": f"b{number}",
        }


@gpu
@both_ways
@pytest.mark.parametrize("reuse", [False, True])
def test_gpu_content_under_stress_with_a_consumer_that_holds_batches(reuse, background):
    kept = []
    for batch in prefetch(stress(120, reuse), "cuda", depth=3, background=background):
        assert batch["x"].is_cuda
        busy(1)
        if batch["number"] % 3 == 0:
            kept.append(batch)
        else:  # last use is queued behind the sleep, then the memory is let go
            kept.append((batch["x"] != batch["number"]).any())
    for number, item in enumerate(kept):
        if number % 3 == 0:
            assert (item["x"] == number).all()
            assert (item["y"] == number).all()
            assert item["name"] == f"b{number}"
        else:
            assert not item.item(), number


@gpu
@both_ways
def test_gpu_memory_stays_bounded_when_the_host_runs_ahead(background):
    num_bytes, depth = 8 << 20, 2
    source = torch.zeros(num_bytes // 4)
    torch.cuda.synchronize()
    # "active" counts what was let go while kernels still read it; "allocated" does not.
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    for batch in prefetch([source] * 60, "cuda", depth=depth, background=background):
        busy(3)
        batch.add_(1)
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"] - before
    assert peak <= (depth + 2 + 1) * num_bytes


@gpu
def test_gpu_a_batch_is_complete_for_whoever_uses_it_at_once():
    copies = torch.cuda.Stream()
    stager = Stager(CudaEngine(torch.device("cuda", 0), copies))
    for number in range(1, 10):
        with torch.cuda.stream(copies):
            busy(20)  # the copy comes late
        staged = stager.stage(torch.full((100_000,), float(number)))
        stager.engine.receive(staged.tensors, staged.marks)
        assert (staged.batch == number).all()


@gpu
def test_gpu_slabs_are_not_filled_before_a_late_device_has_read_them():
    copies = torch.cuda.Stream()
    stager = Stager(CudaEngine(torch.device("cuda", 0), copies), 64 << 10, 2)
    for _ in range(5):
        with torch.cuda.stream(copies):
            busy(20)
        sources = [torch.full((10_000,), float(number)) for number in range(8)]
        staged = [stager.stage(source) for source in sources]
        for number, one in enumerate(staged):
            stager.engine.receive(one.tensors, one.marks)
            assert (one.batch == number).all()


@gpu
@both_ways
def test_gpu_pinned_sources_that_are_refilled(background):
    memory = torch.empty(2 << 20, pin_memory=True)

    def reusing():
        for number in range(60):
            memory.fill_(number)
            yield memory

    held = list(prefetch(reusing(), "cuda", background=background))
    assert all((batch == number).all() for number, batch in enumerate(held))


@gpu
def test_gpu_on_a_side_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sums = []
        for batch in prefetch((torch.full((1 << 20,), n) for n in range(40)), "cuda"):
            busy(1)
            sums.append(batch.sum())
        assert [value.item() for value in sums] == [n << 20 for n in range(40)]


@gpu
def test_gpu_odd_tensors_and_device_tensors():
    batch = (torch.eye(4).to_sparse(), torch.ones(3, device="cuda"), Frozen(torch.ones(2), "n"))
    for sparse, here, frozen in prefetch([batch] * 5, "cuda"):
        assert sparse.is_cuda
        assert sparse.to_dense().sum().item() == 4
        assert here is batch[1]
        assert frozen.x.is_cuda


@gpu
def test_gpu_parity_with_a_dataloader_of_worker_processes():
    plain = DataLoader(
        table(2000, 50), batch_size=64, num_workers=2, multiprocessing_context="forkserver"
    )
    count = 0
    for mine, theirs in zip(prefetch(plain, "cuda"), plain, strict=True):
        count += 1
        assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, theirs, strict=True))
    assert count == len(plain)
