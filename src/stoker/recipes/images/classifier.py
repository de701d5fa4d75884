"""What a network is wrapped in while it learns: mixed pictures, averaged weights, and the loss for both.

Enters: a network, normalised images and class numbers on the device. Leaves: scores; in training perhaps with the share
of each picture, and a loss that knows it. Costs: MixUp one pass over the batch, CutMix one or two; the average three
passes over the weights per step. Static shapes and no host synchronisation: all of it is captured in the step's graph.

Draws come from torch's generator on the device, which a checkpoint keeps, so that a resumed run
draws what an unbroken one does.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

from stoker.augment.mixing import beta_quantiles, cut_interval

Tensor = torch.Tensor
Outputs = Tensor | tuple[Tensor] | tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """A network, which in training mixes its pictures and is followed by an average of its weights.

    In evaluation the average answers, where there is one. Every picture is mixed with the one before it in the batch,
    which a shuffled loader makes a random one.

    Args:
        network: Images to scores.
        mixup: Alpha of the Beta distribution of MixUp's shares; 0 is without.
        cutmix: The same for CutMix; with both, each picture draws which.
        mix_share: Share of the pictures that are mixed.
        average: Decay of the averaged weights per step, such as 0.999; 0 is without. The decay after step n is at
            most (1 + n) / (10 + n): a short run is averaged over about its last tenth.
    """

    num_steps: Tensor

    def __init__(
        self,
        network: nn.Module,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mix_share: float = 1.0,
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
