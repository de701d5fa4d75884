"""A light SegFormer: four transformer stages and a multi-scale head, at most 1.82 million weights.

Enters: normalised images `(batch, channels, height, width)`, any size from one pixel up. Leaves: logits
`(batch, classes, height, width)`. Costs: with the defaults 1.67 million weights. Keys and values of attention come
from averaged maps, so the first stage has 64 times fewer keys than tokens.

Shapes depend only on the input's shape, and nothing waits for the device. Normalisation is by token
or by image, never over a batch, so accumulated batches equal one big batch.

The published net is "MicroSegFormer + LMSA": overlapping patches, attention with spatial reduction, a
convolution in the feed-forward part instead of position embeddings, an all-MLP decoder, and a light
multi-scale attention on the joined map. This is written from that description and contains none of its code.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from stoker.errors import InputError
from stoker.recipes.segmentation.options import Four, SegmentationOptions

Tensor = torch.Tensor
Size = tuple[int, int]
MAX_PARAMETERS = 1_821_085  # of the published net: ours must not be larger
_REDUCTIONS: Four = (8, 4, 2, 1)  # side of the squares that attention averages, per stage


def to_tokens(maps: Tensor) -> Tensor:
    """Return `(batch, height * width, channels)` of `(batch, channels, height, width)`."""
    return maps.flatten(2).transpose(1, 2)


def to_maps(tokens: Tensor, size: Size) -> Tensor:
    """Return `(batch, channels, height, width)` of `(batch, height * width, channels)`."""
    maps: Tensor = tokens.transpose(1, 2).unflatten(2, size)
    # Contiguous maps halve the time of the depthwise convolutions' backward pass on a CPU.
    return maps.contiguous()


class PatchEmbedding(nn.Module):
    """Overlapping patches: a strided convolution whose kernel is wider than its stride.

    The kernel size must be odd. Height and width are divided by the stride and rounded up.
    """

    def __init__(self, channels: int, width: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2)
        self.norm = nn.LayerNorm(width)

    def forward(self, maps: Tensor) -> tuple[Tensor, Size]:
        """Return tokens and the size of their map."""
        patches = self.patches(maps)
        return self.norm(to_tokens(patches)), (patches.shape[2], patches.shape[3])


class EfficientAttention(nn.Module):
    """Self-attention whose keys and values come from a map averaged over squares.

    `heads` must divide `width`. With a `reduction` of 1 the map is not averaged.
    """

    def __init__(self, width: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.heads = heads
        self.reduction = reduction
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width) if reduction > 1 else nn.Identity()

    def forward(self, tokens: Tensor, size: Size) -> Tensor:
        """Return the attention output of each token."""
        query = self._split(self.query(tokens))
        key, value = self.key_value(self._reduce(tokens, size)).chunk(2, dim=2)
        found = functional.scaled_dot_product_attention(query, self._split(key), self._split(value))
        joined: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return joined

    def _reduce(self, tokens: Tensor, size: Size) -> Tensor:
        if self.reduction == 1:
            return tokens
        # Averaging needs no weights (a strided convolution has reduction² width²), and with ceil_mode it
        # takes any size. Squares that cross the border average the pixels inside.
        squares = functional.avg_pool2d(
            to_maps(tokens, size), self.reduction, ceil_mode=True, count_include_pad=False
        )
        reduced: Tensor = self.norm(to_tokens(squares))
        return reduced

    def _split(self, tokens: Tensor) -> Tensor:
        by_head: Tensor = tokens.unflatten(2, (self.heads, -1))
        return by_head.transpose(1, 2)


class MixForward(nn.Module):
    """Wide linear, a depthwise 3x3 convolution (which replaces position embeddings), GELU, narrow linear."""

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        wide = width * expansion
        self.widen = nn.Linear(width, wide)
        self.near = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.narrow = nn.Linear(wide, width)

    def forward(self, tokens: Tensor, size: Size) -> Tensor:
        """Return tokens."""
        near = to_tokens(self.near(to_maps(self.widen(tokens), size)))
        narrow: Tensor = self.narrow(functional.gelu(near))
        return narrow


class Block(nn.Module):
    """Attention, then `MixForward`, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, reduction: int, expansion: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = EfficientAttention(width, heads, reduction)
        self.forward_norm = nn.LayerNorm(width)
        self.mix = MixForward(width, expansion)

    def forward(self, tokens: Tensor, size: Size) -> Tensor:
        """Return tokens."""
        tokens = tokens + self.attention(self.attention_norm(tokens), size)
        mixed: Tensor = self.mix(self.forward_norm(tokens), size)
        return tokens + mixed


