"""MixUp and CutMix: mix each image of a batch with its neighbour, and targets in the same proportion.

Enters: float images `(B, C, H, W)` (after a `Compose`) and class labels `(B,)` or soft targets
`(B, num_classes)`. Leaves: mixed images of the same dtype and soft targets, float32. Costs: one or
two passes over the batch; device work only, no host synchronisation after the first call, so that
both can be captured in a CUDA graph.

The partner of a sample is the one before it in the batch (rolled by one); with a shuffled loader that
is a random one. The share comes from Beta(alpha, alpha) through a quantile table that is computed once
on the host; the random numbers come from a counter, as those of `Compose` do.
"""

from __future__ import annotations

import numpy as np
import torch

from stoker.augment import philox
from stoker.augment.definition import check_number
from stoker.augment.position import Position, Positioned
from stoker.errors import InputError

Tensor = torch.Tensor

TABLE_POINTS = 4097
_GRID_POINTS = 65537
_MOST_STREAMS = 0x2000


class _Mixer(Positioned):
    """Base of `MixUp` and `CutMix`: arguments, position, the drawn share, checks of images and targets."""

    _first_stream: int

    def __init__(
        self, alpha: float, num_classes: int, *, p: float = 1.0, seed: int = 0, stream: int = 0
    ) -> None:
        name = type(self).__name__
        self.alpha = check_number("alpha", alpha, 1e-3, 100.0, f"{name}(0.2, {num_classes})")
        self.p = check_number("p", p, 0.0, 1.0, f"{name}({alpha}, {num_classes}, p=0.5)")
        if not isinstance(num_classes, int) or isinstance(num_classes, bool) or num_classes < 1:
            raise InputError(f"num_classes is {num_classes!r}.", "1 or more", f"{name}(0.2, 10)")
        if not isinstance(stream, int) or not 0 <= stream < _MOST_STREAMS:
            raise InputError(f"stream is {stream!r}.", f"0 to {_MOST_STREAMS - 1}", "stream=0")
        self.num_classes = num_classes
        self._position = Position(seed, self._first_stream + stream)
        self._quantiles: dict[torch.device, Tensor] = {}
        self._looked = False

    def _draw(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the share `(batch,)` each sample keeps (1 where it is not mixed), and uniforms."""
        if device not in self._quantiles:
            # The cache also serves calls outside of inference mode.
            with torch.inference_mode(False):
                quantiles = torch.from_numpy(beta_quantiles(self.alpha)).float()
                self._quantiles[device] = quantiles.to(device)
        quantiles = self._quantiles[device]
        with self._position.take_lock():
            counter = self._position.on(device)
            drawn = philox.uniforms(counter, batch, 1)[:, 0]
            philox.advance(counter)
        place = drawn[:, 1] * (TABLE_POINTS - 1)
        low = place.floor()
        index = low.to(torch.int64)
        share = torch.lerp(quantiles[index], quantiles[index + 1], place - low)
        return torch.where(drawn[:, 0] < self.p, share, 1.0), drawn

    def _check(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the targets as `(B, num_classes)` float32."""
        if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
            given = (
                f"{images.dtype} {tuple(images.shape)}"
                if isinstance(images, Tensor)
                else type(images).__name__
            )
            raise InputError(
                f"images are {given}.",
                "float (batch, channels, height, width)",
                "mix what a Compose returned; it makes float of uint8",
            )
        if 0 in images.shape:
            raise InputError(
                f"images of shape {tuple(images.shape)}: there is no pixel.",
                "at least one image, channel, row and column",
                "skip empty batches",
            )
        if not isinstance(targets, Tensor) or targets.device != images.device:
            given = str(targets.device) if isinstance(targets, Tensor) else type(targets).__name__
            raise InputError(
                f"images on {images.device}, targets: {given}.",
                "tensors on one device; nothing is moved in silence",
                f"torch.as_tensor(targets, device={str(images.device)!r})",
            )
        batch = images.shape[0]
        if targets.is_floating_point() and targets.shape == (batch, self.num_classes):
            return targets.float()
        if targets.is_floating_point() or targets.shape != (batch,):
            raise InputError(
                f"targets of shape {tuple(targets.shape)} and dtype {targets.dtype}.",
                f"whole numbers ({batch},), or shares ({batch}, {self.num_classes})",
                "one class per image: masks cannot be mixed this way",
            )
        # Reading labels waits for a GPU, so there only those of the first call are read.
        capturing = targets.is_cuda and torch.cuda.is_current_stream_capturing()
        if targets.device.type == "cpu" or not (self._looked or capturing):
            self._looked = True
            least, most = (int(bound) for bound in torch.aminmax(targets))
            if least < 0 or most >= self.num_classes:
                raise InputError(
                    f"labels from {least} to {most}.",
                    f"0 to {self.num_classes - 1}",
                    f"num_classes={most + 1}"
                    if least >= 0
                    else "keep = labels >= 0; mix(images[keep], labels[keep])",
                )
        classes = torch.arange(self.num_classes, device=targets.device)
        return (targets.unsqueeze(1) == classes).float()


class MixUp(_Mixer):
    """A weighted sum of each image and its neighbour (Zhang et al., 2018).

    Args:
        alpha: Of Beta(alpha, alpha), 0.001 to 100; small values mix little.
        num_classes: Width of the targets.
        p: Probability per sample.
        seed: Another seed, other draws.
        stream: 0 to 8191; ranks that share a seed each take their own.
    """

    _first_stream = 0x4000

    @torch.no_grad()
    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixed images (same dtype) and soft targets `(B, num_classes)`."""
        soft = self._check(images, targets)
        share, _ = self._draw(images.shape[0], images.device)
        mixed = _blend(images, share.view(-1, 1, 1, 1)).to(images.dtype)
        return mixed, _blend(soft, share.view(-1, 1))


class CutMix(_Mixer):
    """A rectangle of each image from its neighbour (Yun et al., 2019).

    Args:
        alpha: Of Beta(alpha, alpha), 0.001 to 100; small values mix little.
        num_classes: Width of the targets.
        p: Probability per sample.
        seed: Another seed, other draws.
        stream: 0 to 8191; ranks that share a seed each take their own.
    """

    _first_stream = 0x6000

    @torch.no_grad()
    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixed images (same dtype) and soft targets in proportion to the area that was cut."""
        soft = self._check(images, targets)
        share, drawn = self._draw(images.shape[0], images.device)
        height, width = images.shape[2:]
        half = torch.sqrt(1.0 - share) * 0.5
        x0, x1 = cut_interval(drawn[:, 2], half, width)
        y0, y1 = cut_interval(drawn[:, 3], half, height)
        x = torch.arange(width, device=images.device)
        y = torch.arange(height, device=images.device).view(-1, 1)
        columns = (x >= x0.view(-1, 1, 1, 1)) & (x < x1.view(-1, 1, 1, 1))
        lines = (y >= y0.view(-1, 1, 1, 1)) & (y < y1.view(-1, 1, 1, 1))
        mixed = torch.where(columns & lines, images.roll(1, 0), images)
        kept = 1.0 - (x1 - x0) * (y1 - y0) / (height * width)
        return mixed, _blend(soft, kept.view(-1, 1))


def _blend(values: Tensor, share: Tensor) -> Tensor:
    """Return `share` of each row plus `1 - share` of the row before it; exact for a share of 1."""
    return values * share + values.roll(1, 0) * (1.0 - share)


def cut_interval(u: Tensor, half: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return first and last + 1 pixel of a cut around a random centre, inside the image."""
    centre, reach = torch.floor(u * side), half * side
    low = torch.floor(centre - reach + 0.5).clamp(0, side)
    high = torch.floor(centre + reach + 0.5).clamp(0, side)
    return low, high


def beta_quantiles(alpha: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the quantiles of Beta(alpha, alpha) at 4097 evenly spaced probabilities.

    The density is integrated over its left half only; the right half is its mirror. Below alpha = 1
    it is infinite at 0, and s = x**alpha makes it finite: x**(alpha-1) dx = ds / alpha.
    """
    grid = np.linspace(0.0, 1.0, _GRID_POINTS)
    if alpha < 1.0:
        x = 0.5 * grid ** (1.0 / alpha)
        density = (1.0 - x) ** (alpha - 1.0)
    else:
        x = 0.5 * grid
        density = (4.0 * x * (1.0 - x)) ** (alpha - 1.0)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    mass *= 0.5 / mass[-1]
    left = np.interp(np.linspace(0.0, 0.5, TABLE_POINTS // 2 + 1), mass, x)
    return np.concatenate([left, 1.0 - left[-2::-1]])
