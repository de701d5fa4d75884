"""The other ways to augment a batch, each as it does best, for `benchmarks/augment.py`.

Enters: a `Work`: how many images of which size and type, on which device, with contrast or a mask.
Leaves: a function from (images, masks) to an augmented batch per peer, or `UnavailableError` with the
reason in words. Costs: importing the peer, up to some seconds.

All do the same: flip with p = 0.5, rotation within ±15 degrees (bilinear, zeros outside), brightness
and, where asked for, contrast within ±20 %, then ImageNet's normalisation. Where a peer cannot do
exactly that, its builder says what it does instead. Everything random is drawn anew in every call and
counted.
"""

from __future__ import annotations

import importlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from stoker.augment import fused
from stoker.augment.compose import Compose
from stoker.augment.geometry import RandomHorizontalFlip, RandomRotation
from stoker.augment.ops import ColorJitter, Normalize, ToDtype
from stoker.units import format_bytes

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
DEGREES = 15.0
JITTER = 0.2
NUM_CLASSES = 19
LOADER_SECONDS = 4.0

Augment = Callable[[Tensor, Tensor | None], object]


class UnavailableError(Exception):
    """A way that cannot be measured here; its text is the reason, for the table."""


@dataclass(frozen=True)
class Work:
    """What one batch is and what is done to it.

    Attributes:
        batch: Images in a batch.
        size: Their (height, width).
        device: Where they are before and after.
        input_dtype: `torch.uint8`, or a float type with values in [0, 1].
        output_dtype: Float type that a model would be given.
        contrast: Also jitter the contrast, which needs the mean of every augmented image.
        mask: Also transform a mask of int64 classes, by nearest.
    """

    batch: int
    size: tuple[int, int]
    device: torch.device
    input_dtype: torch.dtype = torch.float32
    output_dtype: torch.dtype = torch.float32
    contrast: bool = False
    mask: bool = False

    def make_inputs(self, count: int) -> list[Inputs]:
        """Return `count` different batches on the device, the same ones every time."""
        place = self.device
        generator = torch.Generator(place).manual_seed(0)
        shared: dict[str, Any] = {"device": place, "generator": generator}
        made = []
        for _ in range(count):
            pixels = torch.randint(0, 256, (self.batch, 3, *self.size), dtype=torch.uint8, **shared)
            images = (
                pixels if self.input_dtype == torch.uint8 else pixels.to(self.input_dtype) / 255
            )
            classes = torch.randint(0, NUM_CLASSES, (self.batch, *self.size), **shared)
            made.append(Inputs(images, classes if self.mask else None))
        return made


@dataclass(frozen=True)
class Inputs:
    """One batch before augmentation: images (B, 3, H, W) and masks (B, H, W) int64 or None."""

    images: Tensor
    masks: Tensor | None


def stoker_torch(work: Work) -> Augment:
    """Return stoker's reference backend, which runs on every device."""
    return make_compose(work, "torch")


def stoker_fused(work: Work) -> Augment:
    """Return stoker's Triton kernel; on a CPU it could only be interpreted, which measures nothing."""
    on_gpu = work.device.type == "cuda"
    reason = fused.available(work.device) if on_gpu else "the device is a CPU"
    if reason is not None:
        raise UnavailableError(reason)
    return make_compose(work, "fused")


def make_compose(work: Work, backend: str, channels_last: bool = False) -> Compose:
    """Return the benchmark's augmentation as a stoker pipeline."""
    contrast = JITTER if work.contrast else 0.0
    ops = [
        RandomHorizontalFlip(0.5),
        RandomRotation(DEGREES),
        ColorJitter(brightness=JITTER, contrast=contrast),
        Normalize(MEAN, STD),
        ToDtype(work.output_dtype, channels_last=channels_last),
    ]
    return Compose(ops, backend=backend)


def copy_limit(work: Work) -> Augment:
    """Return the floor: read every input value once, write every output value once."""
    images = torch.empty(work.batch, 3, *work.size, dtype=work.output_dtype, device=work.device)
    masks = torch.empty(work.batch, *work.size, dtype=torch.int64, device=work.device)

    def run(given: Tensor, classes: Tensor | None) -> object:
        images.copy_(given)
        if classes is not None:
            masks.copy_(classes)
        return images

    return run


