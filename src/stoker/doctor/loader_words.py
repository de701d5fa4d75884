"""Small questions about a loader, and the evidence that several rules give of it.

Enters: `LoaderFacts`. Leaves: shares, and lines of text. Costs nothing; pure.
"""

from __future__ import annotations

from stoker.doctor.cases import milliseconds
from stoker.doctor.measurements import LoaderFacts


def share_of_work(loader: LoaderFacts, seconds: float | None) -> float:
    """Return what part of making a batch `seconds` are."""
    total = loader.work.total
    return (seconds or 0.0) / total if total > 0 else 0.0


def blocked_share(loader: LoaderFacts) -> float:
    """Return what part of the loading is waiting, not computing; 0 when that is unknown."""
    return loader.blocked_share or 0.0


def work_line(loader: LoaderFacts) -> str | None:
    """Return where a batch's loading goes, the largest part first."""
    parts = {
        "reading": loader.work.read,
        "decoding": loader.work.decode,
        "transforms": loader.work.transform,
        "collating": loader.work.collate,
        "copying": loader.work.copy,
        "other dataset code": loader.work.other,
    }
    known = sorted(
        ((s, name) for name, s in parts.items() if s and share_of_work(loader, s) > 0.02),
        reverse=True,
    )
    if not known:
        return None
    listed = ", ".join(f"{name} {milliseconds(seconds)}" for seconds, name in known)
    return f"loading one batch takes {milliseconds(loader.work.total)} of one process: {listed}"


def busiest_line(loader: LoaderFacts) -> str | None:
    """Return the line of code that loading was mostly seen at, or where the dataset stands."""
    if loader.busiest_line is None or (loader.busiest_share or 0) < 0.25:
        return f"the dataset stands at {loader.dataset_where}" if loader.dataset_where else None
    return f"{loader.busiest_share:.0%} of it was seen at {loader.busiest_line}"


def busy_cores(loader: LoaderFacts) -> float | None:
    """Return the cores that the job keeps busy; None when that was not measured."""
    if loader.main_cpu_share is None:
        return None
    return sum(loader.worker_cpu_shares) + loader.main_cpu_share


def cpu_words(loader: LoaderFacts) -> str:
    """Return how busy a worker is, to be put behind another fact."""
    if not loader.worker_cpu_shares:
        return ""
    each = sum(loader.worker_cpu_shares) / len(loader.worker_cpu_shares)
    return f"; a worker keeps {each:.0%} of a core busy"


def at(where: str | None) -> str:
    """Return " at file:line", or nothing."""
    return f" at {where}" if where else ""
