"""Networks that classify pictures: two of ours, and any of torchvision or timm by name.

Enters: the name of a network, channels and classes; perhaps a file of weights. Leaves: a module, normalised images
`(batch, channels, height, width)` to scores `(batch, classes)`. Costs: with the defaults 6.6 million weights for
`resnet9` (0.56 GFLOP a 32 px picture) and 11.6 million for `convnext` (1.7 GFLOP at 160 px).

Files of weights are read as tensors only (`weights_only`, or safetensors): nothing in them can run.
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
"""Pictures up to this side are seen whole by three poolings; larger ones get `convnext`."""
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
    """Eight convolutions and a linear layer, two of the blocks residual: for pictures up to about 64 px.

    The shape is known from CIFAR-10 speed runs (DAWNBench, 2018); this is written to that description.

    `width` is that of the first convolution; the last has eight times as many channels.
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
    """A 7x7 convolution per channel, then a wide layer at every place; added to what came in, scaled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.near = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        # Each block begins as next to nothing, so that depth does not hurt the first steps.
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps."""
        rows = self.norm(self.near(maps).permute(0, 2, 3, 1))
        made: Tensor = self.scale * self.narrow(functional.gelu(self.widen(rows)))
        return maps + made.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """A small ConvNeXt (Liu et al., 2022): for pictures of 64 px and more.

    `width` is that of the first stage; it doubles three times.
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
    """Return the name of the network and why it is that one; "auto" goes by the size of the pictures."""
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
        num_classes: Out.
        channels: Of the pictures.
        width: Of our own networks' first layer.
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
        except Exception as error:  # a build for another torch raises anything
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
    """Return the network after pictures went through a copy: many take one size only, some give more than scores."""
    try:
        with torch.no_grad():
            # Some have further outputs in training only.
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
    """Fill a network with the weights of a file; return what was taken and what was not.

    Tensors go by name. The last layer of another number of classes keeps its initial weights.

    Args:
        network: Changed in place.
        path: `.safetensors`, or a file of `torch.save` that holds tensors by name (perhaps under "model" or
            "state_dict"). Pickled objects are refused.
    """
    given = {name.removeprefix("module."): value for name, value in read_tensors(path).items()}
    # Our own checkpoints hold the network and perhaps its average, which is the better one.
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
    # One layer may be another: the classifier of other classes. More is another network.
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
    rest = f"; {', '.join(new[:_TASTES])} begin anew" if new else ""
    return f"weights of {Path(path).name}: {len(fits):,} of {len(own):,} tensors{rest}"


def read_tensors(path: str | Path) -> Mapping[str, Tensor]:
    """Return the tensors of a file by name; nothing in the file is run."""
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
    except Exception as error:  # a file of something else raises anything: KeyError, IndexError
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
# Draws come from torch's generator on the device, which a checkpoint keeps: a resumed run draws what an unbroken one
# does. Static shapes and no host synchronisation: all of it is captured in the step's graph.


Outputs = Tensor | tuple[Tensor] | tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """A network, which in training mixes its pictures and is followed by an average of its weights.

    In evaluation the average answers, where there is one. Every picture is mixed with the one before it in the batch,
    which a shuffled loader makes a random one.
    """

    num_steps: Tensor

    def __init__(
        self,
        network: nn.Module,  # images to scores
        mixup: float = 0.0,  # alpha of the Beta distribution of MixUp's shares; 0 is without
        cutmix: float = 0.0,  # the same for CutMix; with both, each picture draws which
        mix_share: float = 1.0,  # share of the pictures that are mixed
        # decay of the averaged weights per step, such as 0.999; 0 is without. The decay after step n is at most (1
        # + n) / (10 + n): a short run is averaged over about its last tenth.
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
            # Not kept: it follows from alpha.
            table = torch.from_numpy(beta_quantiles(alpha)).float()
            self.register_buffer(f"_quantiles_{number}", table, persistent=False)

    def train(self, mode: bool = True) -> Classifier:
        """Set the mode; the average stays in evaluation mode, its statistics are followed, not counted."""
        super().train(mode)
        if self.averaged is not None:
            self.averaged.eval()
        return self

    def forward(self, images: Tensor) -> Outputs:
        """Return scores; in training a tuple of them and, with mixing, the share `(batch,)` that each picture keeps."""
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
        """Move the average towards the weights that the last step left."""
        self.num_steps += 1
        steps = self.num_steps.double()
        # No tensor is made from a number of the host: a CUDA graph cannot copy it.
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
        """Return mixed pictures, and the share that each keeps of its own."""
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
    """Return quantiles at uniform draws in [0, 1)."""
    place = drawn * (len(table) - 1)
    low = place.floor()
    index = low.long()
    return torch.lerp(table[index], table[index + 1], place - low)


class ClassificationLoss(nn.Module):
    """The mean over pictures of the cross-entropy, towards both classes of a mixed picture.

    Outputs that are a tuple come from training. The loss of a validation is the plain cross-entropy, by which runs of
    other smoothing and weights can be compared.

    Args:
        smoothing: Share of each target that is spread over all classes.
        weights: `(classes,)`, of the loss of each picture by its class. Not divided by their sum in the batch, so that
            accumulated batches equal one big batch.
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
