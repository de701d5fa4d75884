"""A trace of a few steps of a job: `stoker doctor --config FILE --trace trace.json`.

Enters: a job and a schedule. Leaves: a chrome trace, and on stdout the costliest operations, or values for a
JSON document. Costs the steps, which run slower while they are recorded.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stoker.cli.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    SetOption,
    StoreOption,
    option,
    require_output,
)
from stoker.cli.tables import make_table
from stoker.cli.terminal import make_console, print_json
from stoker.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.doctor.job_config import JobConfig
    from stoker.doctor.trace import Schedule, Trace

TOP = 15
"""Operations in the table."""


def require_trace(out: Path | None, option: str, config: Path | None) -> None:
    """Refuse a place that the trace could not be written to, before any work."""
    if out is None:
        return
    # Costs the import of torch's profiler, which talks on stderr while it is loaded, unless it is told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from stoker.doctor.trace import is_trace

    require_output(out, option, [config], is_ours=is_trace)


def record_job(job: JobConfig, device: str | None, schedule: Schedule, out: Path) -> Trace:
    """Train for the steps of the schedule under torch's profiler."""
    from stoker.doctor.trace import record
    from stoker.recipes.run import open_run

    with open_run(job.settings, device=device) as run:
        return record(run, schedule, out)


def trace_facts(trace: Trace, out: Path, top: int = TOP) -> dict[str, Any]:
    """Return a trace as plain values."""
    facts = asdict(trace) | {"trace": str(out)}
    facts["operations"] = facts["operations"][:top]
    return facts


def print_trace(console: Console, trace: Trace, out: Path, top: int = TOP) -> None:
    """Print the costliest operations, the device's kernels, and where the trace is."""
    from stoker.doctor.cases import milliseconds

    on_gpu = trace.kernels is not None
    total = sum(item.device_seconds if on_gpu else item.cpu_seconds for item in trace.operations)
    heads = ("operation", "calls", "CPU", *(["device"] if on_gpu else []), "share")
    table = make_table(f"{trace.num_steps} steps, own time of each operation", heads)
    for item in trace.operations[:top]:
        device = [milliseconds(item.device_seconds)] if on_gpu else []
        own = item.device_seconds if on_gpu else item.cpu_seconds
        share = f"{own / total:.0%}" if total else "n/a"
        cpu = milliseconds(item.cpu_seconds)
        table.add_row(item.name[:80], f"{item.calls:,}", cpu, *device, share)
    console.print(table)
    if trace.kernels is not None:
        console.print(
            f"{trace.kernels.per_step:,.0f} kernels a step of {milliseconds(trace.kernels.mean_seconds)}, "
            f"the device busy {trace.kernels.busy_share:.0%} of the time"
        )
    where = f"trace: {out} (open it at chrome://tracing or in Perfetto)"
    console.print(where, soft_wrap=True)


def profile(
    config: ConfigOption = None,
    out: Annotated[Path, option("--out", "The chrome trace; .json.gz is compressed.")] = Path(
        "trace.json"
    ),
    overrides: SetOption = None,
    store: StoreOption = None,
    device: DeviceOption = None,
    wait: Annotated[int, option("--wait", "Steps left out at the beginning.")] = 10,
    warmup: Annotated[int, option("--warmup", "Steps under the profiler that are not kept.")] = 3,
    active: Annotated[int, option("--active", "Steps that are recorded.")] = 5,
    top: Annotated[int, option("--top", "Operations in the table.", min=1)] = TOP,
    as_json: JsonOption = False,
) -> None:
    """Old spelling of `stoker doctor --trace`, which finds out more of the same job."""
    if config is None:
        raise InputError(
            "no config was given.",
            "--config FILE",
            "stoker doctor --config tabular --store STORE --trace trace.json",
        )
    require_trace(out, "--out", config)
    from stoker.doctor.job_config import JobConfig
    from stoker.doctor.trace import Schedule

    plan = Schedule(wait, warmup, active)
    job = JobConfig.read(config, overrides or (), store)
    trace = record_job(job, device, plan, out)
    if as_json:
        print_json(trace_facts(trace, out, top))
    else:
        print_trace(make_console(width=160), trace, out, top)
