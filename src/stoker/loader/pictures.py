"""Encoded pictures on their way into batches: decoded ahead of the step, turned upright, brought to one size.

Enters: the bytes of each picture of a batch, in host memory. Leaves: uint8 images `(batch, channels, height, width)`
and masks `(batch, height, width)` on the device. Costs: on a CPU one decode and one resample for each picture, in
threads (Pillow releases the interpreter's lock); on a GPU one call of nvJPEG and one kernel for each batch.

On a GPU three threads decode, each a batch on a stream of its own, while another batch is trained on. The Python work
of one thread overlaps with the decoding of another. A decoder of nvJPEG has fourteen streams, and a GPU takes work from
eight queues by default. Work that shares a queue with the training waits behind all of it (measured on an H200: a
decoder of 15,097 pictures/s came to 140 beside a replayed graph). So 32 queues are requested, if this module is
imported before CUDA is used, two decoders serve the three threads (28 streams), and the consumer is at most one step
ahead of the GPU. Training resnet18 on photographs of 500 x 375, as a share of a held batch's rate, and loading alone:
three decoders 0.78 and 17,000 pictures/s, two 0.89 and 24,100, one 0.86 and 16,800. What is left is the GPU's own work
for a batch of 256: nvJPEG's conversion to RGB 1.3 ms, the resample 0.36, the augmentation 0.1, beside a step of 19.6
ms; and queues that the step still shares. A step of high priority shares none: 0.89 of a held batch instead of 0.82 at
full size, 0.96 as a graph. `stoker.train.graphs` captures at high priority.

nvJPEG and libjpeg-turbo round differently and interpolate subsampled colours differently; `benchmarks/pictures.py`
prints by how much.

Contract. Success: batches come in order, each once. Failure: an error is raised at its batch, after the batches before
it, with the name of the picture; a picture that cannot be decoded follows `Policy`. Cancel: closing the generator ends
the threads after the pictures that they are decoding. A batch is handed out when the GPU has made it, and its memory is
recorded on the consumer's stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch

from stoker.display import printable
from stoker.errors import InputError, StokerError, StoreError
from stoker.host_memory import Recycled
from stoker.loader import nvjpeg
from stoker.loader.arguments import tell_once
from stoker.loader.planned import PlannedBatch
from stoker.sources.images.decoding import (
    PictureError,
    converted,
    decode,
    not_opened,
    pillow,
    turned,
    unwarned,
)
from stoker.store.fields import Array
from stoker.store.reader import Store
from stoker.units import parse_share

if not torch.cuda.is_initialized():
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

OnBroken = Literal["stop", "skip", "replace"]
POLICIES = ("stop", "skip", "replace")
_AHEAD = 2
_GPU_THREADS = 3
"""One decodes, one resamples, one gathers the bytes of the next batch."""
_DECODERS = 2
"""Each has fourteen streams, and with three of them some share a queue with the training."""
_STEPS_AHEAD: int | None = 1
"""Steps that the consumer may have queued behind the one that the GPU does; None for any number."""
_MOST_DECODED = 1 << 30
"""Bytes of the pictures that a thread decodes at once, at their full size."""
_MOST_REFUSED = 8
_MEASURED = 64
_FORMATS = ("JPEG", "PNG", "WEBP")
_MOST_THREADS = 16
_TOGETHER = 4
"""Pictures that a thread on a CPU decodes for each task: a task costs the interpreter's lock some 40 µs."""
_NAMED = 5
_UNKNOWN, _BY_NVJPEG, _BY_PILLOW = range(3)
_DAMAGED = "lies in a block that fails its checksum."
_EARLIER = "was found broken before the run was resumed."


