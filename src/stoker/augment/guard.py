"""Checks of images, masks and rows, and the flag for faults that only the device can see.

Enters: tensors from the user. Leaves: nothing, or an `InputError` with the remedy. Costs: shapes and
dtypes are checked on the host in microseconds; values are checked on the device, and the answer is read
at a later call without waiting (`FaultFlag`). Nothing moves to another device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker.augment.definition import Program
from stoker.errors import InputError

Tensor = torch.Tensor

IMAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
OUT_OF_UNIT, NOT_FINITE, NO_SUCH_ROW = 1, 2, 4
# Rounding to 16-bit types and resizing filters may leave [0, 1] by this much.
LEAST, MOST = -0.001, 1.001
MASK_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def note_faults(values: Tensor, faults: Tensor) -> None:
    """Set the bits of `faults` for float `values` outside [0, 1] or not finite; on the device."""
    least, most = values.amin(), values.amax()  # a third of the time of aminmax on a CPU
    wild = ~(torch.isfinite(least) & torch.isfinite(most))
    outside = (least < LEAST) | (most > MOST)
    faults.bitwise_or_(outside.to(torch.int32) * OUT_OF_UNIT | wild.to(torch.int32) * NOT_FINITE)


def find_missing(
    rows: Tensor | None, num_images: int, faults: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return rows clamped to those that exist, and bool `(B,)`, which were missing; set the fault bit.

    The second is None on a CPU if no row is missing; on a GPU, finding that out would wait for the device.
    """
    if rows is None:
        return None, None
    held = rows.clamp(0, num_images - 1)
    missing = held != rows
    if rows.device.type == "cpu" and not bool(missing.any()):
        return rows, None
    if faults is not None:
        faults.bitwise_or_(missing.any().to(torch.int32) * NO_SUCH_ROW)
    return held, missing


class FaultFlag:
    """One int32 on the device that backends set, read without blocking.

    The first look waits for the answer, so that a wrong set-up fails at once. On a GPU every 16th look
    starts a copy to the host, and the next look after its event has passed reads it: a copy and an
    event at every call would cost as much as a small batch. Not thread safe.
    """

    _EVERY = 16

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        with torch.inference_mode(False):  # calls outside of inference mode write to it too
            self.bits = torch.zeros(1, dtype=torch.int32, device=device)
            self._copy = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=self._cuda)
        self._event = torch.cuda.Event() if self._cuda else None
        self._asked = False
        self._calls = 0

    def look(self) -> None:
        """Raise the faults known so far, without waiting except the first time; call after every apply."""
        self._calls += 1
        if self._event is None or self._calls == 1:
            self.wait()
        elif self._asked and self._event.query():
            self._asked = False
            self._raise()
        elif not self._asked and self._calls % self._EVERY == 0:
            self._copy.copy_(self.bits, non_blocking=True)
            self._event.record()
            self._asked = True

    def wait(self) -> None:
        """Wait for the device and raise the faults that it found."""
        self._copy.copy_(self.bits)
        self._raise()

    def _raise(self) -> None:
        bits = int(self._copy.item())
        if not bits:
            return
        self._copy.zero_()
        self.bits.zero_()
        if bits & NO_SUCH_ROW:
            raise InputError(
                "rows that the images do not have.",
                "0 to the number of images - 1",
                "rows count from the first image of this tensor",
            )
        if bits & NOT_FINITE:
            raise InputError(
                "images with NaN or infinity.",
                "finite values from 0 to 1, or uint8",
                "torch.isfinite(images).all() shows which batch; `stoker inspect` which rows",
            )
        raise InputError(
            "float images with values outside 0 to 1.",
            "uint8 from 0 to 255, or float from 0 to 1, not yet normalised",
            "images / 255 if they go to 255; put Normalize into the Compose instead of before it",
        )


# -- images, masks, rows -------------------------------------------------------------------------


