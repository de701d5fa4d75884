"""`stoker monitor [RUN_DIR]`: what GPUs, host and a run do, live, as CSV or as JSON.

Enters: a run's folder, if any. Leaves: a table on a terminal, a line per look in a pipe, JSON where asked
for; rows in a CSV file. Costs under 1 % of a core at one look per second. Ends with 0 after SIGTERM, 130
after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import verb
from stoker.cli.terminal import echo, known, make_console, print_json, styled
from stoker.errors import InputError
from stoker.lifetime import until_terminated
from stoker.units import format_bytes, format_rate, format_seconds, local_time, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from rich.console import Group
    from rich.text import Text

    from stoker.monitor import Snapshot
    from stoker.runs.follow import RunNow
    from stoker.runs.telemetry import GpuReading, Verdict

    History = Mapping[str, Iterable[float | None]]

_MARKS = {"below": " ↓", "within": " ✓", "above": " ↑"}
# A GPU that is busier than the target is no problem; too much memory or heat is one.
_STYLES = {
    ("busy", "below"): "yellow", ("busy", "above"): "cyan", ("memory", "below"): "yellow",
    ("memory", "above"): "bold red", ("temperature", "above"): "bold red",
}  # fmt: skip
_MOST_NOTES = 4


@verb
def monitor(
    run_dir: Path | None = None,
    *,
    csv: Path | None = None,
    once: bool = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    interval: str = "1",
    wait: str = "0",
) -> None:
    """Watch GPUs and a run: utilization, memory, PCIe, power, temperature, samples/s, waits.

    Options:
        run_dir: Folder of a run to watch as well.
        csv: Append every look to this file, a row per GPU.
        once: Look once and end.
        as_json: Print JSON: one document with --once, else one per line.
        interval: Time between two looks, such as 1, 500ms or 5s.
        wait: Time that a run may take to begin, such as 10min.
    """
    from stoker.monitor import LEAST_INTERVAL_SECONDS, CsvLog, Monitor

    seconds = parse_seconds(interval)
    if not seconds >= LEAST_INTERVAL_SECONDS:  # also with --once, and before a file is made
        raise InputError(
            f"an interval of {seconds:g} s.",
            f"{LEAST_INTERVAL_SECONDS:g} s or more",
            "--interval 1",
        )
    begins_by = time.monotonic() + parse_seconds(wait)
    begun = _has_begun(run_dir, begins_by)  # before a file is made
    while once and not begun:
        time.sleep(LEAST_INTERVAL_SECONDS)
        begun = _has_begun(run_dir, begins_by)
    with contextlib.ExitStack() as stack:
        watching = stack.enter_context(Monitor(run_dir))
        log = None if csv is None else stack.enter_context(CsvLog(csv))
        if once:
            snapshot = watching.look_once()
            if log is not None:
                log.write(snapshot)
            if as_json:
                print_json(snapshot.to_json(), indent=2)
            else:
                make_console().print(view(snapshot))
            return
        stop = stack.enter_context(until_terminated())
        show = stack.enter_context(_shown(as_json, watching.history))
        for snapshot in watching.looks(seconds, stop):
            if log is not None:
                log.write(snapshot)
            show(snapshot)
            begun = begun or _has_begun(run_dir, begins_by)


def _has_begun(run_dir: Path | None, begins_by: float) -> bool:
    """Return whether the run has begun, or none was named; raise if it has not begun by `begins_by`."""
    from stoker.runs.reading import lock_holder, run_folder_of

    holder = None if run_dir is None else lock_holder(run_dir)  # the lock comes before the log
    if run_dir is None or (holder is not None and holder[2] is not False):
        return True
    try:
        run_folder_of(run_dir, "--wait 10min waits for one that has not begun")
    except InputError:
        if time.monotonic() >= begins_by:
            raise
        return False
    return True


@contextlib.contextmanager
def _shown(as_json: bool, history: History) -> Iterator[Callable[[Snapshot], None]]:
    """Yield a function that shows a snapshot: a redrawn table on a terminal, else one line each."""
    from rich.live import Live

    if as_json:
        yield lambda snapshot: print_json(snapshot.to_json())
        return
    console = make_console()
    if not console.is_terminal:
        yield lambda snapshot: echo(one_line(snapshot))
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda snapshot: live.update(view(snapshot, history), refresh=True)


# -- drawing -------------------------------------------------------------------------------------


_HEADS = ("GPU", "busy", "memory", "PCIe in / out", "power", "heat", "clocks held by")


def view(snapshot: Snapshot, history: History | None = None) -> Group:
    """Return the table, bars, the run, the host and the footnotes."""
    from rich.console import Group

    from stoker.runs.telemetry import BUSY_FOOTNOTE

    parts = [styled(f"stoker monitor  {_clock(snapshot)}", "italic")]
    if snapshot.gpus:
        heads = [styled(head, "bold") for head in _HEADS]
        rows = [heads, *(_cells(gpu) for gpu in snapshot.gpus)]
        parts += _aligned(rows, left=(0, len(_HEADS) - 1))
        parts += _aligned([_bars(gpu, history or {}) for gpu in snapshot.gpus], left=(0, 3))
    else:
        parts.append(styled("no GPU is read here"))
    pairs = [] if snapshot.run is None else list(_run_lines(snapshot.run, history or {}))
    if snapshot.process is not None:
        cores = known(snapshot.process.cpu_cores, ".2f")
        resident = format_bytes(snapshot.process.resident_bytes)
        pairs.append((f"process {snapshot.process.pid}", f"{cores} cores, {resident} resident"))
    host = snapshot.host
    used, total = format_bytes(host.ram_used_bytes), format_bytes(host.ram_total_bytes)
    pairs.append(("host", f"CPU {known(host.cpu_percent, '.0f')} %, RAM {used} of {total}"))
    parts += _aligned([[styled(name), styled(value)] for name, value in pairs], left=(0, 1))
    if snapshot.gpus:
        parts += [styled(line, "dim") for line in (_targets_line(), BUSY_FOOTNOTE)]
    parts += [styled(f"note: {note}", "dim") for note in snapshot.notes[:_MOST_NOTES]]
    return Group(*parts)


def _aligned(rows: list[list[Text]], left: tuple[int, ...]) -> list[Text]:
    """Return rows as lines with aligned columns; those not in `left` are aligned to the right.

    rich's own Table takes 11 ms for eight GPUs, which is more than 1 % of a core every second; this 1.5.
    """
    from rich.text import Text

    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        line = Text(no_wrap=True, overflow="ellipsis")
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            room = " " * (width - cell.cell_len)
            line.append("  " if place else "")
            line.append("" if place in left else room)
            line.append_text(cell)
            line.append(room if place in left and place < len(row) - 1 else "")
        lines.append(line)
    return lines


def _clock(snapshot: Snapshot) -> str:
    return f"{local_time(snapshot.time):%Y-%m-%d %H:%M:%S}"


def _targets_line() -> str:
    from stoker.runs.telemetry import BUSY, MEMORY, SM_ACTIVE, TEMPERATURE

    return (
        f"targets: busy {BUSY.low:.0f} to {BUSY.high:.0f} %, SM {SM_ACTIVE.low:.0f} to {SM_ACTIVE.high:.0f} %, "
        f"memory {MEMORY.low:.0f} to {MEMORY.high:.0f} %, "
        f"below {TEMPERATURE.high + 1:.0f} °C; ✓ within, ↓ below, ↑ above"
    )


def _cells(gpu: GpuReading) -> list[Text]:
    from stoker.runs.telemetry import judge_gpu

    verdicts = judge_gpu(gpu)
    share = gpu.memory_share
    memory = f"{format_bytes(gpu.memory_used_bytes)} of {format_bytes(gpu.memory_total_bytes)}"
    memory += "" if share is None else f" {share:4.0%}"
    rates = gpu.pcie_received_bytes_per_second, gpu.pcie_sent_bytes_per_second
    traffic = " / ".join(format_rate(rate, 1) for rate in rates)
    link = f"gen {known(gpu.pcie_generation)} x{known(gpu.pcie_width)}"
    power = f"{known(gpu.power_watts, '.0f')} of {known(gpu.power_limit_watts, '.0f')} W"
    reasons = gpu.throttle_reasons
    held = "n/a" if reasons is None else ", ".join(reasons) or "nothing"
    return [
        styled(f"{gpu.index} {known(gpu.name)}"),
        _judged(f"{known(gpu.utilization_percent)} %", "busy", verdicts["busy"]),
        _judged(memory, "memory", verdicts["memory"]),
        styled(f"{traffic} ({link})"),
        styled(power),
        _judged(f"{known(gpu.temperature_celsius)} °C", "temperature", verdicts["temperature"]),
        styled(held, "yellow" if reasons and set(reasons) - {"idle"} else ""),
    ]


def _bars(gpu: GpuReading, history: History) -> list[Text]:
    """Return a GPU's busy share and memory as bars, and the busy share of the last minute."""
    busy = None if gpu.utilization_percent is None else gpu.utilization_percent / 100
    past = sparkline(history.get(f"busy {gpu.index}", ()), 100.0)
    return [
        styled(f"{gpu.index}"),
        styled(f"busy {bar(busy)}"),
        styled(f"memory {bar(gpu.memory_share)}"),
        styled(f"busy until now {past}" if past else ""),
    ]