def kornia(work: Work) -> Augment:
    """Return Kornia's sequential pipeline: per-sample draws, one kernel or more per op."""
    module = _import("kornia.augmentation", "kornia")
    contrast = JITTER if work.contrast else 0.0
    keys = ["input", "mask"] if work.mask else ["input"]
    pipeline = module.AugmentationSequential(
        module.RandomHorizontalFlip(p=0.5),
        module.RandomRotation(DEGREES, p=1.0),
        module.ColorJitter(JITTER, contrast, 0.0, 0.0, p=1.0),
        module.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        data_keys=keys,
    ).to(work.device)

    def run(images: Tensor, masks: Tensor | None) -> object:
        values = images.float() / 255 if images.dtype == torch.uint8 else images.float()
        if masks is None:
            return pipeline(values).to(work.output_dtype)
        out, out_masks = pipeline(values, masks.unsqueeze(1).float())
        return out.to(work.output_dtype), out_masks.squeeze(1).long()

    return run


def torchvision_batch(work: Work) -> Augment:
    """Return torchvision v2 on the whole batch: fast, but one draw for all of its images."""
    transform, wrap = _torchvision(work)

    def run(images: Tensor, masks: Tensor | None) -> object:
        return transform(images) if masks is None else transform(images, wrap(masks))

    return run


def torchvision_samples(work: Work) -> Augment:
    """Return torchvision v2 called image by image, so that every image has its own draw."""
    transform, wrap = _torchvision(work)

    def run(images: Tensor, masks: Tensor | None) -> object:
        if masks is None:
            return torch.stack([transform(image) for image in images])
        pairs = [transform(image, wrap(mask)) for image, mask in zip(images, masks, strict=True)]
        return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])

    return run


def _torchvision(work: Work) -> tuple[Any, Any]:
    v2 = _import("torchvision.transforms.v2", "torchvision")
    wrap = _import("torchvision.tv_tensors", "torchvision").Mask
    # uint8 until the end is what torchvision advises for speed; its colour ops know both types.
    steps = [
        v2.RandomHorizontalFlip(0.5),
        v2.RandomRotation(DEGREES, interpolation=v2.InterpolationMode.BILINEAR),
        v2.ColorJitter(brightness=JITTER, contrast=JITTER if work.contrast else None),
        v2.ToDtype({torch.Tensor: torch.float32, wrap: None, "others": None}, scale=True),
        v2.Normalize(list(MEAN), list(STD)),
        v2.ToDtype({torch.Tensor: work.output_dtype, wrap: None, "others": None}),
    ]
    return v2.Compose(steps), wrap


def dali(work: Work, inputs: list[Inputs]) -> Callable[[], object]:
    """Return a DALI pipeline over the inputs, which it is given in its own layout, HWC.

    Its contrast stretches around mid-grey, not around the mean of the image: less work than the
    others do. It runs one batch ahead on its own stream, as it always does.
    """
    if work.device.type != "cuda":
        raise UnavailableError("the device is a CPU")
    _import("nvidia.dali", "nvidia-dali")
    fn = _import("nvidia.dali.fn", "nvidia-dali")
    types = _import("nvidia.dali.types", "nvidia-dali")
    pipeline_def = importlib.import_module("nvidia.dali").pipeline_def
    images = [each.images.permute(0, 2, 3, 1).contiguous() for each in inputs]
    masks = [each.masks.int().unsqueeze(-1) for each in inputs if each.masks is not None]
    top = 255.0 if work.input_dtype == torch.uint8 else 1.0
    kinds = {torch.float32: types.FLOAT, torch.float16: types.FLOAT16}
    if work.output_dtype not in kinds:
        raise UnavailableError(f"DALI does not write {work.output_dtype}")

    @pipeline_def(batch_size=work.batch, num_threads=4, device_id=work.device.index or 0)
    def pipeline() -> Any:
        angle = fn.random.uniform(range=(-DEGREES, DEGREES))
        flip = fn.random.coin_flip(probability=0.5)
        values = fn.external_source(
            source=_cycle(images), device="gpu", layout="HWC", no_copy=True, batch=True
        )
        values = fn.rotate(values, angle=angle, keep_size=True, fill_value=0.0)
        factors = {"brightness": fn.random.uniform(range=(1 - JITTER, 1 + JITTER))}
        if work.contrast:
            factors["contrast"] = fn.random.uniform(range=(1 - JITTER, 1 + JITTER))
        values = fn.brightness_contrast(values, contrast_center=top / 2, **factors)
        values = fn.crop_mirror_normalize(
            values,
            mirror=flip,
            mean=[value * top for value in MEAN],
            std=[value * top for value in STD],
            dtype=kinds[work.output_dtype],
            output_layout="CHW",
        )
        if not masks:
            return values
        classes = fn.external_source(
            source=_cycle(masks), device="gpu", layout="HWC", no_copy=True, batch=True
        )
        turned = fn.rotate(
            classes, angle=angle, keep_size=True, fill_value=255, interp_type=types.INTERP_NN
        )
        return values, fn.flip(turned, horizontal=flip)

    built = pipeline()
    built.build()
    return built.run