def check_images(images: object) -> Tensor:
    """Return `images` if it is `(N, C, H, W)` of an image dtype and has pixels."""
    if not isinstance(images, Tensor):
        raise InputError(
            f"images are a {type(images).__name__}.", "a torch tensor", "torch.as_tensor(images)"
        )
    if images.dim() != 4:
        raise InputError(
            f"images of shape {tuple(images.shape)}.",
            "(batch, channels, height, width)",
            _as_batch(images.shape),
        )
    height, width, last = images.shape[1:]
    if last in (1, 3, 4) and (min(height, width) > 16 or height == width > 4):
        raise InputError(
            f"images of shape {tuple(images.shape)}: channels last (HWC).",
            "(batch, channels, height, width)",
            "images.permute(0, 3, 1, 2)",
        )
    if images.dtype not in IMAGE_DTYPES:
        raise InputError(
            f"images of dtype {images.dtype}.",
            ", ".join(str(dtype) for dtype in IMAGE_DTYPES),
            "images.to(torch.uint8) for values from 0 to 255",
        )
    if 0 in images.shape:
        raise InputError(
            f"images of shape {tuple(images.shape)}: there is no pixel.",
            "at least one image, channel, row and column",
            "skip empty batches",
        )
    if images.requires_grad and torch.is_grad_enabled():
        raise InputError(
            "images that require a gradient.",
            "images without one: augmentation is not differentiated",
            "images.detach()",
        )
    return images


def _as_batch(shape: Sequence[int]) -> str:
    """Return the expression that makes a batch of images of a tensor with another number of axes."""
    if len(shape) == 3 and shape[0] in (1, 3, 4):
        return "images.unsqueeze(0)"
    if len(shape) == 3 and shape[2] in (1, 3, 4):
        return "images.permute(2, 0, 1).unsqueeze(0)"
    if len(shape) == 3:
        return "images.unsqueeze(1)"  # grey ones
    return "images.flatten(0, -4)" if len(shape) > 4 else "images.reshape(1, 1, *images.shape[-2:])"


def check_masks(masks: object, images: Tensor, ignore_index: int) -> Tensor:
    """Return `masks` if they belong to `images` and can hold the ignore index; booleans as uint8, which can."""
    if not isinstance(masks, Tensor):
        raise InputError(
            f"masks are a {type(masks).__name__}.", "a torch tensor", "torch.as_tensor(masks)"
        )
    if masks.is_floating_point() or masks.is_complex():
        raise InputError(
            f"masks of dtype {masks.dtype}.",
            "an integer dtype: labels are moved, never mixed",
            "masks.long() or masks.to(torch.uint8)",
        )
    if masks.dtype == torch.bool:
        masks = masks.view(torch.uint8)
    if masks.dtype not in MASK_DTYPES:  # torch can neither pad nor gather the wide unsigned ones
        raise InputError(
            f"masks of dtype {masks.dtype}.",
            ", ".join(str(dtype) for dtype in MASK_DTYPES),
            "masks.to(torch.int32)",
        )
    size, num = tuple(images.shape[-2:]), images.shape[0]
    if tuple(masks.shape) not in ((num, *size), (num, 1, *size)):
        raise InputError(
            f"masks of shape {tuple(masks.shape)} beside images of shape {tuple(images.shape)}.",
            f"{(num, *size)} or {(num, 1, *size)}",
            "check that images and masks come from the same rows and have the same size",
        )
    _same_device("masks", masks, images)
    limits = torch.iinfo(masks.dtype)
    if not limits.min <= ignore_index <= limits.max:
        raise InputError(
            f"ignore_index {ignore_index} with masks of dtype {masks.dtype}.",
            f"{limits.min} to {limits.max}",
            f"ignore_index={-1 if limits.min < 0 else 255}, or masks.long()",
        )
    return masks


