"""The Triton backend: the whole augmentation of a batch in one pass over memory.

Enters: what the torch backend takes (`stoker.augment.reference`), on a CUDA device. Leaves: the same
result to 1e-5 in float32 and one unit in the last place in half types. Costs: one launch to draw and
one to apply, one more (two for kernels above 5 taps) for a blur, one more for contrast's mean beside a
blur or in images of more tiles than `choose_held` allows; the result is the only allocation that grows
with the batch, except for a blur's float32 image. No host
synchronisation; all of it can be captured in a CUDA graph after one call outside of it.

A pixel of three resampled channels takes about 130 instructions (counted in the code for sm_90), of
which 12 loads, most of them taps that a neighbour has brought into the L1 cache, and 3 stores.
Importing this module does not import triton; `available` says whether the backend can be used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from stoker.augment.definition import TABLE_WIDTH, Program
from stoker.augment.philox import advance
from stoker.errors import InputError

Tensor = torch.Tensor

# Contraction would round a coordinate once instead of twice; near x = 512 that is 6e-5 of a pixel,
# and on noise 6e-5 in value. The kernels ask for fma themselves where it is harmless. Set to True
# (before the first call) to measure what the rule costs.
ENABLE_FP_FUSION = False

IMAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
OUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_CHANNELS = 16  # unrolled in one kernel
MAX_PARTIALS = 512  # sums per sample that every program of the main kernel adds up
MAX_SAMPLES = 65535  # the grid's third axis
ONE_PROGRAM = 1024  # samples whose parameters one program draws and counts; more take 25 µs and up
AT_ONCE_TAPS = 5  # blurs up to here in one pass of at most 25 taps; larger ones in two
HELD_PIXELS = 1024  # of one program that waits for its image's mean: eight a thread
MOST_WAITING = 3  # streams with such launches at once; a replayed graph may be a fourth
HELD_REGISTERS = 64  # so that every GPU has room for eight such programs on a multiprocessor
_INT32 = 2**31
_KEPT_PLANS = 64


# -- choosing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """How pixels are divided among programs. Results depend on it only in the order of sums.

    Attributes:
        block_y, block_x: Pixels of one program; multiples of the step.
        step_y, step_x: Pixels processed together; powers of two. A warp takes a patch `step_x`
            pixels wide, so a `step_x` of 16 is a patch of 16 x 2.
        num_warps: Warps per program; 32 * num_warps threads share a step.
        max_registers: Registers per thread; None leaves it to the compiler, which takes 32 to 40.
        store_hint: "" or ".cs": evict results from the L2 cache first, so that inputs stay in it.
    """

    block_y: int
    block_x: int
    step_y: int
    step_x: int
    num_warps: int = 4
    max_registers: int | None = None
    store_hint: str = ""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the sizes that kernels take as constants."""
        return self.block_y, self.block_x, self.step_y, self.step_x

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the number of tiles (across, down) of an image of `size` (height, width)."""
        return -(-size[1] // self.block_x), -(-size[0] // self.block_y)


def choose_config(program: Program, batch: int, *, most_tiles: int = 0) -> Config:
    """Return the tiles for a batch: large enough to share their set-up, numerous enough to fill the GPU.

    Args:
        program: Its output size and whether pixels move.
        batch: Number of samples.
        most_tiles: Upper limit per sample; 0 for none. The sum of gray leaves one number per tile.
    """
    height, width = program.out_size
    if program.geometry:
        # A patch of 16 x 2 pixels per warp: rotated, it lies on fewer rows than 32 x 1, and still
        # writes whole sectors. One pixel per thread: 32 registers, so 64 warps hide the latency.
        step_x, pixels = min(16, _power(width)), 128
    else:
        # Rows as they are: four neighbours per thread, in one load and one store.
        step_x, pixels = min(128, _power(width)), 512
    step_y = pixels // step_x
    block_y, block_x = step_y, step_x
    while True:
        tiles = -(-height // block_y) * -(-width // block_x)
        fine = tiles * batch <= 16384 and (not most_tiles or tiles <= most_tiles)
        if fine or (block_y >= height and block_x >= width):
            return Config(block_y, block_x, step_y, step_x)
        if block_x <= block_y and block_x < width:
            block_x *= 2
        else:
            block_y *= 2


def choose_held(program: Program, multiprocessors: int) -> Config | None:
    """Return the tiles for contrast in one pass, in which all programs of an image wait for each other; else None.

    They must be on the GPU together, which has room for eight on a multiprocessor. An image may take a quarter of that:
    the unfinished images of `MOST_WAITING` streams and of a graph leave room for those that they wait for.
    """
    width = program.out_size[1]
    step_x = min(16, _power(width)) if program.geometry else min(128, _power(width))
    pixels = 256 if program.geometry else 512
    step_y = pixels // step_x
    block_x = step_x * 2 if step_x < width else step_x
    config = Config(HELD_PIXELS // block_x, block_x, step_y, step_x, max_registers=HELD_REGISTERS)
    across, down = config.grid(program.out_size)
    fits = across * down <= 2 * multiprocessors
    return config if fits and program.channels in (1, 3) and not program.blur_kernel else None


def _power(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def available(device: torch.device | str) -> str | None:
    """Return None where the backend can be used, else the reason in words."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        return f"the device is {device.type}, not CUDA"
    asked = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    if device.type == "cpu" and not asked:
        return "the device is a CPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        interpreted = type(_kernels().augment).__name__ == "InterpretedFunction"
    except Exception as error:  # noqa: BLE001  a broken install must not end the torch backend
        return f"triton cannot be imported ({type(error).__name__}: {error})"
    if device.type == "cpu":
        return None if interpreted else "triton was imported before TRITON_INTERPRET was set"
    if interpreted:
        return "TRITON_INTERPRET is set, which runs kernels on the CPU"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (7, 0):
        return f"the GPU has compute capability {major}.{minor}; triton needs 7.0"
    return None


