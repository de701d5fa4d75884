"""What this process holds in RAM, now and at its peak.

Enters: /proc. Leaves: bytes. Costs about 20 µs a reading.

The peak is that of the address space (VmHWM), not `ru_maxrss`: the latter is inherited through fork and
exec, so a small child of a large parent would look large.
"""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

from stoker.machine._limits import find_text
from stoker.units import KIB

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def rss_bytes() -> int:
    """Return the resident memory."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Return the most that was resident since the start, or since `forget_peak`."""
    found = find_text(_STATUS, r"^VmHWM:\s*(\d+) kB$")
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if found is None else int(found)
    return kilobytes * KIB


def forget_peak() -> None:
    """Let the kernel count the peak anew; where it may not, the peak stays that of the whole life."""
    try:
        with _FORGET.open("r+") as file:
            file.write("5")
    except OSError:
        return
