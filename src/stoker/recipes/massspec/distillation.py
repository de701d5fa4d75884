"""Learning from spectra and from a teacher at once: the loss, and the temperature over the run.

Enters: the student's spectra, measured spectra, the teacher's spectra. Leaves: the mean over samples
of three terms, each from 0 to 1. Costs: a few passes over the batch; no host synchronisation. The
temperature is one number on the device, filled between updates, so a captured step follows it.

The documents give weights .3/.5/.2 and a temperature from 4 to 1. They are taken for:

    hard   0.3   1 - weighted cosine (mass power 1) with the measured spectrum
    soft   0.5   1 - weighted cosine (mass power 1) with the teacher's, both softened
    shape  0.2   1 - plain cosine (mass power 0) with the teacher's, not softened

A spectrum is softened by `(x + e)^(1/T) - e^(1/T)` after scaling it to length 1, e = 0.001: at T = 4
small peaks count almost as much as large ones, at T = 1 it is the spectrum itself. That is a softmax
with temperature over log intensities, up to scale, and zero stays zero. The shape term needs no
temperature and no weights; it is there because mass weights leave peaks below m/z 50 almost unseen.
All terms have the same range, so the weights say what share of attention each one gets. None has
parameters: a distilled student is the same module as any other, and its checkpoint too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from stoker.recipes.massspec.metrics import unit_length, weighted_cosine

Tensor = torch.Tensor
_FLOOR = 1e-3
"""Keeps the slope of a root finite where a spectrum is zero."""


def soften(spectra: Tensor, temperature: Tensor) -> Tensor:
    """Return spectra of length 1 with small peaks raised; zero stays zero."""
    power = 1 / temperature
    raised: Tensor = (unit_length(spectra) + _FLOOR) ** power
    return raised - _FLOOR**power


def cosine_loss(
    outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor], mass_power: float = 1.0
) -> Tensor:
    """Return the mean over samples of 1 - weighted cosine with the measured spectrum."""
    return 1 - weighted_cosine(outputs["spectrum"], targets["spectrum"], mass_power).mean()


class DistillationLoss:
    """The three terms of the module's text; targets also hold `teacher (batch, bins)`.

    `weights` are those of hard, soft and shape.
    """

    def __init__(
        self, weights: tuple[float, float, float], temperature: float, mass_power: float = 1.0
    ) -> None:
        self.weights = weights
        self.mass_power = mass_power
        self._temperature = torch.tensor(float(temperature))

    def __call__(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        """Return the mean over samples."""
        student, teacher = outputs["spectrum"], targets["teacher"]
        temperature = self._on(student.device)
        softened = soften(student, temperature), soften(teacher, temperature)
        hard, soft, shape = self.weights
        return (
            hard * cosine_loss(outputs, targets, self.mass_power)
            + soft * (1 - weighted_cosine(*softened, self.mass_power).mean())
            + shape * (1 - weighted_cosine(student, teacher, 0.0).mean())
        )

    def set_temperature(self, value: float) -> None:
        """Use another temperature from now on; in place, without waiting for the device."""
        self._temperature.fill_(value)

    @property
    def temperature(self) -> float:
        """The current temperature; waits for the device."""
        return float(self._temperature)

    def _on(self, device: torch.device) -> Tensor:
        # Moved by the first call, which is before any capture.
        if self._temperature.device != device:
            self._temperature = self._temperature.to(device)
        return self._temperature


def temperature_at(update: int, num_updates: int, start: float, end: float) -> float:
    """Return the temperature on the straight line from the first update to the last."""
    return start + (end - start) * min(1.0, update / max(1, num_updates - 1))


class RateAndTemperature:
    """A learning rate scheduler that also sets a temperature, stepped as one after every update.

    Args:
        rate: The learning rate's scheduler.
        set_temperature: Takes the temperature of the coming update.
        temperature_of: Number of an update, from 0, to its temperature.
    """

    def __init__(
        self,
        rate: LambdaLR,
        set_temperature: Callable[[float], None],
        temperature_of: Callable[[int], float],
    ) -> None:
        self._rate = rate
        self._set_temperature = set_temperature
        self._temperature_of = temperature_of
        self._follow()

    def step(self) -> None:
        """Go on to the next update."""
        self._rate.step()
        self._follow()

    def get_last_lr(self) -> list[Any]:
        """Return the current rate of every parameter group."""
        return list(self._rate.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the run; the temperature follows from it."""
        return dict(self._rate.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._rate.load_state_dict(state)
        self._follow()

    def _follow(self) -> None:
        self._set_temperature(self._temperature_of(self._rate.last_epoch))
