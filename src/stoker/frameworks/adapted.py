"""A stoker `Loader` in a form that the loops of other frameworks accept.

Enters: a `Loader`, or a function that makes one. Leaves: `AdaptedLoader`: the same batches in the same order, nothing
copied. Costs a few µs per batch.

A Loader has one position and continues from it; these loops expect what torch's DataLoader does:

- they request exactly `len(loader)` batches, so an epoch is over with its last batch, not with a further request;
- an iteration begins a new epoch, even if the one before was left early; only a loaded state is continued;
- a batch keeps its type: moving it to the device that it is on returns it unchanged, with its positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from stoker.errors import InputError
from stoker.loader.batch import Batch
from stoker.loader.loader import Loader
from stoker.train.batches import iterate_tensors


class MakesLoader(Protocol):
    """Makes a Loader where the framework knows the rest: `partial(Loader, "store/", 128, order="shuffled")`."""

    def __call__(self, *, device: torch.device, rank: int, world_size: int) -> Loader:
        """Return a loader of this rank's share, on its device."""


def check_makes(make: object, what: str) -> None:
    """Refuse a loader where a function that makes one is expected."""
    if make is not None and not callable(make):
        raise InputError(
            f"{what} is a {type(make).__name__}.",
            "what makes a Loader: only the framework knows device, rank and number of processes",
            "partial(Loader, 'store', 128)",
        )


class PlacedBatch(Batch):
    """A batch on its device: `to` checks the device, and copies nothing."""

    def to(self, device: str | int | torch.device, **_: Any) -> Self:
        """Return the batch itself."""
        wanted = torch.device(device)
        for tensor in self.values():
            have = tensor.device
            if have.type != wanted.type or wanted.index not in (None, have.index):
                raise InputError(
                    f"the loader's batches are on {have}, the framework trains on {wanted}.",
                    "one device for both",
                    f"Loader(..., device='{wanted}')",
                )
        return self


def count_samples(batch: Any) -> int:
    """Return the number of samples of any batch, by its positions or by its first tensor; 0 without tensors."""
    if isinstance(batch, Batch) and len(batch.positions):
        return len(batch.positions) if batch.valid is None else int((batch.positions >= 0).sum())
    return next((len(one) if one.dim() else 1 for one in iterate_tensors(batch)), 0)


class AdaptedLoader:
    """Iterate for the batches of an epoch; see the module's text.

    Args:
        loader: Of this process's share; closed by `close`.
        fields: Name in the loader's batch to name in the batch that is handed on; others are left out.
            None hands all of them on, as a tuple where the loader has `as_tuple`.
    """

    def __init__(self, loader: Loader, fields: Mapping[str, str] | None = None) -> None:
        if not isinstance(loader, Loader):
            raise InputError(
                f"a {type(loader).__name__} was given.",
                "a stoker Loader",
                "Loader('store/', 128); for a DataLoader there is stoker.prefetch(dataloader, device)",
            )
        self.loader = loader
        self._fields = None if fields is None else dict(fields)
        self._form = loader.as_tuple if fields is None else None
        self._is_placed = False
        self._taken = 0
        self._next_epoch = loader.epoch

    # -- what it is ------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def batch_sampler(self) -> BatchNumbers:
        """The batches of an epoch by number; frameworks set the epoch on its `sampler`."""
        return BatchNumbers(self)

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank."""
        return self.loader.batch_size

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self.loader.device

    @property
    def num_samples(self) -> int:
        """Samples of an epoch over all ranks."""
        return self.loader._order.num_used

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()

    # -- iteration -------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or the rest of one whose state was loaded.

        Nothing happens before the first batch is requested: frameworks make iterators that they never use.
        """
        if not self._is_placed:
            self._go_to(self._next_epoch, 0)
        self._is_placed = False
        self._next_epoch = self.loader.epoch + 1
        for batch in self.loader.remaining_batches():
            self._taken += 1
            yield self._handed_on(batch)

    def _handed_on(self, batch: Batch) -> Any:
        """Return the batch in the form of the loader: by names, or the fields of its `as_tuple`."""
        if isinstance(self._form, str):
            return batch[self._form]
        if self._form is not None:
            return tuple(batch[name] for name in self._form)
        if self._fields is None:
            placed = PlacedBatch(batch)
        else:
            missing = [name for name in self._fields if name not in batch]
            if missing:
                raise InputError(
                    f"fields names {', '.join(missing)}.",
                    f"the fields of a batch: {', '.join(batch)}",
                    f"fields={{{next(iter(batch))!r}: 'input_values'}}",
                )
            placed = PlacedBatch({new: batch[old] for old, new in self._fields.items()})
        vars(placed).update(vars(batch))
        return placed

    # -- place -----------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one between epochs."""
        is_over = self._taken >= len(self)
        return self.loader.epoch if self._taken and not is_over else self._next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`; if a state of this epoch was loaded, its position stays."""
        if self._is_placed and epoch == self.loader.epoch:
            return
        self._go_to(epoch, 0)
        self._next_epoch, self._is_placed = epoch, False

    def seek(self, epoch: int, batch: int) -> None:
        """Make the next iteration begin at batch number `batch` of `epoch`."""
        if not 0 <= batch <= len(self):
            raise InputError(f"batch {batch}.", f"0 to {len(self)}", "loader.seek(epoch, 0)")
        if batch == len(self):
            epoch, batch = epoch + 1, 0
        self._go_to(epoch, batch)
        self._next_epoch, self._is_placed = epoch, batch > 0

    def _go_to(self, epoch: int, batch: int) -> None:
        self.loader.set_epoch(epoch, batch)
        self._taken = batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader; every rank may load the state of any rank."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue where a `state_dict` was taken.

        Raises:
            InputError: The state is of another store or order, or the rest of its epoch has another number
                of batches here.
        """
        self.loader.load_state_dict(state)
        batch = int(state["batch"])
        if self.loader.num_batches != len(self):
            raise InputError(
                f"the epoch of the state has {self.loader.num_batches} batches here, others have {len(self)}.",
                "the number of processes and the batch size of the run that was saved: frameworks count the "
                "batches of an epoch once",
                "resume with as many processes, or from a checkpoint at the end of an epoch",
            )
        if batch >= len(self):  # its last batch was handed out: the epoch is over
            self._go_to(self.loader.epoch + 1, 0)
            batch = 0
        self._taken, self._is_placed = batch, batch > 0
        self._next_epoch = self.loader.epoch


class BatchNumbers:
    """The batches of an epoch by their numbers, as a batch sampler of torch's would have them."""

    drop_last = False

    def __init__(self, loader: AdaptedLoader) -> None:
        self.sampler = loader
        self.batch_size = loader.batch_size

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return ([number] for number in range(len(self.sampler)))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader."""
        self.sampler.set_epoch(epoch)


def check_share(loader: Loader, rank: int, world_size: int) -> None:
    """Refuse a loader of another process's share: samples would be trained on several times."""
    order = loader._order
    if (order.rank, order.world_size) != (rank, world_size):
        raise InputError(
            f"the loader is of rank {order.rank} of {order.world_size}, this process is rank {rank} of "
            f"{world_size}.",
            "a loader of this process's share",
            f"rank={rank}, world_size={world_size} in the call of Loader",
        )
