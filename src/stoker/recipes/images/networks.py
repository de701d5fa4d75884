"""Networks that classify pictures: two of stoker's own, and any of torchvision or timm by name.

Enters: the name of a network, channels and classes; perhaps a file of weights. Leaves: a module from normalised images
`(batch, channels, height, width)` to scores `(batch, classes)`. Costs: with the defaults 6.6 million weights for
`resnet9` (0.56 GFLOP for a 32 px picture) and 11.6 million for `convnext` (1.7 GFLOP at 160 px).

Files of weights are read as tensors only (`weights_only`, or safetensors): no code in them can run.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from stoker.augment.mixing import beta_quantiles, cut_interval
from stoker.display import command, look_for, look_in, nearest
from stoker.errors import InputError, MissingExtraError

Tensor = torch.Tensor
OWN = ("resnet9", "convnext")
LIBRARIES = ("torchvision", "timm")
SMALL_SIDE = 64
"""Largest side in pixels for which "auto" takes `resnet9`; larger pictures get `convnext`."""
_TASTES = 5


class ConvNorm(nn.Sequential):
    """A 3x3 convolution, batch normalisation and CELU, which unlike ReLU leaves no unit without a gradient."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.CELU(0.3),
        )


class ResNet9(nn.Module):
    """Eight convolutions with two residual blocks, and a linear layer: for pictures up to about 64 px.

    The architecture is known from CIFAR-10 speed runs (DAWNBench, 2018) and was implemented from its description.

    `width` is the number of channels of the first convolution; the last has eight times as many.
    """

    def __init__(self, num_classes: int, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        self.stem = ConvNorm(channels, width)
        self.first = ConvNorm(width, 2 * width)
        self.first_residual = nn.Sequential(*(ConvNorm(2 * width, 2 * width) for _ in range(2)))
        self.second = ConvNorm(2 * width, 4 * width)
        self.third = ConvNorm(4 * width, 8 * width)
        self.third_residual = nn.Sequential(*(ConvNorm(8 * width, 8 * width) for _ in range(2)))
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores `(batch, classes)`."""
        maps = _halve(self.first(self.stem(images)))
        maps = maps + self.first_residual(maps)
        maps = _halve(self.second(maps))
        maps = _halve(self.third(maps))
        maps = maps + self.third_residual(maps)
        # The maximum of features after CELU is large; an eighth of it keeps the first scores near 0.
        scores: Tensor = self.head(maps.amax(dim=(2, 3)) * 0.125)
        return scores


def _halve(maps: Tensor) -> Tensor:
    return functional.max_pool2d(maps, 2, ceil_mode=True)


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of maps."""

    def forward(self, maps: Tensor) -> Tensor:
        """Return normalised maps."""
        return super().forward(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """A depthwise 7x7 convolution, then a wide MLP at every pixel; the result is scaled and added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.near = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        # Each block starts close to the identity, so that depth does not hurt the first steps.
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps of the same shape."""
        rows = self.norm(self.near(maps).permute(0, 2, 3, 1))
        made: Tensor = self.scale * self.narrow(functional.gelu(self.widen(rows)))
        return maps + made.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """A small ConvNeXt (Liu et al., 2022): for pictures of 64 px and more.

    `width` is the number of channels of the first stage; it doubles three times.
    """

    def __init__(
        self,
        num_classes: int,
        channels: int = 3,
        width: int = 64,
        depths: tuple[int, int, int, int] = (2, 2, 4, 2),
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, stride=4), ChannelNorm(width)]
        for number, depth in enumerate(depths):
            if number:
                layers += [ChannelNorm(width), nn.Conv2d(width, 2 * width, 2, stride=2)]
                width *= 2
            layers += [ConvNextBlock(width) for _ in range(depth)]
        self.body = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return scores `(batch, classes)`."""
        scores: Tensor = self.head(self.norm(self.body(images).mean(dim=(2, 3))))
        return scores


# -- by name -------------------------------------------------------------------------------------


def choose_network(name: str, size: tuple[int, int]) -> tuple[str, str]:
    """Return the name of the network and the reason; "auto" decides by the size of the pictures."""
    if name != "auto":
        return name, f"network {name}: as asked for"
    shown = f"{size[0]} x {size[1]}"
    if max(size) <= SMALL_SIDE:
        return "resnet9", f"network resnet9: pictures of {shown} are at most {SMALL_SIDE} px wide"
    return "convnext", f"network convnext: pictures of {shown} are wider than {SMALL_SIDE} px"


def make_network(
    name: str, num_classes: int, channels: int, width: int, size: tuple[int, int]
) -> nn.Module:
    """Return a network with initial weights.

    Args:
        name: "resnet9", "convnext", `torchvision/NAME`, `timm/NAME`, or a NAME that one of the two has.
        num_classes: Number of scores per picture.
        channels: Channels of the pictures.
        width: Channels of the first layer of stoker's own networks.
        size: Height and width of the pictures.
    """
    if name in OWN:
        least = 16 if name == "resnet9" else 32
        if min(size) < least:
            raise InputError(
                f"pictures of {size[0]} x {size[1]} px, and the network {name} halves them until nothing is left.",
                f"{least} px or more a side",
                "pack the pictures again with --size 32x32",
            )
        kind = ResNet9 if name == "resnet9" else ConvNext
        return kind(num_classes, channels, width)
    library, _, bare = name.rpartition("/")
    if library and library not in LIBRARIES:
        raise _unknown(name, [])
    network = _from_library(library, bare, name, num_classes, channels)
    return _tasted(network, name, num_classes, channels, size)


def _from_library(library: str, bare: str, name: str, num_classes: int, channels: int) -> nn.Module:
    offered: list[str] = []
    missing: list[str] = []
    for each in [library] if library else LIBRARIES:
        try:
            found: Any = importlib.import_module(
                "torchvision.models" if each == "torchvision" else each
            )
        except ImportError:
            missing.append(each)
            continue
        except Exception as error:  # a build for another torch may raise any exception
            raise InputError(
                f"{each} is installed and cannot be imported: {error}.",
                f"a build of {each} for torch {torch.__version__}",
                command("pip", "install", "--force-reinstall", each),
            ) from error
        names = list(found.list_models())
        offered += names
        if bare not in names:
            continue
        if each == "timm":
            made = found.create_model(bare, num_classes=num_classes, in_chans=channels)
            return cast(nn.Module, made)
        if channels != 3:
            raise InputError(
                f"pictures of {channels} channel, and torchvision's {bare} takes 3.",
                "pictures of 3 channels, or a network of ours or of timm",
                "pack the pictures again with --channels 3",
            )
        return cast(nn.Module, found.get_model(bare, weights=None, num_classes=num_classes))
    if missing:
        raise MissingExtraError.for_package(missing[0], "models", f"the network {name!r}")
    raise _unknown(name, offered)


def _unknown(name: str, offered: list[str]) -> InputError:
    near = nearest(name.rpartition("/")[2], [*OWN, *offered])
    return InputError(
        f"there is no network {name!r}.",
        f"auto, {', '.join(OWN)}, torchvision/NAME or timm/NAME",
        f"network={near or 'auto'!r}",
    )


def _tasted(
    network: nn.Module, name: str, num_classes: int, channels: int, size: tuple[int, int]
) -> nn.Module:
    """Return the network after a test of a copy: many networks take one size only, some return more than scores."""
    try:
        with torch.no_grad():
            # Some networks have further outputs in training only.
            made = copy.deepcopy(network).train()(torch.zeros(2, channels, *size))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise InputError(
            f"the network {name} does not take pictures of {size[0]} x {size[1]} px: {error}.",
            "pictures of the size that it was made for",
            "pack the pictures again with --size 224x224",
        ) from error
    if not isinstance(made, Tensor) or made.shape != (2, num_classes):
        raise InputError(
            f"the network {name} gives {type(made).__name__} in training, not a row of {num_classes} scores a picture.",
            "a classifier with one output",
            "network='auto'",
        )
    return network


# -- pretrained weights --------------------------------------------------------------------------


def load_weights(network: nn.Module, path: str | Path) -> str:
    """Load the weights of a file into a network; return a note on which tensors were loaded.

    Tensors are matched by name. A last layer with another number of classes keeps its initial weights.

    Args:
        network: Changed in place.
        path: `.safetensors`, or a file of `torch.save` that holds tensors by name (perhaps under "model" or
            "state_dict"). Pickled objects are refused.
    """
    given = {name.removeprefix("module."): value for name, value in read_tensors(path).items()}
    # stoker's checkpoints contain the network and perhaps its averaged weights, which are better.
    prefix = "averaged." if any(name.startswith("averaged.") for name in given) else "network."
    given = {name.removeprefix(prefix): value for name, value in given.items()}
    own = network.state_dict()
    fits = {
        name: value
        for name, value in given.items()
        if name in own and own[name].shape == value.shape
    }
    others = [name for name in given if name in own and name not in fits]
    absent = [name for name in own if name not in given]
    # One layer may differ in shape: the classifier of other classes. More differences mean another network.
    layers = {name.rpartition(".")[0] for name in others}
    if len(fits) < len(own) // 2 or len(layers) > 1:
        shown = (others or absent)[:_TASTES]
        raise InputError(
            f"{path} has {len(given):,} tensors, of which {len(fits):,} fit the network's {len(own):,}; "
            f"not {', '.join(shown)}.",
            "weights of the same network; its last layer may have other classes",
            f"network='{LIBRARIES[1]}/NAME', the network that they are of",
        )
    network.load_state_dict(fits, strict=False)
    new = sorted([*others, *absent])
    rest = f"; {', '.join(new[:_TASTES])} start from random values" if new else ""
    return f"weights of {Path(path).name}: {len(fits):,} of {len(own):,} tensors{rest}"


def read_tensors(path: str | Path) -> Mapping[str, Tensor]:
    """Return the tensors of a file by name; no code in the file is run."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no file {path}.", "a file of weights", look_for(path))
    if path.suffix == ".safetensors":
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError:
            raise MissingExtraError.for_package(
                "safetensors", "safetensors", f"reading {path.name}"
            ) from None
        try:
            return load_file(path)
        except SafetensorError as error:
            raise _unreadable(path, str(error)) from error
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # other files raise any exception, such as KeyError or IndexError
        raise _unreadable(path, type(error).__name__) from error
    for key in ("state_dict", "model", "model_ema", "state"):
        while isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
    if not isinstance(held, Mapping):
        raise _unreadable(path, f"it holds {type(held).__name__}")
    return {str(name): value for name, value in held.items() if isinstance(value, Tensor)}


