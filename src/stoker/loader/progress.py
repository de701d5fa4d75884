"""How far a loader has come: which batch of which epoch comes next, and which samples came before.

Enters: an `Order`, batches that were taken, states. Leaves: the current epoch's order, digests, states. Costs: the
orders of two epochs are kept, so that none is permuted twice. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from stoker.loader.elastic import Cut, ResumePoint, find_resume_point, save_state
from stoker.loader.order import EpochOrder, Order


class Progress:
    """The position of one loader. One consumer thread.

    Attributes:
        order: What all epochs depend on.
        epoch: The current epoch.
        batch: Its next batch.
        is_begun: Whether iterating has taken a batch since the position was set.
        is_over: Whether that was the epoch's last batch.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.epoch = self.batch = 0
        self.is_begun = self.is_over = False
        self._epochs: dict[int, EpochOrder] = {}
        self._begun: EpochOrder | None = None  # an epoch that other ranks began
        self._cuts: tuple[Cut, ...] = ()
        self._ended: tuple[int, EpochOrder | None] | None = None

    @property
    def current(self) -> EpochOrder:
        """The order of the current epoch."""
        return self.get(self.epoch)

    def get(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch; the last two asked for are kept."""
        if self._begun is not None and self._begun.epoch == epoch:
            return self._begun
        found = self._epochs.pop(epoch, None) or self.order.epoch(epoch)
        self._epochs[epoch] = found
        while len(self._epochs) > 2:
            del self._epochs[next(iter(self._epochs))]
        return found

    def forget_epochs(self) -> None:
        """Drop the kept orders: in a forked child a thread of the parent may hold a lock of one of them."""
        self._epochs = {}

    def advance(self, num_batches: int) -> None:
        """Count a batch that was taken, of an epoch of `num_batches`."""
        self.batch += 1
        self.is_begun, self.is_over = True, self.batch == num_batches

    def begin_next_epoch(self) -> None:
        """Go to the first batch of the next epoch."""
        ended = self.epoch, self._begun if self.current is self._begun else None
        is_whole = self.batch == self.current.num_batches
        self.go_to(ResumePoint(self.epoch + 1, 0))
        self._ended = ended if is_whole else None

    def go_to(self, point: ResumePoint) -> None:
        """Continue at a position."""
        self._begun, self._cuts, self._ended = point.begun, point.cuts, None
        self.epoch, self.batch = point.epoch, point.batch
        self.is_begun = self.is_over = False

    def digest(self, broken: Sequence[tuple[int, int, int]] = ()) -> str:
        """Return the digest of the current epoch's batches so far; see `Loader.order_digest`.

        Args:
            broken: (epoch, step, sample) of samples that were skipped or replaced; those before this position count.
        """
        if self._ended is not None and self.batch == 0:
            number, begun = self._ended
            epoch = begun or self.order.epoch(number)
            digest, stop = epoch.digest(), epoch.num_batches
        else:
            number, stop = self.epoch, self.batch
            digest = self.current.digest(stop)
        left_out = [entry for entry in broken if entry[0] == number and entry[1] < stop]
        return (
            str(xxhash.xxh3_64_hexdigest(f"{digest} {left_out}".encode())) if left_out else digest
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in plain values."""
        return save_state(self.order, self.current, self.batch, self._cuts)

    def load_state_dict(self, state: Mapping[str, Any]) -> ResumePoint:
        """Go to a saved position; return it."""
        point = find_resume_point(self.order, state)
        self.go_to(point)
        return point
