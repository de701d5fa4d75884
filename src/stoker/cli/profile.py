"""`stoker profile --config FILE --out trace.json`: a few steps of a job under torch's profiler.

Enters: a config and a schedule. Leaves: a chrome trace, and on stdout the costliest operations, or one
JSON document. Costs the steps, which run slower while they are recorded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.config import SetOption, StoreOption
from stoker.cli.outputs import require_output
from stoker.cli.terminal import make_console, print_json
from stoker.cli.train import DeviceOption

if TYPE_CHECKING:
    from stoker.doctor.trace import Trace


def profile(
    config: Annotated[
        Path | None,
        typer.Option("--config", help="The YAML file of the job, or the name of a shipped one.", show_default=False),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="The chrome trace; .json.gz is compressed.")
    ] = Path("trace.json"),
    overrides: SetOption = None,
    store: StoreOption = None,
    device: DeviceOption = None,
    wait: Annotated[int, typer.Option("--wait", help="Steps left out at the beginning.")] = 10,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps under the profiler that are not kept.")] = 3,
    active: Annotated[int, typer.Option("--active", help="Steps that are recorded.")] = 5,
    top: Annotated[int, typer.Option("--top", min=1, help="Operations in the table.")] = 15,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
) -> None:  # fmt: skip
    """Record a few training steps with torch's profiler and say which operations cost most."""
    import os

    # The profiler's library talks on stderr while it is loaded, unless it is told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from stoker.doctor.job_config import JobConfig
    from stoker.doctor.trace import Schedule, is_trace, record
    from stoker.errors import InputError
    from stoker.recipes.run import open_run

    if config is None:
        raise InputError(
            "no config was given.",
            "--config FILE",
            "stoker profile --config tabular --store STORE",
        )
    plan = Schedule(wait, warmup, active)
    job = JobConfig.read(config, overrides or (), store)
    require_output(out, "--out", [config], is_ours=is_trace)
    with open_run(job.settings, device=device) as run:
        trace = record(run, plan, out)
    if as_json:
        _print_json(trace, out, top)
    else:
        _print(trace, out, top)


def _print_json(trace: Trace, out: Path, top: int) -> None:
    from dataclasses import asdict

    document = asdict(trace) | {"trace": str(out)}
    document["operations"] = document["operations"][:top]
    print_json(document)


def _print(trace: Trace, out: Path, top: int) -> None:
    from rich.table import Table

    from stoker.doctor.cases import milliseconds

    console = make_console(width=160)
    on_gpu = trace.kernels is not None
    total = sum(item.device_seconds if on_gpu else item.cpu_seconds for item in trace.operations)
    table = Table(
        title=f"{trace.num_steps} steps, own time of each operation", title_justify="left"
    )
    for head in ("operation", "calls", "CPU", *(["device"] if on_gpu else []), "share"):
        table.add_column(head, justify="left" if head == "operation" else "right")
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