def describe(device: torch.device | str) -> str:
    """Return what runs the kernels, for the reason of the choice: "Triton 3.6.0 on NVIDIA H200"."""
    import triton

    device = torch.device(device)
    place = "the CPU, interpreted" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return f"Triton {triton.__version__} on {place}"


@functools.cache
def _kernels() -> ModuleType:
    from stoker.augment import fused_kernels

    return fused_kernels


@functools.cache
def _held_kernel() -> Any:
    from stoker.augment.fused_held import augment_held

    return augment_held


# -- launching -------------------------------------------------------------------------------------


class Turns:
    """Limits launches whose programs wait for each other to `MOST_WAITING` streams: more could fill a GPU and hang.

    A process with more streams, such as one with a thread for each of eight loaders, launches one after the other. A
    captured launch takes no turn, since a capture may not wait for other streams; a graph is replayed in one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[int | None, set[int]] = {}
        self._last: dict[int | None, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def take(self, device: torch.device) -> Iterator[None]:
        """Launch within this: the current stream waits for the last launch where too many streams have launched."""
        stream = torch.cuda.current_stream(device)
        seen = self._streams.setdefault(device.index, set())
        is_known = stream.cuda_stream in seen and len(seen) <= MOST_WAITING
        if is_known or torch.cuda.is_current_stream_capturing():
            yield
            return
        with self._lock:  # until the launch is queued: the next one waits for it
            seen.add(stream.cuda_stream)
            last = self._last.get(device.index)
            if len(seen) > MOST_WAITING and last is not None and last != stream:
                stream.wait_stream(last)
            self._last[device.index] = stream
            yield


_TURNS = Turns()


class _Launch:
    """One kernel with its grid and all arguments that do not change between calls.

    Triton's own launch path inspects every argument at each call to find the compiled kernel that fits.
    Here only the tensors change, so the compiled kernel is kept and called directly. It was compiled for
    pointers that are multiples of 16; for others Triton's path is taken.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        fixed: tuple[Any, ...],
        num_warps: int,
        max_registers: int | None = None,
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._fixed = fixed
        self._options = {
            "num_warps": num_warps,
            "num_stages": 1,
            "enable_fp_fusion": ENABLE_FP_FUSION,
        }
        if max_registers is not None:
            self._options["maxnreg"] = max_registers
        self.direct: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        aligned = True
        for tensor in tensors:
            if tensor is not None and tensor.data_ptr() & 15:
                aligned = False
        if aligned and self.direct is not None:
            self.direct(*tensors, *self._fixed)
            return
        compiled = self._kernel[self._grid](*tensors, *self._fixed, **self._options)
        if aligned and compiled is not None:
            self.direct = compiled[self._grid]


