"""Does time go forward? One pass over a time axis, mergeable at the seams.

Enters: the times of rows, as integers or datetime64. Leaves: how many steps go backwards or
stand still, and where. Costs: two comparisons per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stoker.errors import InputError
from stoker.store.fields import Array
from stoker.store.row_sketch import FIRST_ROWS


@dataclass(frozen=True)
class TimeStats:
    """Steps of a time axis that do not go forward.

    Attributes:
        first_row: Number of the first row seen.
        num_rows: Rows seen.
        first: Time of the first row; None when there is none.
        last: Time of the last row.
        num_backwards: Rows earlier than the row before.
        num_repeated: Rows at the same time as the row before.
        backwards_rows: The first of these, at most five.
        repeated_rows: The first of those, at most five.
    """

    first_row: int
    num_rows: int
    first: int | None
    last: int | None
    num_backwards: int
    num_repeated: int
    backwards_rows: tuple[int, ...]
    repeated_rows: tuple[int, ...]

    def merge(self, later: TimeStats) -> TimeStats:
        """Return the statistics of both; `later` follows directly, and the seam counts."""
        if not later.num_rows:
            return self
        if not self.num_rows:
            return later
        if self.first is None or self.last is None or later.first is None:
            raise AssertionError("rows without times")
        seam = (later.first_row,)
        back = seam if later.first < self.last else ()
        again = seam if later.first == self.last else ()
        return TimeStats(
            self.first_row,
            self.num_rows + later.num_rows,
            self.first,
            later.last,
            self.num_backwards + len(back) + later.num_backwards,
            self.num_repeated + len(again) + later.num_repeated,
            (self.backwards_rows + back + later.backwards_rows)[:FIRST_ROWS],
            (self.repeated_rows + again + later.repeated_rows)[:FIRST_ROWS],
        )


def scan_time(time: Array, *, first_row: int = 0) -> TimeStats:
    """Find the steps of a time axis that go backwards or stand still.

    Args:
        time: `(n,)` integers or datetime64.
        first_row: Number of row 0.
    """
    time = np.asarray(time)
    if time.ndim != 1 or time.dtype.kind not in "iuM":
        raise InputError(
            f"cannot read shape {time.shape}, dtype {time.dtype} as a time axis.",
            "one integer or datetime64 per row",
            "time.astype('datetime64[ns]')",
        )
    if time.dtype.kind == "M":
        time = time.view(np.int64)
    back = np.flatnonzero(time[1:] < time[:-1]) + 1 + first_row
    again = np.flatnonzero(time[1:] == time[:-1]) + 1 + first_row
    return TimeStats(
        first_row,
        len(time),
        int(time[0]) if len(time) else None,
        int(time[-1]) if len(time) else None,
        len(back),
        len(again),
        tuple(back[:FIRST_ROWS].tolist()),
        tuple(again[:FIRST_ROWS].tolist()),
    )