class Sizing(Protocol):
    """Brings pictures of different sizes to one: `stoker.augment.sizing.Sizing`."""

    size: tuple[int, int]

    def boxes(self, sizes: Array, epoch: int, step: int) -> Array:
        """Return left, top, width, height of the part of each picture."""

    def resize_picture(self, image: Any, box: Sequence[int], nearest: bool = False) -> Array:
        """Return that part of one of Pillow's images, at the size that leaves."""

    def resize_tensors(self, images: Sequence[torch.Tensor], boxes: Array) -> torch.Tensor:
        """Return these parts of images on a device."""

    def resize_block(
        self, memory: torch.Tensor, starts: Array, sizes: Array, boxes: Array, channels: int
    ) -> torch.Tensor | None:
        """Return these parts of images that lie in one piece of memory; None where it cannot."""


class Work(NamedTuple):
    """One batch before it is decoded: dense fields, the bytes of each picture by field, rows that failed a checksum."""

    planned: PlannedBatch
    tensors: dict[str, torch.Tensor]
    pictures: dict[str, Sequence[torch.Tensor]]
    damaged: frozenset[int] = frozenset()


class Made(NamedTuple):
    """One batch with its pictures decoded; `positions` differ from the plan's if a picture was broken."""

    planned: PlannedBatch
    tensors: dict[str, torch.Tensor]
    positions: Array
    broken: tuple[tuple[int, str], ...]


def _wait() -> None:
    """Wait for the current stream, and leave the core to others meanwhile."""
    done = torch.cuda.Event(blocking=True)
    done.record()
    done.synchronize()


class Engines:
    """The decoders of a GPU's JPEG engines that the threads of a loader share."""

    def __init__(self, device: torch.device, channels: int) -> None:
        self._free: queue.SimpleQueue[nvjpeg.Decoder] = queue.SimpleQueue()
        self._refused = 0
        self.are_used = False
        for _ in range(_DECODERS):
            decoder = nvjpeg.open_decoder(device, channels)
            if decoder is not None:
                weakref.finalize(self, nvjpeg.give_back, decoder).atexit = False
                self._free.put(decoder)
                self.are_used = True

    def decode(self, data: list[torch.Tensor], sizes: Array, unknown: Array) -> nvjpeg.Block | None:
        """Return the JPEG files of a batch, decoded; None where the engines do not take them.

        `unknown` are the rows whose headers were not compared with their sizes yet.
        """
        if not self.are_used or not data:
            return None
        decoder = self._free.get()
        try:
            return decoder.decode(data, sizes, unknown)
        except nvjpeg.DecoderError as error:
            self._refused += 1
            if self._refused == _MOST_REFUSED:
                tell_once(f"the GPU's JPEG engines refused {_MOST_REFUSED} batches: {error}.")
                self.are_used = False
            return None
        finally:
            try:
                _wait()  # a decoder's buffers are in use until its batch is done
            finally:
                self._free.put(decoder)  # else another thread would wait for ever


@dataclass
class Policy:
    """What happens to a picture that cannot be decoded, and what has happened.

    Attributes:
        on_broken: "stop" raises; "skip" leaves the sample out of its batch; "replace" puts another sample of the same
            batch in its place, with all its fields.
        most: Different samples that may be broken before an error is raised all the same.
        ledger: Broken samples of the last two epochs: (epoch, step, sample).
        samples: All samples that were found broken, with the reason.
    """

    on_broken: OnBroken = "stop"
    most: int = 0
    ledger: list[tuple[int, int, int]] = field(default_factory=list)
    samples: dict[int, str] = field(default_factory=dict)

    def note(
        self, epoch: int, step: int, found: Iterable[tuple[int, str]], name: Callable[[int], str]
    ) -> None:
        """Record broken samples of one batch.

        Raises:
            StoreError: The budget is spent.
        """
        known = [entry for entry in self.ledger if entry[0] >= epoch - 1]
        entries = [(epoch, step, sample) for sample, _ in found]
        self.ledger = sorted({*known, *entries})
        self.samples |= dict(found)
        if len(self.samples) > self.most:
            named = [f"{name(each)}: {why}" for each, why in self.samples.items()]
            raise StoreError(
                f"{len(self.samples):,} pictures cannot be decoded, and at most {self.most:,} may be left out.",
                "a share or a number that covers them, or intact pictures",
                "broken_budget='5%', or pack the pictures again",
                named[:_NAMED],
            )

    def restore(self, entries: Any) -> None:
        """Take over the ledger of a state; its samples count towards the budget.

        Raises:
            InputError: It is none.
        """
        try:
            ledger = sorted((int(epoch), int(step), int(sample)) for epoch, step, sample in entries)
        except (TypeError, ValueError):
            raise InputError(
                f"the state lists broken samples as {entries!r}.",
                "[epoch, step, sample] of each, as state_dict() gives them",
                "a state of the same run",
            ) from None
        self.ledger = ledger
        self.samples = {sample: _EARLIER for _, _, sample in ledger} | self.samples