@dataclass(frozen=True)
class _Plan:
    """The launches of `apply` for one program, one set of shapes and one device."""

    program: Program  # plans are found by its id: a reference keeps the id from being reused
    augment: _Launch
    sum_gray: _Launch | None
    held: _Launch | None  # replaces both
    num_partials: int  # per sample
    blurs: tuple[_Launch, ...]


class FusedBackend:
    """Draws and applies with Triton kernels. Same contract as `TorchBackend`; not thread safe.

    Args:
        config: Tiles of the main kernel, instead of `choose_config`; for measuring.
        sum_config: Tiles of the sum for contrast's mean; for measuring.
        held_config: Tiles of the one pass for contrast, instead of `choose_held`; None for two passes.
    """

    name = "fused"

    def __init__(
        self,
        config: Config | None = None,
        sum_config: Config | None = None,
        held_config: Config | Literal["auto"] | None = "auto",
    ) -> None:
        self._config = config
        self._sum_config = sum_config
        self._held_config = held_config
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._draws: dict[tuple[Any, ...], _Launch] = {}

    def draw(
        self,
        tape: Tensor,
        counter: Tensor,
        batch: int,
        num_batches: int = 1,
        *,
        ids: Tensor | None = None,
        staged: Tensor | None = None,
    ) -> Tensor:
        """Return the table `(num_batches * batch, 16)` and advance the counter's step.

        One launch for one batch of up to `ONE_PROGRAM` samples, else two: many programs, and the count.
        """
        shape = (batch * num_batches, TABLE_WIDTH)
        table = torch.empty(shape, dtype=torch.float32, device=counter.device)
        num_staged = 0 if staged is None else staged.shape[1]
        key = (batch, num_batches, tape.shape[0], counter.device, ids is None, num_staged)
        launch = self._draws.get(key)
        alone = num_batches == 1 and batch <= ONE_PROGRAM
        if launch is None:
            from stoker.augment.fused_draw import draw

            lanes = min(max(_power(batch), 32), 256)
            fixed = (batch, tape.shape[0], num_staged, lanes, alone)
            grid = (num_batches, 1 if alone else -(-batch // lanes), 1)
            launch = _Launch(draw, grid, fixed, max(1, lanes // 32))
            _keep(self._draws, key, launch)
        with _on(counter.device):
            launch(tape, counter, ids, staged, table)
            if not alone:
                advance(counter, num_batches)
        return table

    def apply(
        self,
        images: Tensor,
        masks: Tensor | None,
        rows: Tensor | None,
        table: Tensor,
        program: Program,
        faults: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return augmented images and masks; arguments as in `TorchBackend.apply`.

        A row that is not in `images` gives NaN and the ignore index, and its bit in `faults`: rows
        are not looked at on the host.
        """
        batch, size, device = table.shape[0], program.out_size, images.device
        layout = torch.channels_last if program.channels_last else torch.contiguous_format
        result = torch.empty(
            (batch, program.channels, *size),
            dtype=program.out_dtype,
            device=device,
            memory_format=layout,
        )
        moved = None if masks is None else masks.new_empty(batch, *masks.shape[1:-2], *size)
        work = _Work(images, masks, rows, table, program, faults, result, moved)
        with _on(device):
            if batch <= MAX_SAMPLES and program.channels <= MAX_CHANNELS:
                self._run(work)
            else:
                for part in _parts(work):
                    self._run(part)
        return result, moved

    def _run(self, work: _Work) -> None:
        """Launch the kernels of the plan, which is made at the first call for these shapes."""
        images, masks, rows, table, program, faults, result, moved = work
        batch = table.shape[0]
        if rows is None and not images.is_floating_point():
            faults = None  # every byte is a valid value
        shapes = None if masks is None else (masks.dtype, masks.shape, masks.stride())
        where = (images.dtype, images.shape, images.stride(), result.stride(), images.device)
        key = (id(program), batch, rows is None, faults is None, shapes, *where)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(work)
            _keep(self._plans, key, plan)
        # Zeros for the interpreter, whose first launch reads sums that no launch has left: it warns of NaN there.
        make = table.new_empty if table.is_cuda else table.new_zeros
        partials = make(batch * plan.num_partials) if program.contrast else None
        if plan.held is not None:
            counters = table.view(torch.int32)
            launch = partial(plan.held, images, result, masks, moved, rows, table, counters)
            if table.is_cuda:
                with _TURNS.take(table.device):
                    launch(partials, faults)
            else:
                # The interpreter runs one program after the other: the second launch finds the sums of the first.
                for _ in range(2):
                    launch(partials, faults)
            return
        if plan.sum_gray is not None:
            plan.sum_gray(images, rows, table, partials)
        spare = table.new_empty(result.shape) if plan.blurs else None
        plan.augment(images, result, spare, masks, moved, rows, table, partials, faults)
        if spare is not None:
            for blur in plan.blurs[:-1]:
                blurred = torch.empty_like(spare)
                blur(spare, blurred, table)
                spare = blurred
            plan.blurs[-1](spare, result, table)

    def _make_plan(self, work: _Work) -> _Plan:
        images, masks, rows, table, program, faults, result, _ = work
        if images.dtype not in IMAGE_DTYPES or program.out_dtype not in OUT_DTYPES:
            raise InputError(
                f"the fused backend with {images.dtype} images and a {program.out_dtype} result.",
                "uint8, float16, bfloat16 or float32 in; float16, bfloat16 or float32 out",
                'backend="torch", which has float64 too',
            )
        batch = table.shape[0]
        config = self._config or choose_config(program, batch)
        tiles = self._sum_config or choose_config(program, batch, most_tiles=MAX_PARTIALS)
        across, down = tiles.grid(program.out_size)
        reads = (images.shape[0], *program.in_size, *program.out_size)
        scale = 1.0 / 255.0 if images.dtype == torch.uint8 else None
        choices = (
            *(program.channels, program.geometry, program.whole_pixels or not program.geometry),
            program.reflect,
            *(scale, program.brightness),
        )
        wide = _is_wide(images, masks, result)
        held = self._choose_held(program, images.device)
        if held is not None:
            tiles = held
            across, down = tiles.grid(program.out_size)
        sum_gray = None
        if program.contrast and held is None:
            adds = (*reads, *images.stride(), *choices, wide, *tiles.shape)
            grid = (across, down, batch)
            sum_gray = _Launch(
                _kernels().sum_gray, grid, adds, tiles.num_warps, tiles.max_registers
            )
        # Two flags: uint8 images with rows need the check of rows, not that of every value.
        check = faults is not None and images.is_floating_point()
        watch = faults is not None and rows is not None
        labels = (0, 0, 0) if masks is None else (masks.stride(0), *masks.stride()[-2:])
        strides = (*images.stride(), *result.stride(), *labels)
        before = (*reads, math.prod(program.out_size), *strides, program.ignore_index)
        after = (program.erase, program.erase_value, _norm(program), check, watch, wide)
        partials = max(32, _power(across * down))
        colours = (program.saturation, program.hue)
        if held is not None:
            fixed = (*before, across * down, *choices, *colours, *after, partials, held.store_hint)
            fixed += (images.is_cuda, *held.shape)
            launch = _Launch(
                _held_kernel(), (across, down, batch), fixed, held.num_warps, held.max_registers
            )
            return _Plan(program, launch, None, launch, across * down, ())
        fixed = (*before, across * down, *choices, program.contrast, *colours)
        fixed += (program.blur_kernel > 0, *after, partials, config.store_hint, *config.shape)
        grid = (*config.grid(program.out_size), batch)
        augment = _Launch(_kernels().augment, grid, fixed, config.num_warps, config.max_registers)
        return _Plan(program, augment, sum_gray, None, across * down, _plan_blurs(work, wide))

    def _choose_held(self, program: Program, device: torch.device) -> Config | None:
        if not program.contrast or self._held_config != "auto":
            return (
                self._held_config
                if isinstance(self._held_config, Config) and program.contrast
                else None
            )
        num = 132
        if device.type == "cuda":
            num = torch.cuda.get_device_properties(device).multi_processor_count
        return choose_held(program, num)


class _Work(NamedTuple):
    """Arguments and results of one `apply`, or of a part of it."""

    images: Tensor
    masks: Tensor | None
    rows: Tensor | None
    table: Tensor
    program: Program
    faults: Tensor | None
    result: Tensor
    moved: Tensor | None


def _parts(work: _Work) -> Iterator[_Work]:
    """Split a batch that is too large for one grid, or images with more channels than are unrolled.

    Ops that mix channels need one or three of them, so many channels can be processed separately.
    """
    rows = work.rows
    if rows is None:
        rows = torch.arange(work.images.shape[0], device=work.images.device)
    for first in range(0, work.table.shape[0], MAX_SAMPLES):
        some = slice(first, first + MAX_SAMPLES)
        for start in range(0, work.program.channels, MAX_CHANNELS):
            channels = slice(start, start + MAX_CHANNELS)
            follows = work.masks is not None and work.moved is not None and not start
            yield _Work(
                images=work.images[:, channels],
                masks=work.masks if follows else None,
                rows=rows[some],
                table=work.table[some],
                program=_some_channels(work.program, start),
                faults=work.faults,
                result=work.result[some, channels],
                moved=work.moved[some] if work.moved is not None and follows else None,
            )


@functools.lru_cache(maxsize=_KEPT_PLANS)
def _some_channels(program: Program, start: int) -> Program:
    if program.channels <= MAX_CHANNELS:
        return program
    channels = slice(start, start + MAX_CHANNELS)
    return replace(
        program,
        channels=len(range(program.channels)[channels]),
        mean=None if program.mean is None else program.mean[channels],
        std=None if program.std is None else program.std[channels],
    )


def _plan_blurs(work: _Work, wide: bool) -> tuple[_Launch, ...]:
    """Return one pass for small kernels, else one across and one down."""
    program, taps = work.program, work.program.blur_kernel
    if not taps:
        return ()
    step = Config(8, 32, 8, 32)
    (height, width), plane = program.out_size, math.prod(program.out_size)
    planar = (program.channels * plane, plane, width, 1, program.channels)
    target = (*work.result.stride(), program.channels)
    finish = (True, program.erase, program.erase_value, _norm(program))
    passes: list[tuple[Any, ...]] = [(*target, taps, taps, *finish)]
    if taps > AT_ONCE_TAPS:
        passes = [(*planar, 1, taps, False, False, 0.0, None), (*target, taps, 1, *finish)]
    grid = (*step.grid(program.out_size), work.table.shape[0])
    sizes = (height, width, plane)
    return tuple(
        _Launch(_kernels().blur, grid, (*sizes, *each, wide, 8, 32), step.num_warps)
        for each in passes
    )


def _norm(program: Program) -> tuple[float, ...] | None:
    """Return mean and 1 / std of every channel, in turn."""
    if program.mean is None or program.std is None:
        return None
    pairs = zip(program.mean, program.std, strict=True)
    return tuple(number for mean, std in pairs for number in (mean, 1.0 / std))


def _is_wide(*tensors: Tensor | None) -> bool:
    """Return whether one sample spans 2^31 elements; the offset of a sample is always 64 bits."""
    for tensor in tensors:
        if tensor is not None:
            sides = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
            if sum((length - 1) * stride for length, stride in sides) >= _INT32 - 1:
                return True
    return False


def _keep(kept: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    """Cache a launch; clear the cache when it is full, which happens only if sizes keep changing."""
    if len(kept) >= _KEPT_PLANS:
        kept.clear()
    kept[key] = value


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` the current one, which triton launches on; does nothing if it already is."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _HERE
    return torch.cuda.device(device)


_HERE = contextlib.nullcontext()
