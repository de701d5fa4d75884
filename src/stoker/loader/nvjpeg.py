"""nvJPEG called directly: a batch of JPEG files decoded by the GPU's JPEG engines into one block of memory.

Enters: the bytes of files in host memory, and the size that each must have. Leaves: uint8 `(channels, height, width)`
on the GPU, queued on the current stream. Costs: in a trial of these calls alone 9 ms of one core for 256 photographs of
500 x 375, without a look at their headers; torchvision, which calls the same library, took 17 ms.
Pinned memory for the bytes was tried: nothing is gained, and copying keeps cores busy.

The library is the one that came with torchvision, or NVIDIA's own wheel; nothing is linked, so the first decoder of a
process has to decode two known pictures as Pillow does. Engines decode baseline
JPEG only, and only some GPUs have them (A100, H100, H200, B200): `open_decoder` returns None elsewhere.

Contract: one thread at a time for one decoder. A file that is no JPEG, or of another size than was said, is refused
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
_YUV, _Y, _RGB = 1, 2, 3  # nvjpegOutputFormat_t: planes
_PLANES = 4  # NVJPEG_MAX_COMPONENT
_ALIGNED = 256
_FLAGS = 0
# nvjpegChromaSubsampling_t: 1 where the colour planes have half the columns, and half the rows.
_HALVED = {0: (0, 0), 1: (1, 0), 2: (1, 1), 6: (0, 0)}
_GREY = 6
UNKNOWN, OTHER = -1, 100  # layouts beside them: not looked at yet; for other decoders

_MOST_AWAY = 4.0  # levels of 255, on smooth pictures: rounding and the interpolation of colours give one or two

_idle: dict[tuple[int, int, bool], list[Decoder]] = {}
_proven: set[tuple[int, int, bool]] = set()


class Planes(NamedTuple):
    """Pictures as JPEG holds them: brightness at full size, and two planes of colours that may be smaller.

    Attributes:
        block: The memory that they lie in.
        table: int64 `(batch, 9)`: addresses of the three planes; bytes from row to row of the first, and of the others;
            1 where the others have half the columns, and half the rows; 0 for grey, 1 for brightness and colours, 2 for
            RGB; bytes from column to column of the others.
    """

    block: torch.Tensor
    table: Array


class DecoderError(RuntimeError):
    """nvJPEG refused a batch; another decoder may take it."""


def open_decoder(device: torch.device, channels: int, planes: bool = False) -> Decoder | None:
    """Return a decoder for one thread, a used one where there is one; None where there are no engines."""
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (index, channels, planes)
    idle = _idle.setdefault(key, [])
    if idle:
        return idle.pop()
    path = _library_path()
    if path is None:
        return None
    try:
        with torch.cuda.device(index):
            decoder = Decoder(path, index, channels, planes)
            if key not in _proven:
                _prove(decoder)
                _proven.add(key)
            return decoder
    except (OSError, AttributeError, ValueError, RuntimeError, StokerError):
        # No engines, a library without these calls or with others, or no Pillow to compare with.
        return None


def _prove(decoder: Decoder) -> None:
    """Decode known pictures and compare them with Pillow's: the library may be of a version that differs.

    Raises:
        DecoderError: They differ by more than rounding.
    """
    wanted, data = [], []
    kinds = [((48, 64), "RGB", 2), ((33, 47), "RGB", 2)]
    if decoder.planes:
        kinds += [((35, 51), "RGB", 0), ((35, 51), "RGB", 1), ((35, 51), "L", 0)]
    for (height, width), mode, subsampling in kinds:
        down, right = np.mgrid[0:height, 0:width]
        grey = (40 + 2 * down + right).astype(np.uint8)
        image = pillow().fromarray(np.dstack([grey, grey // 2, 200 - grey])).convert(mode)
        file = BytesIO()
        image.save(file, "JPEG", quality=95, subsampling=subsampling)
        opened = pillow().open(file).convert("RGB" if decoder.channels == 3 else "L")
        wanted.append(np.asarray(opened, np.float32).reshape(height, width, decoder.channels))
        data.append(torch.from_numpy(np.frombuffer(file.getvalue(), np.uint8).copy()))
    sizes = np.array([size for size, _, _ in kinds])
    if decoder.planes:
        layouts = np.full(len(data), UNKNOWN, np.int8)
        decoder.look(data, sizes, layouts)
        if layouts.tolist() != [2, 2, 0, 1, _GREY]:
            raise DecoderError(f"known pictures have the layouts {layouts.tolist()}")
        planes = decoder.decode_planes(data, sizes, layouts)
        made = [_joined(planes, row, size) for row, size in enumerate(sizes.tolist())]
    else:
        made = [each.cpu().numpy() for each in decoder.decode(data, sizes)]
    for mine, theirs in zip(made, wanted, strict=True):
        away = np.abs(mine.transpose(1, 2, 0).astype(np.float32) - theirs)
        if away.mean() > _MOST_AWAY:
            raise DecoderError(f"a known picture is {away.mean():.1f} levels away")


def _joined(planes: Planes, row: int, size: Sequence[int]) -> Array:
    """Return one picture of planes as RGB `(3, height, width)` in host memory, its colours not interpolated."""
    height, width = size
    memory, base = planes.block.cpu().numpy(), planes.block.data_ptr()
    *starts, line, colour_line, half_x, half_y, kind, step = planes.table[row].tolist()
    down, right = np.mgrid[0:height, 0:width]
    bright = memory[starts[0] - base + down * line + right].astype(np.float32)
    if kind == 0:
        return np.stack([bright] * 3)
    place = (down >> half_y) * colour_line + (right >> half_x) * step
    u, v = (memory[start - base + place].astype(np.float32) - 128.0 for start in starts[1:])
    made = np.stack([bright + 1.402 * v, bright - 0.344136 * u - 0.714136 * v, bright + 1.772 * u])
    return made.clip(0.0, 255.0)


def give_back(decoder: Decoder) -> None:
    """Keep a decoder for the next loader: making one takes 100 ms, and its memory is small."""
    key = (decoder.device_index, decoder.channels, decoder.planes)
    _idle.setdefault(key, []).append(decoder)


class Decoder:
    """One handle of nvJPEG with its buffers.

    Args:
        path: The library.
        device_index: The GPU, which is the current one.
        channels: 3 for RGB, 1 for grey.
        planes: For `decode_planes`; else for `decode`.
    """

    def __init__(self, path: Path, device_index: int, channels: int, planes: bool = False) -> None:
        self.device_index, self.channels, self.planes = device_index, channels, planes
        self._device = torch.device("cuda", device_index)
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
        self._call("CreateEx", _HARDWARE, None, None, _FLAGS, ctypes.byref(self._handle))
        self._call("JpegStateCreate", self._handle, ctypes.byref(self._state))
        self._batch = 0
        self._found = np.zeros((4, _PLANES), np.int32)  # components, subsampling, widths, heights
        self._kept: tuple[object, ...] = ()

    def look(self, data: Sequence[torch.Tensor], sizes: Array, layouts: Array) -> None:
        """Look at the headers of those files whose layout is `UNKNOWN`, and put it there.

        Args:
            data: uint8 of each file, in host memory.
            sizes: `(batch, 2)`: height and width of each, as it lies in the file.
            layouts: How the colours of each lie in it: a key of `_HALVED`, `OTHER` or `UNKNOWN`.

        Raises:
            DecoderError: One of them is no JPEG of that size.
        """
        found = self._found
        where = [found[row].ctypes.data for row in range(4)]
        look, handle = self._look, self._handle
        for row in np.flatnonzero(layouts == UNKNOWN).tolist():
            each, (height, width) = data[row], sizes[row].tolist()
            status = look(handle, each.data_ptr(), each.numel(), *where)
            if status or found[2, 0] != width or found[3, 0] != height:
                raise DecoderError(f"a picture is no JPEG of {height} x {width} (status {status})")
            layout = int(found[1, 0])
            expected = 1 if layout == _GREY else 3
            if layout not in _HALVED or int(found[0, 0]) != expected:
                layout = OTHER
            if expected == 3 and holds_rgb(memoryview(each.numpy())):
                layout = OTHER
            layouts[row] = layout

    def decode(self, data: Sequence[torch.Tensor], sizes: Array) -> list[torch.Tensor]:
        """Return the pictures of a batch, `(channels, height, width)` each.

        Args:
            data: uint8 of each file, in host memory, whose headers were looked at.
            sizes: `(batch, 2)`: height and width of each, as it lies in the file.

        Raises:
            DecoderError: One of them is no JPEG that the engines decode.
        """
        plane = sizes.astype(np.int64).prod(axis=1)
        ends = np.cumsum(-(-plane * self.channels // _ALIGNED) * _ALIGNED)
        starts = np.concatenate([[0], ends[:-1]])
        block = torch.empty(int(ends[-1]), dtype=torch.uint8, device=self._device)
        images = np.zeros((len(data), 2 * _PLANES), np.uint64)
        for channel in range(self.channels):
            images[:, channel] = block.data_ptr() + starts + channel * plane
            images[:, _PLANES + channel] = sizes[:, 1]
        self._decode(data, images, _RGB if self.channels == 3 else _Y)
        return [
            block.as_strided((self.channels, height, width), (height * width, width, 1), start)
            for start, (height, width) in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]

    def decode_planes(self, data: Sequence[torch.Tensor], sizes: Array, layouts: Array) -> Planes:
        """Return the pictures of a batch as they are before their colours are interpolated and become RGB.

        Args:
            data: uint8 of each file, in host memory.
            sizes: `(batch, 2)`: height and width of each, as it lies in the file.
            layouts: Of each, from `look`; none is `OTHER`.

        Raises:
            DecoderError: One of them is no JPEG that the engines decode.
        """
        height, width = sizes.astype(np.int64).T
        half_x, half_y = np.array([_HALVED[layout] for layout in layouts.tolist()]).T
        coloured = layouts != _GREY
        colour_w, colour_h = width + half_x >> half_x, height + half_y >> half_y
        plane, colours = height * width, np.where(coloured, colour_w * colour_h, 0)
        ends = np.cumsum(-(-(plane + 2 * colours) // _ALIGNED) * _ALIGNED)
        starts = np.concatenate([[0], ends[:-1]])
        block = torch.empty(int(ends[-1]), dtype=torch.uint8, device=self._device)
        table = np.ones((len(data), 9), np.int64)
        table[:, 0] = block.data_ptr() + starts
        table[:, 1] = table[:, 0] + plane
        table[:, 2] = table[:, 1] + colours
        table[:, 3:8] = np.stack([width, colour_w, half_x, half_y, coloured], axis=1)
        images = np.zeros((len(data), 2 * _PLANES), np.uint64)
        images[:, :3] = table[:, :3]
        images[:, _PLANES] = width
        images[:, _PLANES + 1 : _PLANES + 3] = colour_w[:, None]
        self._decode(data, images, _YUV)
        return Planes(block, table)

    def _decode(self, data: Sequence[torch.Tensor], images: Array, form: int) -> None:
        """Queue a batch; `images` are nvjpegImage_t: addresses, then bytes from row to row."""
        count = len(data)
        addresses = np.fromiter((each.data_ptr() for each in data), np.uint64, count)
        lengths = np.fromiter((each.numel() for each in data), np.uint64, count)
        if self._batch != count:
            self._batch = 0
            self._call("DecodeBatchedInitialize", self._handle, self._state, count, 1, form)
            self._batch = count
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device_index).cuda_stream)
        arrays = [each.ctypes.data_as(ctypes.c_void_p) for each in (addresses, lengths, images)]
        # Until the next batch: the call returns before it is done.
        self._kept = (addresses, lengths, images)
        try:
            self._call("DecodeBatched", self._handle, self._state, *arrays, stream)
        except DecoderError:
            self._batch = 0
            raise

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"nvjpeg{name}")(*arguments)
        if status:
            raise DecoderError(f"nvjpeg{name} returned status {status}")


def rgb_planes(image: torch.Tensor) -> list[int]:
    """Return the row of `Planes.table` of a contiguous `(3, height, width)` on the GPU."""
    _, height, width = image.shape
    start, plane = image.data_ptr(), height * width
    return [start, start + plane, start + 2 * plane, width, width, 0, 0, 2, 1]


def holds_rgb(data: Sequence[int]) -> bool:
    """Say whether a JPEG of three components holds RGB instead of brightness and colours, as libjpeg decides it."""
    at, adobe = 2, -1
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        body = bytes(data[at + 4 : at + 2 + length])
        if marker == 0xE0 and body[:5] == b"JFIF\0":
            return False
        if marker == 0xEE and body[:5] == b"Adobe" and len(body) >= 12:
            adobe = body[11]
        if marker in (0xC0, 0xC1) and len(body) >= 15:
            return adobe == 0 or (adobe < 0 and body[6:15:3] == b"RGB")
        if marker == 0xDA:
            break
        # A marker may be preceded by any number of fill bytes.
        at = at + 1 if marker == 0xFF else at + 2 + length
    return True  # nothing that this understands: another decoder may


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
