"""A stoker `Loader` under Hugging Face Accelerate, and the whole step of its loop as one CUDA graph.

Enters: an `Accelerator`, and a Loader or what makes one. Leaves: a loader that passes through
`accelerator.prepare` as it is: the same batches in the same order, on the process's device, its own share; and
`capture`, which is `stoker.capture` for prepared models. Costs nothing beside `AdaptedLoader`.

Accelerate wraps torch's DataLoader and passes all other loaders on unchanged. This loader reports to the `Accelerator`
what Accelerate's wrapper would: when the last batch of an epoch is out (so that a short group of accumulated
gradients still ends in an update), how many samples it holds (so that `gather_for_metrics` counts correctly),
and how to leave out the first batches of an epoch (`skip_first_batches`) without loading them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from stoker.errors import MissingExtraError
from stoker.frameworks.adapted import AdaptedLoader, MakesLoader, check_makes, check_share
from stoker.loader.loader import Loader
from stoker.train.graphs.function import CapturedFunction

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import GradientState, PartialState
except ImportError as error:
    raise MissingExtraError.for_package(
        "accelerate", "accelerate", "stoker.frameworks.accelerate"
    ) from error


class AccelerateLoader(AdaptedLoader):
    """An `AdaptedLoader` that tells Accelerate what its own wrapper would.

    Args:
        loader: Of this process's share.
        fields: As for `AdaptedLoader`.
    """

    # What `skip_first_batches` copies from a DataLoader.
    num_workers = 0
    prefetch_factor = None
    pin_memory = False
    # What `GradientState` asks the loader that is being iterated.
    end_of_dataloader = False
    remainder = -1

    def __init__(self, loader: Loader, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(loader, fields)
        process = PartialState()
        check_share(loader, process.process_index, process.num_processes)
        self._gradients = GradientState()
        self.dataset = _BatchesByNumber(self)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or the rest of one whose state was loaded."""
        self.end_of_dataloader, self.remainder = False, self._samples_of_last_step()
        self._gradients._add_dataloader(self)
        try:
            for batch in super().__iter__():
                self.end_of_dataloader = self._taken >= len(self)
                yield batch
        finally:
            self._gradients._remove_dataloader(self)

    @property
    def sampler(self) -> AccelerateLoader:
        """The object whose `set_epoch` frameworks call."""
        return self

    def _samples_of_last_step(self) -> int:
        """Return the samples of all processes in the last step; 0 if it is as large as the others."""
        order = self.loader._order
        return order.num_used % (order.batch_size * order.world_size)

    @staticmethod
    def collate_fn(batches: list[Any]) -> Any:
        """Return the only batch of a list: what `dataset` yields are batches already."""
        return batches[0]


class _BatchesByNumber:
    """An epoch's batches by number, read in order; its length is the number of samples."""

    def __init__(self, loader: AccelerateLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] = iter(())
        self._following = -1

    def __len__(self) -> int:
        return self._loader.num_samples

    def __getitem__(self, number: int) -> Any:
        loader = self._loader
        if number != self._following or loader._taken != number:
            loader.seek(loader.epoch, number)
            self._batches = iter(loader)
        self._following = number + 1
        return next(self._batches)


def adapt(loader: Loader, fields: Mapping[str, str] | None = None) -> AccelerateLoader:
    """Return a loader for `accelerator.prepare`, `register_for_checkpointing` and `skip_first_batches`."""
    return AccelerateLoader(loader, fields)


def load_for(
    accelerator: Accelerator, make: MakesLoader, fields: Mapping[str, str] | None = None
) -> AccelerateLoader:
    """Make a loader of this process's share, on its device.

    Args:
        accelerator: Knows the device, the rank and the number of processes.
        make: Such as `partial(Loader, "store/", 128, order="shuffled", seed=1)`.
        fields: As for `AdaptedLoader`.
    """
    check_makes(make, "the second argument of load_for")
    loader = make(
        device=torch.device(accelerator.device),
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    return AccelerateLoader(loader, fields)


def capture(
    accelerator: Accelerator,
    step: Callable[[Any], Any],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    say: Callable[[str], object] | None = None,
) -> CapturedFunction:
    """Return a function that does what `step` does, from one launch per call where that is possible.

    As `stoker.capture`, with the model and the optimizer as `accelerator.prepare` returns them. `step` does all of
    one batch: forward, `accelerator.backward`, `accelerator.clip_grad_norm_`, `optimizer.step` and `zero_grad`. A
    scheduler is stepped outside.

    Args:
        accelerator: Of one process, without accumulation and without fp16; with others `step` is called itself, and
            `reason` of the result says why and what to type.
        step: Trains on one batch and returns its loss.
        model: What it trains.
        optimizer: Of the model.
        say: Called with a line when steps run eagerly; by default that is a RuntimeWarning.
    """
    own, refusal = plain_optimizer(optimizer), find_refusal(accelerator)
    return CapturedFunction(step, None, model, own, None, None, say, refusal=refusal)


def plain_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def find_refusal(accelerator: Accelerator) -> str | None:
    """Return why steps under this accelerator are not captured, and what to type instead; None if they can be."""
    if accelerator.num_processes > 1:
        return (
            f"{accelerator.num_processes} processes train together: one process, or stoker.Trainer"
        )
    if accelerator.gradient_accumulation_steps > 1:
        return (
            f"{accelerator.gradient_accumulation_steps} batches are accumulated per update: "
            "gradient_accumulation_steps=1 and a larger batch"
        )
    if accelerator.scaler is not None:
        return "Accelerate asks at every step whether fp16 has overflowed: mixed_precision='bf16'"
    return None


__all__ = ["AccelerateLoader", "adapt", "capture", "find_refusal", "load_for", "plain_optimizer"]
