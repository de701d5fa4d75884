"""nvJPEG called directly: a batch of JPEG files decoded by the GPU's JPEG engines into one block of memory.

Enters: the bytes of files in host memory, and the size that each must have. Leaves: a `Block` of uint8 pictures
on the GPU, queued on the current stream. Costs: in a trial of these calls alone 9 ms of one core for 256 photographs of
500 x 375, without a look at their headers; torchvision, which calls the same library, took 17 ms.
Pinned memory for the bytes was tried: nothing is gained, and copying keeps cores busy.

The library comes with torchvision or NVIDIA's own wheel. Nothing is linked and versions may differ, so the first
decoder of a process must decode two known pictures as Pillow does. Engines decode baseline JPEG only, and only some
GPUs have them (A100, H100, H200, B200): `open_decoder` returns None elsewhere.

Contract: one thread at a time for one decoder. A file that is no JPEG, or of another size than was given, is refused
before anything is decoded, since the engines write as many pixels as a file claims. Bytes and results must be kept
until the stream has passed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from stoker.errors import StokerError
from stoker.sources.images.decoding import pillow
from stoker.store.fields import Array

_HARDWARE = 3  # nvjpegBackend_t: the engines
_RGB, _Y = 3, 2  # nvjpegOutputFormat_t: planes
_PLANES = 4  # NVJPEG_MAX_COMPONENT
_ALIGNED = 256

_MOST_AWAY = 4.0  # levels of 255, on smooth pictures: rounding and the interpolation of colours give one or two

_idle: dict[tuple[int, int], list[Decoder]] = {}
_proven: set[tuple[int, int]] = set()


class Block(NamedTuple):
    """The pictures of a batch in one piece of memory, planes after each other.

    Attributes:
        memory: uint8, on the GPU.
        starts: First byte of each picture in `memory`.
        sizes: `(batch, 2)`: height and width of each.
        channels: Planes of each.
    """

    memory: torch.Tensor
    starts: Array
    sizes: Array
    channels: int

    def tensors(self) -> list[torch.Tensor]:
        """Return each picture as `(channels, height, width)`. Costs 2 µs each."""
        return [
            self.memory.as_strided(
                (self.channels, height, width), (height * width, width, 1), start
            )
            for start, (height, width) in zip(
                self.starts.tolist(), self.sizes.tolist(), strict=True
            )
        ]


class DecoderError(RuntimeError):
    """nvJPEG refused a batch; another decoder may accept it."""


def open_decoder(device: torch.device, channels: int) -> Decoder | None:
    """Return a decoder for one thread, an idle one if possible; None if the GPU has no JPEG engines."""
    index = torch.cuda.current_device() if device.index is None else device.index
    idle = _idle.setdefault((index, channels), [])
    if idle:
        return idle.pop()
    path = _library_path()
    if path is None:
        return None
    try:
        with torch.cuda.device(index):
            decoder = Decoder(path, index, channels)
            if (index, channels) not in _proven:
                _prove(decoder)
                _proven.add((index, channels))
            return decoder
    except (OSError, AttributeError, ValueError, RuntimeError, StokerError):
        # No engines, a library without these calls or with others, or no Pillow to compare with.
        return None


def _prove(decoder: Decoder) -> None:
    """Decode two known pictures and compare them with Pillow's: the library may be of a version that differs.

    Raises:
        DecoderError: They differ by more than rounding.
    """
    wanted, data, sizes = [], [], np.array([(48, 64), (33, 47)])
    for height, width in sizes.tolist():
        down, right = np.mgrid[0:height, 0:width]
        grey = (40 + 2 * down + right).astype(np.uint8)
        file = BytesIO()
        pillow().fromarray(np.dstack([grey, grey // 2, 200 - grey])).save(file, "JPEG", quality=95)
        opened = pillow().open(file).convert("RGB" if decoder.channels == 3 else "L")
        wanted.append(np.asarray(opened, np.float32).reshape(height, width, decoder.channels))
        data.append(torch.from_numpy(np.frombuffer(file.getvalue(), np.uint8).copy()))
    made = decoder.decode(data, sizes).tensors()
    for mine, theirs in zip(made, wanted, strict=True):
        away = np.abs(mine.cpu().numpy().transpose(1, 2, 0).astype(np.float32) - theirs)
        if away.mean() > _MOST_AWAY:
            raise DecoderError(f"a known picture is {away.mean():.1f} levels away")


def give_back(decoder: Decoder) -> None:
    """Keep a decoder for the next loader: making one takes 100 ms, and its memory is small."""
    _idle.setdefault((decoder.device_index, decoder.channels), []).append(decoder)


class Decoder:
    """One handle of nvJPEG with its buffers.

    Args:
        path: Path of the library.
        device_index: Index of the GPU, which must be the current one.
        channels: 3 for RGB, 1 for grey.
    """

    def __init__(self, path: Path, device_index: int, channels: int) -> None:
        self.device_index, self.channels = device_index, channels
        self._library = ctypes.CDLL(str(path))
        # Headers are looked at without letting go of the interpreter's lock: 256 calls of a microsecond each, after
        # every one of which another thread could take it for milliseconds.
        self._look = ctypes.PyDLL(str(path)).nvjpegGetImageInfo
        self._look.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            *4 * [ctypes.c_void_p],
        ]
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("CreateEx", _HARDWARE, None, None, 0, ctypes.byref(self._handle))
        self._call("JpegStateCreate", self._handle, ctypes.byref(self._state))
        self._batch = 0
        self._found = np.zeros((4, _PLANES), np.int32)  # components, subsampling, widths, heights
        self._kept: tuple[object, ...] = ()

    def decode(
        self, data: Sequence[torch.Tensor], sizes: Array, unknown: Array | None = None
    ) -> Block:
        """Return the pictures of a batch.

        Args:
            data: uint8 of each file, in host memory.
            sizes: `(batch, 2)`: height and width of each, as in the file, before its EXIF orientation.
            unknown: Rows whose headers are compared with `sizes`; all when None.

        Raises:
            DecoderError: One of them is no JPEG of that size that the engines decode.
        """
        count = len(data)
        addresses = np.fromiter((each.data_ptr() for each in data), np.uint64, count)
        lengths = np.fromiter((each.numel() for each in data), np.uint64, count)
        rows = np.arange(count) if unknown is None else unknown
        self._check(addresses[rows], lengths[rows], sizes[rows])
        plane = sizes.astype(np.int64).prod(axis=1)
        ends = np.cumsum(-(-plane * self.channels // _ALIGNED) * _ALIGNED)
        starts = np.concatenate([[0], ends[:-1]])
        block = torch.empty(int(ends[-1]), dtype=torch.uint8, device=f"cuda:{self.device_index}")
        images = np.zeros((count, 2 * _PLANES), np.uint64)  # nvjpegImage_t: addresses, then pitches
        for channel in range(self.channels):
            images[:, channel] = block.data_ptr() + starts + channel * plane
            images[:, _PLANES + channel] = sizes[:, 1]
        if self._batch != count:
            form = _RGB if self.channels == 3 else _Y
            self._batch = 0
            self._call("DecodeBatchedInitialize", self._handle, self._state, count, 1, form)
            self._batch = count
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device_index).cuda_stream)
        arrays = [each.ctypes.data_as(ctypes.c_void_p) for each in (addresses, lengths, images)]
        self._kept = (
            addresses,
            lengths,
            images,
        )  # until the next batch: the call returns before it is done
        try:
            self._call("DecodeBatched", self._handle, self._state, *arrays, stream)
        except DecoderError:
            self._batch = 0
            raise
        return Block(block, starts, sizes, self.channels)

    def _check(self, addresses: Array, lengths: Array, sizes: Array) -> None:
        found = self._found
        where = [found[row].ctypes.data for row in range(4)]
        look, handle = self._look, self._handle
        for address, length, (height, width) in zip(
            addresses.tolist(), lengths.tolist(), sizes.tolist(), strict=True
        ):
            status = look(handle, address, length, *where)
            if status or found[2, 0] != width or found[3, 0] != height:
                raise DecoderError(f"a picture is no JPEG of {height} x {width} (status {status})")

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"nvjpeg{name}")(*arguments)
        if status:
            raise DecoderError(f"nvjpeg{name} returned status {status}")


def holds_rgb(data: Sequence[int]) -> bool:
    """Say whether a JPEG of three components holds RGB instead of brightness and colours, as libjpeg decides it.

    nvJPEG takes all of them for brightness and colours: on an H200 such pictures were 80 levels of 255 away.
    """
    at, adobe = 2, -1
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        body = bytes(data[at + 4 : at + 2 + length])
        if marker == 0xE0 and body[:5] == b"JFIF\0":
            return False
        if marker == 0xEE and body[:5] == b"Adobe" and len(body) >= 12:
            adobe = body[11]
        if 0xC0 <= marker <= 0xC2 and len(body) >= 9:
            return len(body) == 15 and (adobe == 0 or (adobe < 0 and body[6:15:3] == b"RGB"))
        if marker == 0xDA:
            return False
        # A marker may be preceded by any number of fill bytes.
        at = at + 1 if marker == 0xFF else at + 2 + length
    return False


@functools.cache
def _library_path() -> Path | None:
    """Return the library for torch's version of CUDA, where it is installed."""
    major, _, _ = (torch.version.cuda or "").partition(".")
    return next((path for path in _candidates() if path.name.endswith(f".so.{major}")), None)


def _candidates() -> Iterator[Path]:
    vision = importlib.util.find_spec("torchvision")
    if vision is not None and vision.origin is not None:
        yield from sorted(
            (Path(vision.origin).parent.parent / "torchvision.libs").glob("libnvjpeg*")
        )
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or ()) if wheels is not None else ():
        yield from sorted(Path(folder).glob("*/lib/libnvjpeg.so*"))