def bar(share: float | None, width: int = 20) -> str:
    """Return a share from 0 to 1 as a bar of `width` columns; dots where it is unknown."""
    if share is None:
        return "·" * width
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(width, "░")


def sparkline(values: Iterable[float | None], most: float | None = None) -> str:
    """Return numbers as columns of eight heights, a space where one is unknown; "" without numbers.

    The highest column stands for `most`; the largest value by default.
    """
    kept = list(values)
    known_ones = [value for value in kept if value is not None]
    if not known_ones:
        return ""
    top = max(known_ones) if most is None else most
    return "".join(
        " " if value is None else "▁▂▃▄▅▆▇█"[min(7, max(0, int(value / (top or 1.0) * 8)))]
        for value in kept
    )


def _judged(text: str, what: str, verdict: Verdict | None) -> Text:
    if verdict is None:
        return styled(text)
    return styled(f"{text}{_MARKS[verdict]}", _STYLES.get((what, verdict), "green"))


def _run_lines(run: RunNow, history: History) -> Iterator[tuple[str, str]]:
    if run.state == "waiting":
        yield "run", f"{run.folder}: waiting for its first line{_absence(run)}"
        return
    heard = "" if run.age_seconds is None else f", last line {format_seconds(run.age_seconds)} ago"
    yield "run", f"{run.folder}: {run.state}{heard}"
    of = "" if run.num_epochs is None or run.epoch is None else f"/{run.num_epochs}"
    epoch = f"{known(run.epoch)}{of}"
    losses = f"loss {known(run.loss, '.4g')}, validation {known(run.val_loss, '.4g')}"
    yield "", f"epoch {epoch}, step {known(run.step, ',')}, {losses}"
    if run.epoch is not None and run.num_epochs and run.state == "running":
        left = run.seconds_left
        words = "after the first epoch" if left is None else format_seconds(left)
        yield "", f"{bar((run.epoch - 1) / run.num_epochs)} time left: {words}"
    past = sparkline(history.get("samples/s", ()))
    yield (
        "",
        f"{known(run.samples_per_second, ',.0f')} samples/s, waited {known(run.wait_share, '.1%')}  {past}".rstrip(),
    )
    if run.reserved_bytes is not None:
        held, used = format_bytes(run.reserved_bytes), format_bytes(run.allocated_bytes)
        yield "", f"device memory: {held} held by torch, {used} in tensors"
    if run.note is not None:
        yield "", run.note


def _absence(run: RunNow) -> str:
    return "" if run.folder.is_dir() else "; there is no such folder yet"


def one_line(snapshot: Snapshot) -> str:
    """Return a snapshot as one line, for a pipe or a log."""
    parts = [_clock(snapshot)]
    parts += [
        f"GPU {gpu.index}: busy {known(gpu.utilization_percent)} %, memory {known(gpu.memory_share, '.0%')}, "
        f"{known(gpu.power_watts, '.0f')} W, {known(gpu.temperature_celsius)} °C"
        for gpu in snapshot.gpus
    ]
    run = snapshot.run
    if run is not None and run.state == "waiting":
        parts.append(f"run {run.folder}: waiting for its first line{_absence(run)}")
    elif run is not None:
        parts.append(
            f"run {run.state}: epoch {known(run.epoch)}, loss {known(run.loss, '.4g')}, "
            f"{known(run.samples_per_second, ',.0f')} samples/s, waited {known(run.wait_share, '.1%')}"
        )
    parts.append(f"CPU {known(snapshot.host.cpu_percent, '.0f')} %")
    return "; ".join(parts)