def check_loss(criterion: object, augmentation: object) -> None:
    """Raise if a loss rejects the value that an augmentation writes in masks where no input pixel is.

    Args:
        criterion: The loss; only torch's cross entropy and NLL are known to reject values.
        augmentation: A `Compose`, or a schedule of several.
    """
    loss = torch.nn.CrossEntropyLoss, torch.nn.NLLLoss
    functions = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)
    if isinstance(criterion, loss):
        ignored, name = criterion.ignore_index, type(criterion).__name__
    elif criterion in functions:
        ignored, name = -100, "CrossEntropyLoss"
    else:
        return
    for stage in getattr(augmentation, "stages", {0: augmentation}).values():
        written = getattr(stage, "ignore_index", ignored)
        moving = [op for op in getattr(stage, "ops", ()) if op.reads_outside]
        if moving and written != ignored:
            raise InputError(
                f"{type(moving[0]).__name__} writes {written} in masks where no input pixel is, "
                f"and the loss ignores {ignored} only.",
                "one ignore_index for both",
                f"torch.nn.{name}(ignore_index={written})",
            )


def check_rows(rows: object, images: Tensor, look: bool) -> Tensor:
    """Return `rows` if they are int64 `(B,)`; values are checked on a CPU, elsewhere only if `look`."""
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype != torch.int64:
        given = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else repr(rows)
        whole = isinstance(rows, Tensor) and rows.dim() == 1 and rows.dtype in MASK_DTYPES
        raise InputError(
            f"rows are {given}.",
            "an int64 tensor (batch,)",
            "rows.long()" if whole else "torch.as_tensor(rows, device=images.device)",
        )
    _same_device("rows", rows, images)
    if rows.numel() == 0:
        raise InputError("rows are empty.", "at least one row", "skip empty batches")
    if look or images.device.type == "cpu":
        least, most = (int(bound) for bound in torch.aminmax(rows))
        if least < 0 or most >= images.shape[0]:
            raise InputError(
                f"rows from {least} to {most} of {images.shape[0]} images.",
                f"0 to {images.shape[0] - 1}",
                "rows count from the first image of this tensor",
            )
    return rows


def check_fits(images: Tensor, batch: int, program: Program, table: Tensor) -> None:
    """Raise if parameters were drawn for other images than these."""
    if images.shape[1:] != (program.channels, *program.in_size) or table.shape[0] != batch:
        drawn = (table.shape[0], program.channels, *program.in_size)
        raise InputError(
            f"parameters for images of shape {drawn}, applied to {(batch, *images.shape[1:])}.",
            "the batch, channels and size they were drawn for",
            "compose.draw(len(images), images.shape[-2:], images.shape[1], images.device)",
        )
    _same_device("parameters", table, images)


def check_points(points: object, last: int, table: Tensor, name: str) -> Tensor:
    """Return boxes or keypoints `(batch, N, last)` that go with the parameters in `table`."""
    if not isinstance(points, Tensor) or points.dim() != 3 or points.shape[-1] != last:
        given = tuple(points.shape) if isinstance(points, Tensor) else type(points).__name__
        raise InputError(
            f"{name} are {given}.",
            f"a float tensor (batch, number, {last})",
            f"{name}.view(batch, -1, {last})",
        )
    if not points.is_floating_point():
        raise InputError(f"{name} of dtype {points.dtype}.", "a float dtype", f"{name}.float()")
    if points.shape[0] != table.shape[0]:
        raise InputError(
            f"{name} of {points.shape[0]} images with parameters for {table.shape[0]}.",
            "one row of parameters per image",
            "use the Params of the same batch",
        )
    _same_device(name, points, table, "parameters")
    return points


def _same_device(name: str, tensor: Tensor, other: Tensor, whose: str = "images") -> None:
    if tensor.device != other.device:
        raise InputError(
            f"{name} on {tensor.device} and {whose} on {other.device}.",
            "one device; nothing is moved in silence",
            f"{name}.to({str(other.device)!r})",
        )
