"""`stoker doctor compare`, `stoker doctor explain`, `stoker doctor --pid` and `stoker doctor --trace`.

Enters: two documents of `stoker doctor --out`; the name of a finding; the number of a process; a job. Leaves: figures
side by side and an exit code for CI; the finding's text; where a running process spends its time; a chrome trace with
the costliest operations. Costs milliseconds, the seconds of the look, or the steps, which run slower while recorded.

`compare` ends with 0 if the second examination is not worse, with 3 if it is.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.options import JsonOption, require_output, verb
from stoker.cli.terminal import echo, echo_lines, make_console, make_table, print_json, styled
from stoker.display import command, nearest
from stoker.errors import EXIT_REFUSED, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.doctor.job_config import JobConfig
    from stoker.doctor.trace import Trace

_TOP = 15
"""Operations in the table of a trace."""

app = typer.Typer(name="doctor", no_args_is_help=True, pretty_exceptions_enable=False)


@app.command("compare")
@verb
def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE")],
    after: Annotated[Path, typer.Argument(metavar="AFTER")],
    *,
    tolerance: Annotated[float, typer.Option(min=0.0, max=100.0)] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Compare two examinations; end with 3 if the second is slower or has a new finding.

    Options:
        before: A document of `stoker doctor --out`.
        after: The same job after a change.
        tolerance: Percent of the rate that may be lost.
    """
    from rich.table import Table

    from stoker.doctor.comparison import compare as compared
    from stoker.doctor.comparison import read_examination

    found = compared(read_examination(before), read_examination(after), tolerance / 100)
    if as_json:
        print_json(found.to_json())
    else:
        console = make_console(stderr=False)
        table = Table(box=None, pad_edge=False)
        for head in ("", str(before), str(after)):
            table.add_column(styled(head))
        for row in found.figures:
            table.add_row(*map(styled, row))
        console.print(table)
        for note in found.notes:
            echo(f"note: {note}")
        echo("worse: " + "; ".join(found.worse) if found.worse else "not worse")
    if found.worse:
        raise typer.Exit(EXIT_REFUSED)


@app.command("explain")
@verb
def explain(name: Annotated[str, typer.Argument(metavar="FINDING")]) -> None:
    """Print what a finding means and what to do.

    Options:
        name: Its name, such as no-workers.
    """
    from stoker.doctor.findings import explanations

    known = explanations()
    if name not in known:
        meant = nearest(name, known) or "no-workers"
        raise InputError(
            f"{name!r} is no finding.",
            ", ".join(sorted(known)),
            command("stoker", "doctor", "explain", meant),
        )
    echo_lines(known[name])


def run_verb(words: list[str]) -> Any:
    """Run `compare` or `explain` with what was typed behind `stoker doctor`."""
    return typer.main.get_command(app).main(words, prog_name="stoker doctor", standalone_mode=False)


def look_at_process(pid: int, seconds: float, as_json: bool) -> None:
    """Print where a running process spends its time."""
    from stoker.doctor.outside import look_at

    look = look_at(pid, seconds)
    if as_json:
        print_json(look.to_json())
        return
    echo(f"{look.subject}: looked at for {look.seconds:.0f} s")
    cores = f"it kept {look.busy_cores:.2f} cores busy"
    if look.worker_cores:
        each = ", ".join(f"{share:.2f}" for share in look.worker_cores[:16])
        cores += f", its {len(look.worker_cores)} child processes {each}"
    echo(cores)
    if look.shares:
        words = {
            "loader": "in a DataLoader",
            "data": "in other loading code",
            "model": "in the model",
            "between": "elsewhere",
        }
        echo(
            ", ".join(f"{words.get(kind, kind)} {share:.0%}" for kind, share in look.shares.items())
        )
    for line, share in look.lines:
        echo(f"  {line}: {share:.0%}")
    echo(look.verdict)


# -- a trace of a few steps -----------------------------------------------------------------------


def require_trace(out: Path | None, config: Path | None) -> None:
    """Refuse a place that the trace could not be written to, before any work."""
    if out is None:
        return
    # Costs the import of torch's profiler, which talks on stderr while it is loaded, unless it is told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from stoker.doctor.trace import is_trace

    require_output(out, "--trace", [config], is_ours=is_trace)


def record_job(job: JobConfig, device: str | None, steps: int, out: Path) -> Trace:
    """Train for so many steps under torch's profiler."""
    from stoker.doctor.trace import Schedule, record
    from stoker.recipes.run import open_run

    with open_run(job.settings, device=device) as run:
        return record(run, Schedule(active=steps), out)


def trace_facts(trace: Trace, out: Path) -> dict[str, Any]:
    """Return a trace as plain values."""
    facts = asdict(trace) | {"trace": str(out)}
    facts["operations"] = facts["operations"][:_TOP]
    return facts


def print_trace(console: Console, trace: Trace, out: Path) -> None:
    """Print the costliest operations, the device's kernels, and where the trace is."""
    from stoker.doctor.cases import milliseconds

    on_gpu = trace.kernels is not None
    total = sum(item.device_seconds if on_gpu else item.cpu_seconds for item in trace.operations)
    heads = ("operation", "calls", "CPU", *(["device"] if on_gpu else []), "share")
    table = make_table(f"{trace.num_steps} steps, own time of each operation", heads)
    for item in trace.operations[:_TOP]:
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
