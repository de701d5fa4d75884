"""`Compose`: a checked list of augmentations, drawn and applied to batches on their device.

Enters: ops in the order of the phases; then batches of images, with masks, boxes and keypoints if
there are any. Leaves: augmented tensors on the same device; nothing is ever moved. Costs: one draw
(tiny) and one pass over memory on a GPU with Triton, plain torch elsewhere; `backend_reason` says
which of the two and why. The first call for a size builds the tape; later calls build nothing and
never wait for the device, so they can be captured in a CUDA graph after one warm-up call.

What is drawn is a function of (seed, stream, epoch, step) and the row in the batch. The step counts
calls; `seek` sets it; `state_dict` holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch

from stoker.augment import guard, philox
from stoker.augment.definition import Op, Program, Size, check_size
from stoker.augment.ops import check_order, encode_tape, make_program
from stoker.augment.reference import TorchBackend, move_boxes, move_keypoints
from stoker.errors import InputError

Tensor = torch.Tensor
BACKENDS = ("auto", "torch", "fused")


class Backend(Protocol):
    """Two of these exist: `reference.TorchBackend` and `fused.FusedBackend`."""

    name: str

    def draw(self, tape: Tensor, counter: Tensor, batch: int, num_batches: int = 1) -> Tensor:
        """Return the table `(num_batches * batch, 16)` and advance the counter's step on the device."""

    def apply(
        self,
        images: Tensor,
        masks: Tensor | None,
        rows: Tensor | None,
        table: Tensor,
        program: Program,
        faults: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return augmented images and masks."""


@dataclass(frozen=True)
class Params:
    """What was drawn for one batch, to be applied to its images, masks, boxes and keypoints.

    Attributes:
        table: float32 `(batch, 16)` on the device; the columns are in `stoker.augment.draw`.
        program: The work it was drawn for.
    """

    table: Tensor
    program: Program


class Compose:
    """Augmentations in the order of the phases, with one draw per sample.

    Args:
        ops: Geometry, colour, blur, erasing, `Normalize`, `ToDtype`, in this order.
        seed: 64 bits; another seed, other draws.
        stream: 0 to 65535; ranks that share a seed each take their own. Below 16384, the streams
            of `MixUp`, `CutMix` and of ops used alone are never met.
        ignore_index: Written in masks where no input pixel is.
        backend: "auto" takes the fused kernel where it can run, "torch" or "fused" insists.

    Not thread safe; one object per thread and device.

    Attributes:
        ops: The checked ops.
        backend_reason: Which backend works and why; "" before the first call.
        generation: Changes when the ops change, so that a captured graph knows it is out of date.
    """

    generation: int = 0

    def __init__(
        self,
        ops: Sequence[Op],
        *,
        seed: int = 0,
        stream: int = 0,
        ignore_index: int = 255,
        backend: str = "auto",
    ) -> None:
        if backend not in BACKENDS:
            raise InputError(f"backend is {backend!r}.", ", ".join(BACKENDS), 'backend="auto"')
        if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
            raise InputError(
                f"ignore_index is {ignore_index!r}.", "a whole number", "ignore_index=255"
            )
        self.ops = check_order(ops)
        self.ignore_index = ignore_index
        self.backend = backend
        self.backend_reason = ""
        self._position = philox.Position(seed, stream)
        self._plans: dict[tuple[Size, int, torch.device], tuple[Program, Tensor]] = {}
        self._backends: dict[tuple[object, ...], tuple[Backend, str]] = {}
        self._flags: dict[torch.device, guard.FaultFlag] = {}
        self._rows_seen: set[torch.device] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.ops))}])"

    # -- drawing and applying --------------------------------------------------------------------

    @overload
    def __call__(
        self, images: Tensor, masks: None = None, *, rows: Tensor | None = None
    ) -> Tensor: ...

    @overload
    def __call__(
        self, images: Tensor, masks: Tensor, *, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def __call__(
        self, images: Tensor, masks: Tensor | None = None, *, rows: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Draw for a batch, apply, and count one step.

        Args:
            images: `(N, C, H, W)`: uint8, or float in [0, 1]; any strides.
            masks: `(N, H, W)` or `(N, 1, H, W)` of an integer dtype.
            rows: int64 `(B,)`: take these images (and masks) out of N; all by default.

        Returns:
            Images in [0, 1] (normalised where there is a `Normalize`), float32 without `ToDtype`;
            with masks, the pair.

        Raises:
            InputError: Images or masks that cannot be used, or that an earlier call was given
                (values are looked at on the device and reported without waiting).
        """
        batch = self._check(images, masks, rows)
        params = self.draw(batch, images.shape[-2:], images.shape[1], images.device)
        return self._apply(images, params, masks, rows)

    def batches(
        self,
        images: Tensor,
        masks: Tensor | None = None,
        *,
        rows: Tensor,
        batch_size: int,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Do for consecutive batches what a call for each would do, with the same draws, at the cost of one.

        Args:
            images: As for a call.
            masks: As for a call.
            rows: Those of all batches, one batch after the other.
            batch_size: Rows of each batch.
        """
        num_rows = self._check(images, masks, rows)
        if batch_size < 1 or num_rows % batch_size:
            raise InputError(
                f"{num_rows} rows in batches of {batch_size}.",
                "whole batches",
                f"batch_size={num_rows}",
            )
        shape = images.shape
        params = self.draw(batch_size, shape[-2:], shape[1], images.device, num_rows // batch_size)
        return self._apply(images, params, masks, rows)

    def draw(
        self,
        batch: int,
        size: Sequence[int],
        channels: int,
        device: torch.device | str,
        num_batches: int = 1,
    ) -> Params:
        """Draw the parameters of consecutive batches and count a step for each; nothing is applied.

        Args:
            batch: Number of samples of a batch.
            size: (height, width) of the images that will enter.
            channels: Of these images.
            device: Where they are.
            num_batches: Number of batches.
        """
        for number in (batch, channels, num_batches):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise InputError(
                    f"{batch!r} images of {channels!r} channels.",
                    "whole numbers, 1 or more",
                    "compose.draw(32, (224, 224), 3, images.device)",
                )
        known = isinstance(device, torch.device) and device in self._position
        place = torch.device(device) if known else _placed(device)
        sides = tuple(size) if isinstance(size, Sequence) else size
        program, tape = self._plan(check_size("size", sides), channels, place)
        backend = self._pick(place, torch.uint8, program)
        return Params(backend.draw(tape, self._position.on(place), batch, num_batches), program)

    def apply(
        self,
        images: Tensor,
        params: Params | None = None,
        masks: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Any:
        """Apply drawn parameters; draw them first where none are given.

        Args:
            images: `(N, C, H, W)`, or one image `(C, H, W)`, which is returned as one.
            params: From `draw`, for this batch, size and device.
            masks: As for a call; `(H, W)` beside one image.
            rows: As for a call.

        Returns:
            Images, or (images, masks) where masks were given.
        """
        if isinstance(images, Tensor) and images.dim() == 3:
            if rows is not None:
                raise InputError(
                    f"rows with one image of shape {tuple(images.shape)}.",
                    "rows with images (batch, channels, height, width)",
                    "leave rows out, or images.unsqueeze(0)",
                )
            return self._apply_one(images, params, masks)
        batch = self._check(images, masks, rows)
        if params is None:
            params = self.draw(batch, images.shape[-2:], images.shape[1], images.device)
        _check_params(params)
        guard.check_fits(images, batch, params.program, params.table)
        return self._apply(images, params, masks, rows)

    def boxes(self, boxes: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """Move boxes as the images are moved.

        Args:
            boxes: float `(B, N, 4)`: x0 y0 x1 y1 in pixel edges (pixel i spans i to i + 1).
            params: Those the images were augmented with.

        Returns:
            Boxes around the moved corners, cut at the border, and bool `(B, N)`: something is left.
        """
        _check_params(params)
        checked = guard.check_points(boxes, 4, params.table, "boxes")
        return move_boxes(checked, params.table, params.program)

    def keypoints(self, keypoints: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """Move keypoints as the images are moved.

        Args:
            keypoints: float `(B, N, 2)`: (x, y), the centre of the first pixel being (0, 0).
            params: Those the images were augmented with.

        Returns:
            Moved keypoints, and bool `(B, N)`: inside the result.
        """
        _check_params(params)
        checked = guard.check_points(keypoints, 2, params.table, "keypoints")
        return move_keypoints(checked, params.table, params.program)

    def check(self) -> None:
        """Wait for the device and raise what it found in the images so far.

        Replays of a captured graph are looked at here only: call it once per epoch.
        """
        for flag in self._flags.values():
            flag.wait()

    def validation(self) -> Compose:
        """Return what validation images go through: nothing random, the same sizes and values."""
        fixed = [op.settled() for op in self.ops]
        return Compose(
            [op for op in fixed if op is not None],
            ignore_index=self.ignore_index,
            backend=self.backend,
        )

    # -- the position in the run -----------------------------------------------------------------

    def seek(self, epoch: int, step: int = 0) -> None:
        """Make the next draw that of (epoch, step); in place, so captured graphs follow."""
        self._position.seek(epoch, step)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: its draws are the same whatever came before."""
        self.seek(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return seed, epoch, step and stream on the device drawn on last; waits for it."""
        return self._position.read()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self._position.write(philox.check_state(state))

    # -- inside ----------------------------------------------------------------------------------

    def _apply(
        self, images: Tensor, params: Params, masks: Tensor | None, rows: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        device = images.device
        watched = images.is_floating_point() or rows is not None
        flag = self._flag(device) if watched else None
        result, moved = self._pick(device, images.dtype, params.program).apply(
            images, masks, rows, params.table, params.program, None if flag is None else flag.bits
        )
        if flag is not None and not _capturing(device):
            flag.look()
        return result if moved is None else (result, moved)

    def _apply_one(self, image: Tensor, params: Params | None, mask: Tensor | None) -> Any:
        masks = mask.unsqueeze(0) if isinstance(mask, Tensor) else mask
        made = self.apply(image.unsqueeze(0), params, masks)
        return made[0] if isinstance(made, Tensor) else (made[0][0], made[1][0])

    def _plan(self, size: Size, channels: int, device: torch.device) -> tuple[Program, Tensor]:
        key = (size, channels, device)
        if key not in self._plans:
            if _capturing(device):
                raise InputError(
                    f"the first batch of {channels}x{size[0]}x{size[1]} images during a CUDA graph capture.",
                    "sizes that were seen before the capture",
                    "augment one batch of this size before torch.cuda.graph(...)",
                )
            program = make_program(self.ops, size, channels, self.ignore_index)
            with torch.inference_mode(False):  # kept for calls outside of it too
                self._plans[key] = program, encode_tape(self.ops, size).to(device)
        return self._plans[key]

    def _pick(self, device: torch.device, dtype: torch.dtype, program: Program) -> Backend:
        key = (device, dtype, program.out_dtype)
        if key not in self._backends:
            self._backends[key] = choose_backend(self.backend, device, dtype, program)
        backend, self.backend_reason = self._backends[key]
        return backend

    def _flag(self, device: torch.device) -> guard.FaultFlag:
        if device not in self._flags:
            self._flags[device] = guard.FaultFlag(device)
        return self._flags[device]

    def _check(self, images: Tensor, masks: Tensor | None, rows: Tensor | None) -> int:
        """Return the number of samples that leave, or raise before anything is drawn."""
        guard.check_images(images)
        if masks is not None:
            guard.check_masks(masks, images, self.ignore_index)
        if rows is None:
            return images.shape[0]
        # Reading row numbers waits for the device, so only those of the first call are read.
        first = images.device not in self._rows_seen and not _capturing(images.device)
        guard.check_rows(rows, images, look=first)
        self._rows_seen.add(images.device)
        return rows.shape[0]


def choose_backend(
    asked: str, device: torch.device, dtype: torch.dtype, program: Program
) -> tuple[Backend, str]:
    """Return the backend for this work and why it was chosen.

    Args:
        asked: "auto", "torch" or "fused".
        device: Of the images.
        dtype: Of the images.
        program: What is to be done.

    Raises:
        InputError: "fused" was asked for and cannot do this.
    """
    if asked == "torch":
        return TorchBackend(), "torch: it was asked for"
    from stoker.augment import fused

    reason = fused.available(device)
    if reason is None and torch.float64 in (dtype, program.out_dtype):
        reason = "the fused kernel has no float64"
    if reason is None:
        return fused.FusedBackend(), f"fused: {fused.describe(device)}"
    if asked == "fused":
        raise InputError(
            f'backend="fused" on {device}: {reason}.',
            "a CUDA device with Triton; uint8, float16, bfloat16 or float32",
            'backend="auto" takes the torch backend where the fused one cannot work',
        )
    return TorchBackend(), f"torch: {reason}"


def _placed(device: torch.device | str) -> torch.device:
    """Return the device as tensors name it ("cuda" is the current GPU), if tensors can be there."""
    try:
        place = torch.empty(0, device=torch.device(device)).device
        if place.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, TypeError, AssertionError) as error:  # torch has one for each way to fail
        raise InputError(
            f"device is {device!r}: {str(error).splitlines()[0].rstrip('.:')}.",
            "a device that torch can use here",
            "images.device",
        ) from error
    return place


def _check_params(params: object) -> None:
    if not isinstance(params, Params):
        raise InputError(
            f"params are {params!r}.",
            "the Params that draw() returned",
            "params = compose.draw(len(images), images.shape[-2:], images.shape[1], images.device)",
        )


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
