"""`stoker doctor compare`, `stoker doctor explain` and `stoker doctor --pid`.

Enters: two documents of `stoker doctor --out`; the name of a finding; the number of a process. Leaves: figures side by
side and an exit code for CI; the finding's text; where a running process spends its time. Costs milliseconds, or the
seconds of the look.

`compare` ends with 0 if the second examination is not worse, with 3 if it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.cli.options import JsonOption, argument, option
from stoker.cli.terminal import echo, echo_lines, make_console, print_json, styled
from stoker.display import command, nearest
from stoker.errors import EXIT_REFUSED, InputError

app = typer.Typer(name="doctor", no_args_is_help=True, pretty_exceptions_enable=False)


@app.command("compare")
def compare(
    before: Annotated[Path, argument("A document of `stoker doctor --out`.", metavar="BEFORE")],
    after: Annotated[Path, argument("The same job after a change.", metavar="AFTER")],
    tolerance: Annotated[
        float, option("--tolerance", "Percent of the rate that may be lost.", min=0.0, max=100.0)
    ] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Compare two examinations; end with 3 if the second is slower or has a new finding."""
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
def explain(
    name: Annotated[str, argument("Its name, such as no-workers.", metavar="FINDING")],
) -> None:
    """Print what a finding means and what to do."""
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
