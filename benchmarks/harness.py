"""What every benchmark shares: honest timing, machine facts, published JSON.

Scripts run with this folder on `sys.path` (`python benchmarks/X.py`), so `from harness import ...`.
A result always carries the peer and the limit measured in the same run; ratios are what counts.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs; `spread` is (max - min) / median."""

    median_seconds: float
    min_seconds: float
    spread: float
    repeats: int


def timed(run: Callable[[], Any], repeats: int = 5, warmup: int = 1) -> Timing:
    """Run `warmup` times unmeasured, then `repeats` times."""
    for _ in range(warmup):
        run()
    seconds = [seconds_of(run) for _ in range(repeats)]
    median = statistics.median(seconds)
    return Timing(median, min(seconds), (max(seconds) - min(seconds)) / median, repeats)


def side_by_side(ways: Sequence[Callable[[], float]], turns: int) -> list[list[float]]:
    """Run every way once a turn: what slows the host slows them all. Every other turn goes backwards.

    A way returns the seconds it took. Returned: the seconds of every turn, in the order of `ways`.
    """
    taken = [[0.0] * len(ways) for _ in range(turns)]
    for turn, seconds in enumerate(taken):
        for number in range(len(ways))[:: -1 if turn % 2 else 1]:
            seconds[number] = ways[number]()
    return taken


def seconds_of(run: Callable[[], Any]) -> float:
    """Return how long one call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def machine_facts() -> dict[str, Any]:
    """Name, cores, memory, GPU and versions, as far as they can be read."""
    from stoker.machine import probe

    return {
        "host": machine_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "probe": probe().to_json(),
        "commit": current_commit(),
    }


def machine_name() -> str:
    """Return the GPU's name where there is one, else cores and CPU: hosts here have random names."""
    try:
        shown = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.strip()
        if shown:
            return shown.splitlines()[0].lower().replace(" ", "-")
    except (OSError, subprocess.SubprocessError):
        pass
    import os

    return f"cpu-{len(os.sched_getaffinity(0))}-cores-{platform.machine()}"


def current_commit() -> str | None:
    """Return the short name of the checkout's commit; None without git."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def publish(name: str, result: dict[str, Any]) -> Path:
    """Write `results/<name>-<machine>.json` and print the result as the last line."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{machine_name()}.json"
    document = {"benchmark": name, "machine": machine_facts(), "result": _plain(result)}
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(_plain(result)))
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, Timing):
        return asdict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