def _cycle(batches: list[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from batches


def _import(module: str, package: str) -> ModuleType:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing part of an installed package is another fault than a missing package.
        if error.name and error.name.partition(".")[0] == module.partition(".")[0]:
            raise UnavailableError(f"{package} is not installed") from error
        raise UnavailableError(f"{package} cannot be imported: {error}") from error
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnavailableError(f"{package} cannot be imported: {first}") from error


class _Samples(torch.utils.data.Dataset[Any]):
    """Images in RAM, augmented one by one where they are asked for: in a worker."""

    def __init__(self, inputs: Inputs, augment: Augment, num_samples: int) -> None:
        self._inputs = inputs
        self._augment = augment
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> object:
        row = index % len(self._inputs.images)
        masks = self._inputs.masks
        one = self._augment(
            self._inputs.images[row : row + 1], None if masks is None else masks[row : row + 1]
        )
        return tuple(part[0] for part in one) if isinstance(one, tuple) else one[0]


def loader_seconds(
    work: Work, workers: int, bursts: int, build: Callable[[Work], Augment]
) -> list[float]:
    """Return seconds per batch of torch's DataLoader whose workers augment on the CPU.

    Workers deliver in bursts of one batch each, so time is taken over whole bursts, `bursts` of them
    or as many as begin within `LOADER_SECONDS`. What was made while the workers started is not
    counted. The copy to the device is: the batch is needed there.
    """
    on_cpu = replace(work, device=torch.device("cpu"))
    augment = build(on_cpu)
    _check_shared_memory(on_cpu, workers)
    burst = workers * math.ceil(8 / workers)
    num_samples = (2 * workers + burst * bursts + 2 * workers) * work.batch
    samples = _Samples(on_cpu.make_inputs(1)[0], augment, num_samples)
    with warnings.catch_warnings():
        # More workers than cores is what is measured here, and torch warns of it.
        warnings.simplefilter("ignore")
        loader = torch.utils.data.DataLoader(
            samples,
            batch_size=work.batch,
            num_workers=workers,
            pin_memory=work.device.type == "cuda",
            timeout=120,
        )
        batches = iter(loader)
        try:
            return _bursts(batches, workers, bursts, work.device)
        except RuntimeError as error:
            raise UnavailableError(
                f"the DataLoader failed: {str(error).splitlines()[0]}"
            ) from error
        finally:
            _stop(batches)


def _bursts(batches: Iterator[Any], workers: int, bursts: int, device: torch.device) -> list[float]:
    first = _burst(batches, workers, device)
    slow = first * workers > LOADER_SECONDS / 4
    if not slow:
        # Each worker made a second batch while the last of them started.
        _burst(batches, workers, device)
    size = workers if slow else workers * math.ceil(8 / workers)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < bursts and (not seconds or time.perf_counter() - began < LOADER_SECONDS):
        seconds.append(_burst(batches, size, device))
    return seconds


def _burst(batches: Iterator[Any], count: int, device: torch.device) -> float:
    began = time.perf_counter()
    for _ in range(count):
        batch = next(batches)
        parts = batch if isinstance(batch, list | tuple) else [batch]
        for part in parts:
            part.to(device, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / count


def _stop(batches: Any) -> None:
    # Without this the workers go on filling their queues beside the next measurement.
    stop = getattr(batches, "_shutdown_workers", None)
    if stop is not None:
        stop()


def _check_shared_memory(work: Work, workers: int) -> None:
    """Refuse what would die of a bus error: workers hand batches over in /dev/shm."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return
    pixels = work.batch * work.size[0] * work.size[1]
    batch_bytes = pixels * (3 * work.output_dtype.itemsize + (8 if work.mask else 0))
    stats = os.statvfs(shared)
    free, needed = stats.f_bavail * stats.f_frsize, batch_bytes * (2 * workers + 1)
    if free < needed:
        raise UnavailableError(
            f"/dev/shm has {format_bytes(free)} free and {workers} workers need {format_bytes(needed)}"
        )