def _unreadable(path: Path, why: str) -> InputError:
    return InputError(
        f"{path} cannot be read as weights: {why.rstrip('.')}.",
        "tensors by name: .safetensors, or torch.save(model.state_dict(), FILE)",
        look_in(path.parent),
    )


# -- what a network is wrapped in while it learns ---------------------------------------------------
# Random numbers come from torch's generator on the device, which a checkpoint saves: a resumed run draws the same
# numbers as an unbroken one. Shapes are static and nothing waits for the host, so the step's graph captures it all.


Outputs = Tensor | tuple[Tensor] | tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """Wraps a network: mixes pictures in training, and keeps an exponential moving average of its weights.

    In evaluation the averaged network is used, if there is one. Each picture is mixed with the previous one of the
    batch, which is a random picture with a shuffled loader.
    """

    num_steps: Tensor

    def __init__(
        self,
        network: nn.Module,  # images to scores
        mixup: float = 0.0,  # alpha of the Beta distribution of MixUp's shares; 0 turns MixUp off
        cutmix: float = 0.0,  # the same for CutMix; with both, one is drawn for each picture
        mix_share: float = 1.0,  # share of the pictures that are mixed
        # decay of the averaged weights per step, such as 0.999; 0 turns averaging off. The decay after step n is at
        # most (1 + n) / (10 + n): a short run is averaged over about its last tenth.
        average: float = 0.0,
    ) -> None:
        super().__init__()
        self.network = network
        self.average = average
        self.averaged = copy.deepcopy(network).requires_grad_(False) if average else None
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))
        self._shares = [alpha for alpha in (mixup, cutmix) if alpha]
        self._cut_from = {(True, True): 0.5, (False, True): 0.0}.get(
            (bool(mixup), bool(cutmix)), 1.0
        )
        self.mix_share = mix_share if self._shares else 0.0
        for number, alpha in enumerate(self._shares):
            # Not saved: it is computed from alpha.
            table = torch.from_numpy(beta_quantiles(alpha)).float()
            self.register_buffer(f"_quantiles_{number}", table, persistent=False)

    def train(self, mode: bool = True) -> Classifier:
        """Set the mode. The averaged network stays in evaluation mode, since its statistics are averaged too."""
        super().train(mode)
        if self.averaged is not None:
            self.averaged.eval()
        return self

    def forward(self, images: Tensor) -> Outputs:
        """Return scores; in training a tuple: scores and, with mixing, the share `(batch,)` that each picture keeps."""
        if not self.training:
            scores: Tensor = (self.network if self.averaged is None else self.averaged)(images)
            return scores
        if self.averaged is not None:
            self._follow(self.averaged)
        if not self._shares:
            return (self.network(images),)
        with torch.no_grad():
            images, kept = self._mix(images)
        return self.network(images), kept

    @torch.no_grad()
    def _follow(self, averaged: nn.Module) -> None:
        """Move the average towards the weights after the previous step."""
        self.num_steps += 1
        steps = self.num_steps.double()
        # Computed on the device: a CUDA graph cannot copy a new number from the host.
        toward = (1.0 - ((1 + steps) / (10 + steps)).clamp(max=self.average)).float()
        for theirs, own in (
            (averaged.parameters(), self.network.parameters()),
            (averaged.buffers(), self.network.buffers()),
        ):
            pairs = list(zip(theirs, own, strict=True))
            floats = [pair for pair in pairs if pair[0].is_floating_point()]
            for old, new in pairs:
                if not old.is_floating_point():
                    old.copy_(new)
            if floats:
                old_values, new_values = [pair[0] for pair in floats], [pair[1] for pair in floats]
                steps_made = torch._foreach_sub(new_values, old_values)
                torch._foreach_mul_(steps_made, toward)
                torch._foreach_add_(old_values, steps_made)

    def _mix(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixed pictures, and the share of itself that each keeps."""
        batch, _, height, width = images.shape
        drawn = torch.rand(5, batch, device=images.device)
        is_cut = drawn[0] >= self._cut_from
        tables = [getattr(self, f"_quantiles_{number}") for number in range(len(self._shares))]
        share = torch.where(is_cut, _look_up(tables[-1], drawn[1]), _look_up(tables[0], drawn[1]))
        share = torch.where(drawn[2] < self.mix_share, share, 1.0)
        before = images.roll(1, 0)
        blended = images * _wide(share) + before * (1.0 - _wide(share))
        if self._cut_from == 1.0:
            return blended.to(images.dtype), share
        half = torch.sqrt(1.0 - share) * 0.5
        x0, x1 = cut_interval(drawn[3], half, width)
        y0, y1 = cut_interval(drawn[4], half, height)
        x = torch.arange(width, device=images.device)
        y = torch.arange(height, device=images.device).view(-1, 1)
        inside = (x >= _wide(x0)) & (x < _wide(x1)) & (y >= _wide(y0)) & (y < _wide(y1))
        cut = torch.where(inside, before, images)
        mixed = torch.where(_wide(is_cut), cut, blended.to(images.dtype))
        return mixed, torch.where(is_cut, 1.0 - (x1 - x0) * (y1 - y0) / (height * width), share)


def _wide(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _look_up(table: Tensor, drawn: Tensor) -> Tensor:
    """Return the quantiles in `table` at uniform draws in [0, 1), linearly interpolated."""
    place = drawn * (len(table) - 1)
    low = place.floor()
    index = low.long()
    return torch.lerp(table[index], table[index + 1], place - low)


class ClassificationLoss(nn.Module):
    """Mean cross-entropy over pictures; a mixed picture has both classes as targets.

    Outputs in training are tuples. The validation loss is the plain cross-entropy, so that runs with different
    smoothing and weights can be compared.

    Args:
        smoothing: Share of each target that is spread over all classes.
        weights: `(classes,)` factors of a picture's loss, by its class. The loss is not divided by their sum in the
            batch, so that accumulated batches equal one big batch.
    """

    weights: Tensor | None

    def __init__(self, smoothing: float = 0.0, weights: Tensor | None = None) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.register_buffer("weights", weights)

    def forward(self, outputs: Outputs, targets: Tensor) -> Tensor:
        """Return the loss of class numbers `(batch,)`."""
        labels = targets.long()
        if isinstance(outputs, Tensor):
            return functional.cross_entropy(outputs, labels)
        if len(outputs) == 1:
            return self._each(outputs[0], labels).mean()
        logits, share = outputs
        first, second = self._each(logits, labels), self._each(logits, labels.roll(1, 0))
        return (share * first + (1.0 - share) * second).mean()

    def _each(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = functional.cross_entropy(
            logits, labels, reduction="none", label_smoothing=self.smoothing
        )
        return losses if self.weights is None else losses * self.weights[labels]