def make_policy(on_broken: str, budget: str | float, num_samples: int) -> Policy:
    """Return the policy that a user asks for; the budget is a share ("1%") or a number of samples."""
    if on_broken not in POLICIES:
        raise InputError(f"on_broken is {on_broken!r}.", ", ".join(POLICIES), 'on_broken="skip"')
    if on_broken == "stop":
        return Policy()
    text = str(budget).strip()
    most = int(text) if text.isdigit() else int(parse_share(budget) * num_samples)
    return Policy(cast(OnBroken, on_broken), most)


class Pictures:
    """Decodes the encoded pictures of a store for one loader.

    Args:
        store: Store with encoded `images`, and perhaps `masks`.
        names: Encoded fields to load.
        samples: Samples of the loader; positions are indices into them.
        device: Device of the batches.
        policy: Policy for pictures that cannot be decoded.
    """

    def __init__(
        self,
        store: Store,
        names: Sequence[str],
        samples: Array,
        device: torch.device,
        policy: Policy,
    ) -> None:
        self.names = tuple(names)
        self.device = device
        self.policy = policy
        self.channels = int(store.manifest.attributes.get("channels", 3))
        self.sizing: Sizing | None = None
        # Kept from epoch to epoch: torch's allocator keeps memory for each stream.
        self._streams: queue.SimpleQueue[torch.cuda.Stream] = queue.SimpleQueue()
        self._engines: Engines | None = None
        # A picture's bytes never change without failing their checksum: one look at its header is enough.
        self._ways = np.full(len(samples), _UNKNOWN, dtype=np.uint8)
        self._memory = Recycled()
        self._store, self._samples = store, samples
        num = store.num_samples
        self.sizes = store.read_rows("image_size", 0, num)[samples]
        self._orientations = store.read_rows("image_orientation", 0, num)[samples]
        self._decode_batch, self.reason = choose_decoder(device, self.channels)

    def use(self, augment: Any) -> Any:
        """Resize pictures by an augmentation's first op, if it does that; return the rest of the augmentation."""
        split = getattr(augment, "split_sizing", lambda: None)()
        self.sizing, rest = split or (None, augment)
        return rest

    def close(self) -> None:
        """Free the unused memory of batches; the rest is freed with its last user."""
        self._memory.close()

    def _check_sizing(self) -> None:
        """Raise if pictures differ in size and no op resizes them.

        Not called before batches are requested: a `Trainer` may set the loader's augmentation.
        """
        low, high = self.sizes.min(axis=0), self.sizes.max(axis=0)
        if self.sizing is None and (low != high).any():
            raise InputError(
                f"the pictures of {self._store.name} are {low[0]} x {low[1]} to {high[0]} x {high[1]}, "
                "and a batch has one size.",
                "an augmentation whose first op gives them one: RandomResizedCrop or Resize",
                "augment=stoker.augment.Compose([stoker.augment.Resize(224)])",
            )

    # -- batches, ahead ----------------------------------------------------------------------

    def decoded(self, work: Iterable[Work], epoch: int) -> Generator[Made, None, None]:
        """Yield the batches of `work` decoded, in order, a few batches ahead of the consumer."""
        self._check_sizing()
        on_gpu = self._decode_batch is not None
        make = self._on_gpu if on_gpu else self._on_host
        cores = len(os.sched_getaffinity(0))
        pool = ThreadPoolExecutor(
            _GPU_THREADS if on_gpu else min(_MOST_THREADS, cores),
            thread_name_prefix="stoker-pictures",
        )
        ahead = _GPU_THREADS if on_gpu else _AHEAD
        if on_gpu and self._engines is None:
            self._engines = Engines(self.device, self.channels)
        while on_gpu and self._streams.qsize() < _GPU_THREADS:
            self._streams.put(torch.cuda.Stream(self.device))
        waiting: deque[Callable[[], Made]] = deque()
        steps: deque[Any] = deque()
        source, fault = iter(work), None
        try:
            while True:
                try:
                    one = next(source, None)
                except StokerError as error:
                    # Of reading: raised after the batches that were read before.
                    one, fault = None, error
                if one is None:
                    break
                one = one._replace(damaged=self._damaged_rows(one.planned))
                waiting.append(make(pool, one, epoch))
                if len(waiting) > ahead:
                    yield self._hand_out(waiting.popleft()(), epoch, steps)
            while waiting:
                yield self._hand_out(waiting.popleft()(), epoch, steps)
            if fault is not None:
                raise fault
        finally:  # the consumer went away, a picture failed, or all is done
            pool.shutdown(wait=True, cancel_futures=True)

    def _hand_out(self, made: Made, epoch: int, steps: deque[Any]) -> Made:
        if self._decode_batch is not None:
            here = torch.cuda.current_stream(self.device)
            for tensor in made.tensors.values():
                tensor.record_stream(here)
            if _STEPS_AHEAD is not None:
                steps.append(torch.cuda.Event(blocking=True))
                steps[-1].record(here)
                if len(steps) > _STEPS_AHEAD:
                    steps.popleft().synchronize()
        if made.broken:
            found = [(int(self._samples[at]), reason) for at, reason in made.broken]
            self.policy.note(epoch, made.planned.step, found, self.name_of)
        return made

    def _damaged_rows(self, planned: PlannedBatch) -> frozenset[int]:
        """Return the rows of a batch whose bytes failed their checksum when they were read."""
        found: set[int] = set().union(*map(self._store.damaged, self.names))
        samples = self._samples[planned.positions].tolist() if found else []
        return frozenset(row for row, sample in enumerate(samples) if sample in found)

    def name_of(self, sample: int) -> str:
        """Return the file that a sample was packed from, or its number."""
        is_named = "name" in self._store.fields
        return printable(self._store.read_text("name", sample)) if is_named else f"number {sample}"

    def _boxes(self, planned: PlannedBatch, epoch: int) -> Array:
        """Return the part of each picture that is taken; unused where pictures have one size."""
        if self.sizing is None:
            return np.zeros((len(planned.positions), 4), dtype=np.int64)
        return self.sizing.boxes(self.sizes[planned.positions], epoch, planned.step)

    def _resized(self, image: Any, box: Sequence[int], nearest: bool) -> Array:
        if self.sizing is None:
            return np.asarray(image)
        return self.sizing.resize_picture(image, box, nearest)

    @property
    def out_size(self) -> tuple[int, int]:
        """(height, width) of the pictures in a batch."""
        height, width = self.sizes[0].tolist() if self.sizing is None else self.sizing.size
        return height, width

    # -- on a CPU ----------------------------------------------------------------------------

    def _on_host(self, pool: ThreadPoolExecutor, one: Work, epoch: int) -> Callable[[], Made]:
        planned, count = one.planned, len(one.planned.positions)
        boxes = self._boxes(planned, epoch).tolist()
        shapes = {"images": (self.channels, *self.out_size), "masks": self.out_size}
        made = {
            name: self._memory.empty(name, (count, *shapes[name]), torch.uint8)
            for name in self.names
        }
        rows = {name: tensor.numpy() for name, tensor in made.items()}
        tasks: list[Future[dict[int, str]]] = [
            pool.submit(
                self._several, one, rows, boxes, range(first, min(first + _TOGETHER, count))
            )
            for first in range(0, count, _TOGETHER)
        ]

        def finish() -> Made:
            reasons = {row: why for task in tasks for row, why in task.result().items()}
            tensors = one.tensors | made
            if self.device.type == "cuda":
                tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
            return self._settle(planned, tensors, reasons)

        return finish

    def _several(
        self, one: Work, made: dict[str, Array], boxes: list[list[int]], rows: range
    ) -> dict[int, str]:
        """Decode several samples of a batch; return what is wrong with those that failed."""
        return {row: why for row in rows if (why := self._one(one, made, boxes[row], row))}

    def _one(self, one: Work, made: dict[str, Array], box: list[int], row: int) -> str | None:
        """Decode one sample into its row; return what is wrong with it, or None."""
        position = int(one.planned.positions[row])
        try:
            if row in one.damaged:
                raise PictureError(_DAMAGED)
            for name in self.names:
                image = self._open(name, one.pictures[name][row], position)
                pixels = self._resized(image, box, name == "masks")
                # Planes, not pixels side by side: augmenting them takes a quarter less time.
                made[name][row] = np.moveaxis(pixels, -1, 0) if pixels.ndim == 3 else pixels
        except StokerError as error:
            if self.policy.on_broken == "stop":
                raise self._refusal(position, error) from error
            return _reason(error)
        return None

    def _open(self, name: str, data: torch.Tensor, position: int) -> Any:
        """Return one picture as Pillow's image, upright and of the size that it was packed with."""
        channels = 1 if name == "masks" else self.channels
        orientation = 1 if name == "masks" else int(self._orientations[position])
        height, width = self.sizes[position].tolist()
        # Before it is decoded: damaged bytes may claim a picture of gigabytes.
        lying = (width, height) if orientation < 5 else (height, width)
        return turned(open_bytes(data, channels, lying), orientation)

    def _check_size(self, found: Sequence[int], position: int) -> None:
        if tuple(found) != tuple(self.sizes[position]):
            height, width = self.sizes[position]
            raise PictureError(
                f"has {found[0]} x {found[1]} pixels, and {height} x {width} when it was packed."
            )

    # -- on a GPU ----------------------------------------------------------------------------

    def _on_gpu(self, pool: ThreadPoolExecutor, one: Work, epoch: int) -> Callable[[], Made]:
        return pool.submit(self._batch_on_gpu, one, epoch).result

    def _batch_on_gpu(self, one: Work, epoch: int) -> Made:
        stream = self._streams.get()
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                return self._batch_on_stream(one, epoch)
        finally:
            # The files' bytes, and pictures that torchvision decodes on a stream of its own, must not be freed before
            # the GPU has read them.
            try:
                with torch.cuda.stream(stream):
                    _wait()
            finally:
                self._streams.put(stream)  # else another thread would wait for ever

    def _batch_on_stream(self, one: Work, epoch: int) -> Made:
        planned = one.planned
        boxes = self._boxes(planned, epoch)
        images, reasons = self._in_pieces(one, boxes)
        tensors = {
            name: tensor.to(self.device, non_blocking=True) for name, tensor in one.tensors.items()
        }
        tensors["images"] = images
        if "masks" in self.names:
            tensors["masks"] = self._masks(one, boxes, reasons).to(self.device)
        return self._settle(planned, tensors, reasons)

    def _in_pieces(self, one: Work, boxes: Array) -> tuple[torch.Tensor, dict[int, str]]:
        """Do as `_images_on_gpu`, with about a gigabyte of pictures at their full size at a time.

        256 photographs of 12 megapixels are 9 GB, and three threads have a batch each.
        """
        positions, data = one.planned.positions, one.pictures["images"]
        ends = np.cumsum(self.sizes[positions].astype(np.int64).prod(axis=1) * self.channels)
        edges = [0, *(np.flatnonzero(np.diff(ends // _MOST_DECODED)) + 1).tolist(), len(positions)]
        if len(edges) == 2:
            return self._images_on_gpu(one, boxes)
        made: list[torch.Tensor] = []
        reasons: dict[int, str] = {}
        for start, end in pairwise(edges):
            planned = replace(one.planned, positions=positions[start:end])
            damaged = frozenset(row - start for row in one.damaged if start <= row < end)
            part = Work(planned, {}, {"images": data[start:end]}, damaged)
            images, found = self._images_on_gpu(part, boxes[start:end])
            _wait()  # the pictures at their full size are freed now, and the GPU may still read them
            made.append(images)
            reasons |= {start + row: why for row, why in found.items()}
        return torch.cat(made), reasons

    def _images_on_gpu(self, one: Work, boxes: Array) -> tuple[torch.Tensor, dict[int, str]]:
        """Return the images of a batch, upright and of one size, and what is wrong with those that failed."""
        positions, sizing = one.planned.positions, self.sizing
        block, ways = self._decoded_by_engines(one)
        is_turned = (self._orientations[positions] != 1).any()
        if block is not None and len(block.starts) == len(positions) and sizing and not is_turned:
            made = sizing.resize_block(*block[:3], boxes, block.channels)
            if made is not None:
                return made, {}
        images, reasons = self._upright(one, ways, block)
        made = torch.stack(images) if sizing is None else sizing.resize_tensors(images, boxes)
        return made, reasons

    def _decoded_by_engines(self, one: Work) -> tuple[nvjpeg.Block | None, Array]:
        """Return the JPEG files of a batch as the engines decode them, and who decodes each row."""
        data, positions = one.pictures["images"], one.planned.positions
        ways = self._ways[positions]
        unknown = ways == _UNKNOWN
        for row in np.flatnonzero(unknown).tolist():
            # nvJPEG would take RGB for brightness and colours.
            is_usual = _is_jpeg(data[row]) and not nvjpeg.holds_rgb(data[row].numpy().data)
            ways[row] = _BY_NVJPEG if is_usual else _BY_PILLOW
        ways[list(one.damaged)] = _BY_PILLOW
        rows = np.flatnonzero(ways == _BY_NVJPEG)
        sizes, turns = self.sizes[positions], self._orientations[positions]
        lying = np.where((turns >= 5)[:, None], sizes[:, ::-1], sizes)[rows]
        assert self._engines is not None
        files = [data[row] for row in rows.tolist()]
        block = self._engines.decode(files, lying, np.flatnonzero(unknown[rows]))
        if block is not None:
            self._ways[positions[rows]] = _BY_NVJPEG
        return block, ways

    def _upright(
        self, one: Work, ways: Array, block: nvjpeg.Block | None
    ) -> tuple[list[torch.Tensor], dict[int, str]]:
        """Return the images of a batch one by one, upright, on the GPU, and what is wrong with those that failed."""
        data, positions = one.pictures["images"], one.planned.positions
        images: dict[int, torch.Tensor] = {}
        jpegs = np.flatnonzero(ways == _BY_NVJPEG).tolist()
        assert self._decode_batch is not None
        turns, sizes = self._orientations[positions], self.sizes[positions]
        try:
            if block is not None:
                decoded = block.tensors()
            else:
                files = [data[row] for row in jpegs]
                decoded = self._decode_batch(files) if files else []
            images = dict(zip(jpegs, decoded, strict=True))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # one broken file fails the batch: Pillow finds it
            tell_once(f"nvJPEG refused a batch, which Pillow decoded instead: {error}")
        for row in np.flatnonzero(turns != 1).tolist():
            if row in images:
                images[row] = _turned_tensor(images[row], int(turns[row]))
        reasons: dict[int, str] = {}
        for row, (height, width) in enumerate(sizes.tolist()):
            image = images.get(row)
            if image is not None and image.shape[1] == height and image.shape[2] == width:
                continue
            position = int(positions[row])
            try:
                if row in one.damaged:
                    raise PictureError(_DAMAGED)
                if image is None:
                    pixels = np.asarray(self._open("images", data[row], position))
                    pixels = pixels.reshape(height, width, self.channels).transpose(2, 0, 1)
                    images[row] = torch.from_numpy(pixels.copy()).to(self.device)
                else:
                    self._check_size(image.shape[1:], position)
            except StokerError as error:
                if self.policy.on_broken == "stop":
                    raise self._refusal(position, error) from error
                reasons[row] = _reason(error)
                shape = (self.channels, height, width)
                images[row] = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return [images[row] for row in range(len(data))], reasons

    def _masks(self, one: Work, boxes: Array, reasons: dict[int, str]) -> torch.Tensor:
        """Return the masks of a batch: PNG, decoded on the host."""
        made = {"masks": np.zeros((len(boxes), *self.out_size), dtype=np.uint8)}
        for row, box in enumerate(boxes.tolist()):
            if row in one.damaged:  # its image reports it
                continue
            position = int(one.planned.positions[row])
            try:
                image = self._open("masks", one.pictures["masks"][row], position)
                made["masks"][row] = self._resized(image, box, True)
            except StokerError as error:
                if self.policy.on_broken == "stop":
                    raise self._refusal(position, error) from error
                reasons[row] = _reason(error)
        return torch.from_numpy(made["masks"])

    # -- faults ------------------------------------------------------------------------------

    def _refusal(self, position: int, error: StokerError) -> StoreError:
        sample = int(self._samples[position])
        return StoreError(
            f"sample {sample} of {self._store.name} ({self.name_of(sample)}) {_reason(error)}",
            "a picture that decodes as it did when it was packed",
            "on_broken='skip' leaves it out; `stoker verify` finds damaged bytes; or pack again",
        )

    def _settle(
        self, planned: PlannedBatch, tensors: dict[str, torch.Tensor], reasons: Mapping[int, str]
    ) -> Made:
        """Drop broken samples, or replace them by others, in all fields."""
        positions = planned.positions
        broken = tuple((int(positions[row]), why) for row, why in sorted(reasons.items()))
        if not reasons:
            return Made(planned, tensors, positions, broken)
        good = np.array([row for row in range(len(positions)) if row not in reasons])
        if not len(good):
            raise StoreError(
                f"all {len(positions)} pictures of batch {planned.step} are broken; the first {reasons[0]}",
                "a batch with one intact picture or more",
                "pack the pictures again",
            )
        rows = good
        if self.policy.on_broken == "replace":
            rows = np.arange(len(positions))
            bad = sorted(reasons)
            rows[bad] = good[np.arange(len(bad)) % len(good)]
        index = torch.from_numpy(rows)
        kept = {
            name: tensor.index_select(0, index.to(tensor.device))
            for name, tensor in tensors.items()
        }
        return Made(planned, kept, positions[rows], broken)


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Limit torch to one thread on a CPU: other threads decode, and torch's threads spin while they wait.

    Measured on two cores: 5.3 ms of CPU time for a photograph instead of 7.0.
    """
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_decoding(store: Store, seconds: float = 0.5) -> float | None:
    """Return how many encoded pictures of a store this machine decodes per second: by a GPU if any, else by threads.

    None if the store is empty or a picture is broken.
    """
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    channels = int(store.manifest.attributes.get("channels", 3))
    count = min(_MEASURED, store.num_samples)
    data = [torch.from_numpy(store.read_values("images", number)) for number in range(count)]
    decode_batch, _ = choose_decoder(device, channels)
    if not data:
        return None
    on_gpu = decode_batch is not None and all(map(_is_jpeg, data))
    engines = Engines(device, channels) if on_gpu else None
    sizes = store.read_rows("image_size", 0, count)
    turned_over = store.read_rows("image_orientation", 0, count) >= 5
    sizes = np.where(turned_over[:, None], sizes[:, ::-1], sizes)
    try:
        with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:

            def run() -> None:
                if engines is not None and decode_batch is not None:
                    if engines.decode(data, sizes, np.arange(0 if done else count)) is None:
                        decode_batch(data)
                    torch.cuda.synchronize()
                else:
                    list(pool.map(partial(open_bytes, channels=channels), data))

            done = 0
            run()
            began, done = time.perf_counter(), 1
            while time.perf_counter() - began < seconds:
                run()
                done += count
            return (done - 1) / (time.perf_counter() - began)
    except (StokerError, RuntimeError):
        return None


def _reason(error: StokerError) -> str:
    return error.reason if isinstance(error, PictureError) else error.given


@unwarned()
def open_bytes(data: torch.Tensor, channels: int, size: tuple[int, int] | None = None) -> Any:
    """Return the bytes of one picture as Pillow's image, grey or RGB, as it lies in the file.

    Args:
        data: Bytes of a file.
        channels: 1 or 3.
        size: (width, height) that it must have; None takes any.

    Raises:
        PictureError: The bytes are no intact picture of that size.
    """
    raw = data.numpy().tobytes()
    try:
        image = pillow().open(BytesIO(raw), formats=_FORMATS)
        found = image.size
    except Exception as error:  # Pillow raises many kinds on damaged bytes
        raise PictureError(not_opened(error)) from error
    if size is not None and found != size:
        raise PictureError(
            f"has {found[1]} x {found[0]} pixels, and {size[1]} x {size[0]} when it was packed."
        )
    if channels == 3 and _is_jpeg(data):
        # The short way for photographs: no look at frames, palettes and transparency, which JPEG does not have.
        try:
            image.load()
            return image if image.mode == "RGB" else image.convert("RGB")
        except Exception as error:
            raise PictureError(f"cannot be decoded: {error}.") from error
    return converted(decode(Path("picture"), True, raw, upright=False).image, channels)


def _is_jpeg(data: torch.Tensor) -> bool:
    return len(data) > 1 and ctypes.string_at(data.data_ptr(), 2) == b"\xff\xd8"


def _turned_tensor(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """Return `(channels, height, width)` turned by an EXIF orientation, as `turned` turns Pillow's images."""
    if orientation >= 5:
        image = image.transpose(1, 2)
    if orientation in (2, 3, 6, 7):
        image = image.flip(2)
    if orientation in (3, 4, 7, 8):
        image = image.flip(1)
    return image


DecodeBatch = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def choose_decoder(device: torch.device, channels: int) -> tuple[DecodeBatch | None, str]:
    """Return the batched JPEG decoder of a GPU, None for Pillow on the host, and the reason in words.

    On a GPU: nvJPEG by torchvision (the fastest of three on an H200: 28,056 pictures of 256 px in a second, torchcodec
    20,872), else by torchcodec; without either, Pillow on the host.
    """
    mode = "RGB" if channels == 3 else "GRAY"
    if device.type == "cuda":
        with contextlib.suppress(ImportError, OSError, RuntimeError):
            from torchvision.io import ImageReadMode, decode_jpeg

            read = ImageReadMode[mode]
            return (
                lambda data: decode_jpeg(data, mode=read, device=device),
                f"decoded on {device} by nvJPEG (torchvision)",
            )
        with contextlib.suppress(ImportError, OSError, RuntimeError):
            from torchcodec.decoders import decode_jpeg as decode_by_torchcodec

            return (
                lambda data: decode_by_torchcodec(data, mode=mode, device=device),
                f"decoded on {device} by nvJPEG (torchcodec)",
            )

    lack = "; torchvision or torchcodec would decode on the GPU" if device.type == "cuda" else ""
    return None, f"decoded in threads by Pillow{lack}"