class Stage(nn.Module):
    """Patches, blocks and a norm; the output map is smaller than the input by the stride of the patches."""

    def __init__(
        self,
        channels: int,
        width: int,
        depth: int,
        heads: int,
        reduction: int,
        expansion: int,
        first: bool,
    ) -> None:
        super().__init__()
        kernel, stride = (7, 4) if first else (3, 2)
        self.embed = PatchEmbedding(channels, width, kernel, stride)
        self.blocks = nn.ModuleList(Block(width, heads, reduction, expansion) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, maps: Tensor) -> Tensor:
        """Return the stage's map."""
        tokens, size = self.embed(maps)
        for block in self.blocks:
            tokens = block(tokens, size)
        return to_maps(self.norm(tokens), size)


class MultiScaleAttention(nn.Module):
    """LMSA: convolutions of three ranges, weighted per channel by a gate that depends on the image.

    `x + gate * mix(near + further + far)`: three depthwise 3x3 convolutions with dilation 1, 2 and 4,
    a 1x1 convolution, and a gate per channel from the mean over the image.
    """

    def __init__(self, width: int, reduction: int = 8) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation, groups=width)
            for dilation in (1, 2, 4)
        )
        self.mix = nn.Sequential(nn.GroupNorm(1, width), nn.GELU(), nn.Conv2d(width, width, 1))
        narrow = max(1, width // reduction)
        self.gate = nn.Sequential(
            nn.Linear(width, narrow), nn.ReLU(), nn.Linear(narrow, width), nn.Sigmoid()
        )

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps."""
        near, further, far = (scale(maps) for scale in self.scales)
        gate = self.gate(maps.mean(dim=(2, 3)))[:, :, None, None]
        weighted: Tensor = gate * self.mix(near + further + far)
        return maps + weighted


class Head(nn.Module):
    """Resizes the maps of all stages to the first one's size, joins them, and computes logits."""

    def __init__(self, widths: Four, width: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.narrow = nn.ModuleList(nn.Conv2d(own, width, 1) for own in widths)
        self.join = nn.Sequential(
            nn.Conv2d(4 * width, width, 1, bias=False), nn.GroupNorm(1, width), nn.GELU()
        )
        self.scales = MultiScaleAttention(width)
        self.classes = nn.Sequential(nn.Dropout2d(dropout), nn.Conv2d(width, num_classes, 1))

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return logits at the first stage's size."""
        size = stages[0].shape[2:]
        maps = [
            functional.interpolate(narrow(stage), size, mode="bilinear", align_corners=False)
            for narrow, stage in zip(self.narrow, stages, strict=True)
        ]
        logits: Tensor = self.classes(self.scales(self.join(torch.cat(maps, dim=1))))
        return logits


class MicroSegFormer(nn.Module):
    """Images to logits of the same size."""

    def __init__(self, num_classes: int, channels: int, options: SegmentationOptions) -> None:
        super().__init__()
        sizes = options.widths, options.depths, options.heads
        self.stages = nn.ModuleList(
            Stage(*numbers, expansion=options.expansion, first=number == 0)
            for number, numbers in enumerate(
                zip((channels, *options.widths[:-1]), *sizes, _REDUCTIONS, strict=True)
            )
        )
        self.head = Head(options.widths, options.head_width, num_classes, options.dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `(batch, classes, height, width)`."""
        if not images.is_floating_point():
            raise InputError(
                f"images of dtype {images.dtype} reached the model.",
                "normalised float images",
                "Loader(..., augment=job.augmentation), and .validation() of it for validation",
            )
        maps, stages = images, []
        for stage in self.stages:
            maps = stage(maps)
            stages.append(maps)
        return functional.interpolate(
            self.head(stages), images.shape[2:], mode="bilinear", align_corners=False
        )
