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
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from stoker.display import command, look_in, nearest
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

    Raises:
        InputError: There is no such network, or it does not take these pictures.
        MissingExtraError: Its library is not installed.
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
            return _nn(found.create_model(bare, num_classes=num_classes, in_chans=channels))
        if channels != 3:
            raise InputError(
                f"pictures of {channels} channel, and torchvision's {bare} takes 3.",
                "pictures of 3 channels, or a network of ours or of timm",
                "pack the pictures again with --channels 3",
            )
        return _nn(found.get_model(bare, weights=None, num_classes=num_classes))
    if missing:
        raise MissingExtraError.for_package(missing[0], "models", f"the network {name!r}")
    raise _unknown(name, offered)


def _nn(made: Any) -> nn.Module:
    assert isinstance(made, nn.Module)
    return made


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

    Raises:
        InputError: The file cannot be read safely, or does not fit the network.
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
        raise InputError(f"there is no file {path}.", "a file of weights", look_in(path.parent))
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
