"""`Compose`: a checked list of augmentations, drawn and applied to batches on their device.

Enters: ops in the order of the phases; then batches of images, with masks, boxes and keypoints if there are any.
Leaves: augmented tensors on the same device; nothing is moved. Costs: one small draw and one pass over memory on a
GPU with Triton, plain torch elsewhere; `backend_reason` tells which and why. Each stage (your own function,
RandAugment) splits the pass in two. The first call for a size builds the tape; later calls build nothing and do not
wait for the device, so they can be captured in a CUDA graph after one warm-up call.

Draws are a function of (seed, stream, epoch, step) and the row in the batch. The step counts calls; `seek` sets it;
`state_dict` holds it. `position.py` describes DataLoader workers and threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import torch

from stoker.arguments import explained
from stoker.augment import guard
from stoker.augment.definition import Op, Opcode, Program, Size, check_size
from stoker.augment.geometry import CenterCrop, RandomResizedCrop, Resize
from stoker.augment.ops import check_order, encode_tape, make_program, split_program
from stoker.augment.position import Position, Positioned
from stoker.augment.reference import TorchBackend, move_boxes, move_keypoints
from stoker.augment.sizing import Sizing
from stoker.augment.stages import Stage
from stoker.errors import InputError

if TYPE_CHECKING:
    from stoker.augment.fused import FusedBackend

    Backend = TorchBackend | FusedBackend

Tensor = torch.Tensor
BACKENDS = ("auto", "torch", "fused")


@dataclass(frozen=True)
class Params:
    """The parameters of one batch, to be applied to its images, masks, boxes and keypoints.

    Attributes:
        table: float32 `(batch, 16)` on the device; the columns are in `stoker.augment.draw`.
        program: The work it was drawn for.
        parts: Programs and stages, in the order in which they are applied; empty if the program is all.
        staged: Uniforms of the stages, float32 `(batch, rows, 8)`; None without stages.
    """

    table: Tensor
    program: Program
    parts: tuple[Program | Stage, ...] = ()
    staged: Tensor | None = None


@dataclass(frozen=True)
class _Plan:
    """Everything about one size of images that is the same for every batch."""

    program: Program
    tape: Tensor
    parts: tuple[Program | Stage, ...]
    num_staged: int


@explained("Compose([RandomHorizontalFlip()])")
class Compose(Positioned):
    """Augmentations in the order of the phases, with one draw per sample.

    Args:
        ops: Geometry, colour, blur, erasing, `Normalize`, `ToDtype`, in this order.
        seed: Up to 64 bits; different seeds give different draws.
        stream: 0 to 65535; ranks that share a seed each take their own. Streams below 16384 never coincide with
            those of `MixUp`, `CutMix` and of ops used alone.
        ignore_index: Written in masks where no input pixel is.
        backend: "auto" takes the fused kernel where it can run; "torch" and "fused" require one.

    Threads may share an object: no two draws are the same, but which thread gets which depends on timing. For
    reproducible threads give each one a Compose with a `stream` of its own. In DataLoader workers the seed is combined
    with torch's seed of the worker, so that draws differ by worker and by epoch and follow `torch.manual_seed`.

    Attributes:
        ops: The checked ops.
        backend_reason: The backend, why it was chosen, and what stages cost; "" before the first call.
        conversion: What `from_torchvision` made of each transform; empty for other objects.
        generation: Changes when the ops change, so that a captured graph can be found out of date.
    """

    generation: int = 0
    conversion: tuple[Any, ...] = ()

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
        self._position = Position(seed, stream)
        self._stages = [op for op in self.ops if isinstance(op, Stage) and not op.idle()]
        self.needs_ids = any(op.opcode == Opcode.FLIP_BY_ID for op in self.ops)
        self._begin()

    def _begin(self) -> None:
        self._plans: dict[tuple[Size, int, torch.device], _Plan] = {}
        self._backends: dict[tuple[object, ...], tuple[Backend, str]] = {}
        self._flags: dict[tuple[torch.device, int], guard.FaultFlag] = {}
        self._rows_seen: set[torch.device] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Plans, kernels and flags belong to this process and its device; a copy builds its own.
        own = ("_plans", "_backends", "_flags", "_rows_seen")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @staticmethod
    def from_torchvision(transforms: Any, **options: Any) -> Compose:
        """Build a Compose from a `torchvision.transforms.v2.Compose` (or v1, or a list of transforms).

        `compose.conversion` lists what became of each transform: part of the fused pass, a stage between fused parts,
        torchvision's own code called image by image, or dropped because nothing is left to do; with what differs.

        Args:
            transforms: The transforms; images enter as batches of tensors, so those that load or wrap are dropped.
            **options: Keywords of `Compose`: seed, stream, ignore_index, backend.

        Raises:
            InputError: A transform cannot be kept where it stands.
        """
        from stoker.augment.conversion import convert

        ops, conversion = convert(transforms)
        made = Compose(ops, **options)
        made.conversion = conversion
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.ops))}])"

    # -- drawing and applying --------------------------------------------------------------------

    @overload
    def __call__(
        self,
        images: Tensor,
        masks: None = None,
        *,
        rows: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        images: Tensor,
        masks: Tensor,
        *,
        rows: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def __call__(
        self,
        images: Tensor,
        masks: Tensor | None = None,
        *,
        rows: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Draw for a batch, apply, and count one step.

        Args:
            images: `(N, C, H, W)`: uint8, or float in [0, 1]; any strides.
            masks: `(N, H, W)` or `(N, 1, H, W)` of an integer dtype, or booleans, which become uint8.
            rows: int64 `(B,)`: take these images (and masks) out of N; all by default.
            ids: int64 `(B,)`: the number of each image in the data set, for `AlternatingFlip`; `rows` by default.

        Returns:
            Images in [0, 1] (normalised where there is a `Normalize`), float32 without `ToDtype`;
            with masks, the pair.

        Raises:
            InputError: Images or masks cannot be used, in this call or an earlier one (values are checked on the
                device and reported without waiting).
        """
        batch = self._check(images, masks, rows)
        ids = rows if ids is None else ids
        params = self.draw(batch, images.shape[-2:], images.shape[1], images.device, ids=ids)
        return self._apply(images, params, masks, rows)

    def batches(
        self,
        images: Tensor,
        masks: Tensor | None = None,
        *,
        rows: Tensor,
        batch_size: int,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Augment consecutive batches at the cost of one call, with the draws of one call per batch.

        Args:
            images: As for a call.
            masks: As for a call.
            rows: Rows of all batches, one batch after the other.
            batch_size: Rows of each batch.
        """
        num_rows = self._check(images, masks, rows)
        if batch_size < 1 or num_rows % batch_size:
            raise InputError(
                f"{num_rows} rows in batches of {batch_size}.",
                "whole batches",
                f"batch_size={num_rows}",
            )
        shape, num_batches = images.shape, num_rows // batch_size
        params = self.draw(batch_size, shape[-2:], shape[1], images.device, num_batches, ids=rows)
        return self._apply(images, params, masks, rows)

    def draw(
        self,
        batch: int,
        size: Sequence[int],
        channels: int,
        device: torch.device | str,
        num_batches: int = 1,
        *,
        ids: Tensor | None = None,
    ) -> Params:
        """Draw the parameters of consecutive batches and count a step for each; nothing is applied.

        Args:
            batch: Number of samples of a batch.
            size: (height, width) of the images that will enter.
            channels: Number of their channels.
            device: Their device.
            num_batches: Number of batches.
            ids: As for a call, for all batches.
        """
        for number in (batch, channels, num_batches):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise InputError(
                    f"{batch!r} images of {channels!r} channels.",
                    "whole numbers, 1 or more",
                    "compose.draw(32, (224, 224), 3, images.device)",
                )
        known = isinstance(device, torch.device) and device in self._position
        target = torch.device(device) if known else _placed(device)
        sides = tuple(size) if isinstance(size, Sequence) else size
        plan = self._plan(check_size("size", sides), channels, target)
        backend = self._pick(target, torch.uint8, plan.program)
        staged = None
        if plan.num_staged:
            shape = (batch * num_batches, plan.num_staged, 8)
            staged = torch.empty(shape, dtype=torch.float32, device=target)
        with self._position.take_lock():
            ids = self._check_ids(ids, batch * num_batches, target) if self.needs_ids else None
            counter = self._position.on(target)
            table = backend.draw(plan.tape, counter, batch, num_batches, ids=ids, staged=staged)
        return Params(table, plan.program, plan.parts, staged)

    def apply(
        self,
        images: Tensor,
        params: Params | None = None,
        masks: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Any:
        """Apply drawn parameters; draw them first if none are given.

        Args:
            images: `(N, C, H, W)`, or one image `(C, H, W)`; the result has the same number of dimensions.
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
            masks = masks.unsqueeze(0) if isinstance(masks, Tensor) else masks
            made = self.apply(images.unsqueeze(0), params, masks)
            return made[0] if isinstance(made, Tensor) else (made[0][0], made[1][0])
        batch = self._check(images, masks, rows)
        if params is None:
            params = self.draw(batch, images.shape[-2:], images.shape[1], images.device, ids=rows)
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
        self._check_points_follow(params, "boxes")
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
        self._check_points_follow(params, "keypoints")
        checked = guard.check_points(keypoints, 2, params.table, "keypoints")
        return move_keypoints(checked, params.table, params.program)

    def check(self) -> None:
        """Wait for the device and raise the faults that it found in the images so far.

        Faults in replays of a captured graph are raised here only: call it once per epoch.
        """
        for flag in list(self._flags.values()):
            flag.wait()

    def validation(self) -> Compose:
        """Return the part for validation images: nothing random, the same sizes and values."""
        fixed = [op.settled() for op in self.ops]
        return Compose(
            [op for op in fixed if op is not None],
            ignore_index=self.ignore_index,
            backend=self.backend,
        )

    def split_sizing(self) -> tuple[Sizing, Compose] | None:
        """Split off the first op if it resizes pictures of any size to one, else return None; see `sizing.py`."""
        first = self.ops[0] if self.ops else None
        if not isinstance(first, RandomResizedCrop | Resize):
            return None
        state = self.state_dict()
        rest = Compose(
            [CenterCrop(first.size), *self.ops[1:]],
            seed=state["seed"],
            stream=state["stream"],
            ignore_index=self.ignore_index,
            backend=self.backend,
        )
        return Sizing(first, state["seed"], state["stream"]), rest

    # -- inside ----------------------------------------------------------------------------------

    def _apply(
        self, images: Tensor, params: Params, masks: Tensor | None, rows: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        device = images.device
        if masks is not None and masks.dtype == torch.bool:
            masks = masks.view(torch.uint8)  # booleans could not hold the ignore index
        flag = None
        if images.is_floating_point() or rows is not None:
            key = (device, threading.get_ident())
            flag = self._flags.get(key)
            if flag is None:
                flag = self._flags[key] = guard.FaultFlag(device)
        faults = None if flag is None else flag.bits
        if params.staged is None:
            result, moved = self._pick(device, images.dtype, params.program).apply(
                images, masks, rows, params.table, params.program, faults
            )
        else:
            result, moved = self._apply_parts(images, params, masks, rows, faults)
        if flag is not None and not _capturing(device):
            flag.look()
        return result if moved is None else (result, moved)

    def _apply_parts(
        self,
        images: Tensor,
        params: Params,
        masks: Tensor | None,
        rows: Tensor | None,
        faults: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply programs and stages in turn; masks move with geometry only."""
        assert params.staged is not None
        wide = torch.float64 if images.dtype == torch.float64 else torch.float32
        last, first_row = len(params.parts) - 1, 0

        def apply(
            values: Tensor, labels: Tensor | None, table: Tensor, program: Program
        ) -> tuple[Tensor, Tensor | None]:
            backend = self._pick(values.device, values.dtype, program)
            return backend.apply(values, labels, None, table, program, None)

        for number, part in enumerate(params.parts):
            if isinstance(part, Stage):
                drawn = params.staged[:, first_row : first_row + part.num_rows]
                first_row += part.num_rows
                images, masks = part.run(images, masks, drawn, self.ignore_index, apply)
                continue
            if number < last and part.out_dtype != wide:
                part = replace(part, out_dtype=wide)
            if number == 0:
                backend = self._pick(images.device, images.dtype, part)
                images, masks = backend.apply(images, masks, rows, params.table, part, faults)
            else:
                images, moved = apply(images, masks if part.geometry else None, params.table, part)
                masks = moved if part.geometry else masks
        return images, masks

    def _plan(self, size: Size, channels: int, device: torch.device) -> _Plan:
        key = (size, channels, device)
        if key not in self._plans:
            if _capturing(device):
                raise InputError(
                    f"the first batch of {channels}x{size[0]}x{size[1]} images during a CUDA graph capture.",
                    "sizes that were seen before the capture",
                    "augment one batch of this size before torch.cuda.graph(...)",
                )
            program = make_program(self.ops, size, channels, self.ignore_index)
            parts = split_program(self.ops, size, channels, self.ignore_index)
            # The cache also serves calls outside of inference mode.
            with torch.inference_mode(False):
                tape = encode_tape(self.ops, size).to(device)
            num_staged = sum(op.num_rows for op in self.ops if isinstance(op, Stage))
            self._plans[key] = _Plan(program, tape, parts, num_staged if self._stages else 0)
        return self._plans[key]

    def _pick(self, device: torch.device, dtype: torch.dtype, program: Program) -> Backend:
        key = (device, dtype, program.out_dtype)
        if key not in self._backends:
            backend, reason = choose_backend(self.backend, device, dtype, program)
            if self._stages:
                names = ", ".join(getattr(op, "name", type(op).__name__) for op in self._stages)
                reason += f"; {names} in torch between fused parts: another read and write of the batch each"
            self._backends[key] = backend, reason
        backend, self.backend_reason = self._backends[key]
        return backend

    def _check_ids(self, ids: Tensor | None, batch: int, device: torch.device) -> Tensor:
        if self._position.in_worker():
            raise InputError(
                "AlternatingFlip in a DataLoader worker, which does not know the epoch.",
                "AlternatingFlip on batches in the training loop, or RandomHorizontalFlip in workers",
                "RandomHorizontalFlip()",
            )
        if ids is None:
            raise InputError(
                "AlternatingFlip without the numbers of the images.",
                "ids, or rows of a tensor that stays from epoch to epoch",
                "compose(images, ids=indices)",
            )
        if not isinstance(ids, Tensor) or ids.shape != (batch,) or ids.dtype != torch.int64:
            given = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
            raise InputError(
                f"ids are {given}.", f"an int64 tensor ({batch},)", "torch.as_tensor(indices)"
            )
        if ids.device != device:
            raise InputError(
                f"ids on {ids.device} and images on {device}.",
                "one device; nothing is moved in silence",
                f"ids.to({str(device)!r})",
            )
        return ids.contiguous()

    def _check_points_follow(self, params: object, what: str) -> None:
        """Raise if points cannot be moved as the images are."""
        _check_params(params)
        for op in self._stages:
            if op.moves:
                raise InputError(
                    f"{what} with {op!r}, whose geometry is no matrix of the Compose.",
                    f"{what} with the geometry ops of stoker.augment",
                    f"a Compose without it for images that have {what}",
                )

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
        device: Device of the images.
        dtype: Dtype of the images.
        program: The work to do.

    Raises:
        InputError: "fused" was asked for and cannot do this work.
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
        made = torch.empty(0, device=torch.device(device)).device
        if made.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, TypeError, AssertionError) as error:  # torch has one for each way to fail
        raise InputError(
            f"device is {device!r}: {str(error).splitlines()[0].rstrip('.:')}.",
            "a device that torch can use here",
            "images.device",
        ) from error
    return made


def _check_params(params: object) -> None:
    if not isinstance(params, Params):
        raise InputError(
            f"params are {params!r}.",
            "the Params that draw() returned",
            "params = compose.draw(len(images), images.shape[-2:], images.shape[1], images.device)",
        )


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


Op.composed_by = Compose
