"""Streams, events and pinned slabs without a GPU, for what the uploader does with its threads.

A stream is a thread that does in order what is put there; a copy reads its slab when its turn comes, so that
a slab that was filled too early, or a copy on the wrong stream, gives wrong data.
"""

from __future__ import annotations

import queue
import random
import threading
import time

import numpy as np
import torch

from stoker.loader import staging


class FakeStream:
    """Does one thing after the other, in a thread of its own."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work) -> None:
        self._work.put(work)

    def wait_event(self, event: FakeEvent) -> None:
        self.put(event.synchronize)

    def end(self) -> None:
        self.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class FakeEvent:
    """Set when its stream comes to where it was recorded."""

    fail = False

    def __init__(self, blocking: bool = False) -> None:
        self._reached = threading.Event()
        self._reached.set()

    def record(self, stream: FakeStream) -> None:
        if FakeEvent.fail:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._reached = threading.Event()
        stream.put(self._reached.set)

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        assert self._reached.wait(60), "an event that never comes"


class FakeSlab(staging._Slab):
    """Ordinary memory."""

    def __init__(self, num_bytes: int, _device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._bytes = np.zeros(num_bytes, np.uint8)
        self.memory = torch.from_numpy(self._bytes)
        self.free = FakeEvent()

    def release(self) -> None:
        self.free.synchronize()


class FakeTarget:
    """A tensor on the other side: `copy_` only queues, on the thread's current stream."""

    def __init__(self, tensor: torch.Tensor, fake: FakeCuda) -> None:
        self.tensor = tensor
        self._fake = fake

    def view(self, *shape) -> FakeTarget:
        return FakeTarget(self.tensor.view(*shape), self._fake)

    def __getitem__(self, rows) -> FakeTarget:
        return FakeTarget(self.tensor[rows], self._fake)

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        if random.random() < self._fake.share_of_failing_copies:
            raise RuntimeError("CUDA error: a copy was refused")
        assert self.tensor.shape == source.shape
        self._fake.current_stream().put(lambda: self._copy(source))

    def _copy(self, source: torch.Tensor) -> None:
        if random.random() < 0.05:
            time.sleep(0.0005)
        self.tensor.copy_(source)


class FakeCuda:
    """Puts the fakes in place of torch.cuda's, as far as the uploader uses it."""

    def __init__(self, monkeypatch) -> None:
        self._local = threading.local()
        self._streams: list[FakeStream] = []
        self.share_of_failing_copies = 0.0
        monkeypatch.setattr(staging, "_Slab", FakeSlab)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "set_stream", self._set_stream)

    def current_stream(self, _device=None) -> FakeStream:
        return getattr(self._local, "stream", None)

    def _set_stream(self, stream: FakeStream) -> None:
        self._local.stream = stream

    def make_uploader(self, threads: int, slab_bytes: int, num_slabs: int | None = None):
        uploader = staging.Uploader(
            torch.device("cpu"), threads, slab_bytes=slab_bytes, num_slabs=num_slabs
        )
        uploader._streams = [FakeStream(), FakeStream()]
        self._streams += uploader._streams
        return uploader

    def end(self) -> None:
        FakeEvent.fail = False
        for stream in self._streams:
            stream.end()
