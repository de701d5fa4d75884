"""`stoker doctor`: why a training job is slow, what would help and by how much, and whether it did.

Enters: a config of stoker's own, or behind `--` somebody's command, which is run as it is. Leaves: findings
on stdout, or on stderr beside a script, whose own output and exit code are untouched; a page, a JSON
document, a chrome trace, a changed config or a suggested patch where asked. Costs seconds for a config; for a
script its own time, or `--steps` and `--seconds` of it.

A config ends with 0 whatever is found; a script with its own exit code, or 0 when the doctor ended it after
its steps or seconds. Ctrl-C and SIGTERM end the script as well: 130 and 143.

`stoker doctor compare` ends with 0 if the second examination is not worse, with 3 if it is; `stoker doctor explain`
prints a finding's text, `stoker doctor --pid` where a running process spends its time.
"""

from __future__ import annotations

import os
import stat
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker import display
from stoker.cli.options import (
    DeviceOption,
    JsonOption,
    SetOption,
    StoreOption,
    require_output,
    require_page,
    verb,
)
from stoker.cli.terminal import (
    Bar,
    echo,
    echo_lines,
    known,
    make_console,
    make_table,
    plain_table,
    print_json,
    styled,
)
from stoker.display import nearest, quoted
from stoker.errors import EXIT_INTERRUPTED, EXIT_REFUSED, InputError
from stoker.ownership import SIGNATURE, always, never, write_text
from stoker.strict_json import json_text
from stoker.units import format_count

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.doctor.findings import Consultation, Outcome
    from stoker.doctor.job_config import JobConfig
    from stoker.doctor.measurements import Measurements
    from stoker.doctor.trace import Trace

_STOPPED = {
    "steps": "after its steps",
    "seconds": "after its seconds",
    "interrupt": "with the doctor, by Ctrl-C",
    "termination": "with the doctor, by SIGTERM",
}
_ENDED_BY = {"interrupt": EXIT_INTERRUPTED, "termination": 128 + 15}
_BOTH_FORMS = "stoker doctor --config tabular --store STORE, or stoker doctor -- python train.py"
_TOP = 15
"""Operations in the table of a trace."""

FileOption = Annotated[Path | None, typer.Option(metavar="FILE")]


@dataclass(frozen=True)
class Examination:
    """How long to measure, and what to write.

    Attributes:
        steps: Measure this many steps; a script is stopped after them.
        seconds: A script: stop it after this time. A config: upper limit of each measurement.
        apply: Write the changed config, or a patch for a script, and measure again.
        force: Let --apply replace FILE.
        html: Write a page for a browser.
        out: Write the JSON document to a file.
        trace: A config: also record a few steps with torch's profiler, as a chrome trace; .json.gz is
            compressed.
        trace_steps: Steps that --trace records.
    """

    steps: Annotated[int | None, typer.Option(min=1)] = None
    seconds: Annotated[float | None, typer.Option(min=0.1)] = None
    apply: FileOption = None
    force: bool = False
    html: FileOption = None
    out: FileOption = None
    trace: FileOption = None
    trace_steps: Annotated[int, typer.Option(min=1)] = 5

    def write(self, found: Consultation, document: dict[str, Any]) -> None:
        """Write the document and the page that were asked for."""
        if self.out is not None:
            write_text(self.out, json_text({"generator": SIGNATURE, **document}, indent=1) + "\n")
        if self.html is not None:
            from stoker.doctor.findings_page import findings_page

            write_text(self.html, findings_page(found))


@verb
def doctor(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND")] = None,
    *,
    pid: Annotated[int | None, typer.Option(min=1)] = None,
    config: Path | None = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    device: DeviceOption = None,
    how: Examination,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Find out why a training job is slow, what would help, and by how much.

    Give a config of stoker's own, or any command after two dashes: it runs unmodified. `stoker doctor compare A.json
    B.json` compares two results of --out, for CI; `stoker doctor explain NAME` prints what a finding means.

    Options:
        command: A script to run and look at, such as -- python train.py.
        pid: A process that already runs: where its time goes (by py-spy).
        config: A job of stoker's own: its YAML file, or a shipped name.
        as_json: Print one JSON document on stdout (beside a script: use --out).
    """
    if command and command[0] in ("compare", "explain"):
        main = typer.main.get_command(app).main
        raise typer.Exit(main(command, prog_name="stoker doctor", standalone_mode=False) or 0)
    if pid is not None:
        if command or config is not None:
            raise InputError(
                "--pid and something to run were given.",
                "a process that runs, or a job to start",
                f"stoker doctor --pid {quoted(pid)}",
            )
        _look_at_process(pid, how.seconds or 10.0, as_json)
        return
    if bool(command) == (config is not None):
        given = (
            "nothing to examine was given." if not command else "a config and a command were given."
        )
        raise InputError(given, "--config FILE, or -- and a command", _BOTH_FORMS)
    read = [config, *map(Path, command or ())]
    require_page(how.html, "--html")
    require_output(how.html, "--html", read)
    require_output(how.out, "--out", read)
    require_output(how.apply, "--apply", read, force=how.force)
    if command:
        if overrides or any(given is not None for given in (store, device, how.trace)):
            raise InputError(
                "--set, --store, --device and --trace are for a config, and a command was given.",
                "a command with options of its own, after --",
                "stoker doctor -- python train.py",
            )
        if as_json and how.out is None:
            raise InputError(
                "--json beside a script: stdout is the script's own.",
                "a file for the JSON document",
                "--out doctor.json instead of --json",
            )
        raise typer.Exit(_examine_script(command, how))
    from stoker.doctor.job_config import JobConfig

    assert config is not None
    # Set before the profiler's library is loaded: it would log on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if how.trace is not None:  # costs the import of torch's profiler
        from stoker.doctor.trace import is_trace

        require_output(how.trace, "--trace", [config], is_ours=is_trace)
    _examine_job(JobConfig.read(config, overrides or (), store), device, how, as_json)


def _examine_job(job: JobConfig, device: str | None, how: Examination, as_json: bool) -> None:
    """Examine one of stoker's own jobs."""
    from stoker.doctor.consultation import choose_treatment, consult_job, treat_job

    limits: dict[str, Any] = {"device": device, "steps": how.steps, "seconds": how.seconds}
    with Bar(quiet=as_json) as bar:
        found = consult_job(job, **limits, progress=bar)
        treatment = choose_treatment(job, found.findings) if how.apply is not None else None
        if how.apply is not None and treatment is not None:
            finding, treated = treatment
            treated.write(how.apply, replace=how.force)
            bar.say(f"{how.apply} written; measuring as it was and as it is now")
            outcome = treat_job(job, treated, finding, **limits, progress=bar)
            found = replace(found, outcome=outcome)
        recorded = None
        if how.trace is not None:
            bar.say(f"recording {how.trace_steps} steps for {how.trace}")
            recorded = _record(job, device, how.trace_steps, how.trace)
    document = found.to_json()
    if recorded is not None:
        facts = asdict(recorded) | {"trace": str(how.trace)}
        document["trace"] = facts | {"operations": facts["operations"][:_TOP]}
    how.write(found, document)
    if as_json:
        print_json(document)
        return
    console = make_console(soft_wrap=True)
    _print(console, found)
    if recorded is not None:
        console.line()
        _print_trace(console, recorded)
        console.print(f"trace: {how.trace} (open it at chrome://tracing or in Perfetto)")
    if how.apply is not None:
        _print_outcome(console, found.outcome, how.apply, "there is nothing to apply")


def _record(job: JobConfig, device: str | None, steps: int, out: Path) -> Trace:
    """Train for `steps` steps under torch's profiler."""
    from stoker.doctor.trace import Schedule, record
    from stoker.recipes.run import open_run

    with open_run(job.settings, device=device) as run:
        return record(run, Schedule(active=steps), out)


def _examine_script(command: list[str], how: Examination) -> int:
    """Run a user's script unchanged; return the exit code to end with."""
    from stoker.doctor.scripts import consult_script, suggest_patch, treat_script

    attached, found = consult_script(command, steps=how.steps, seconds=how.seconds)
    console = make_console(stderr=True, soft_wrap=True)
    code = _ENDED_BY.get(attached.stopped, attached.exit_code or 0)
    text = suggest_patch(found.findings) if how.apply is not None else ""
    if how.apply is not None and text:
        write_text(how.apply, text, always if how.force else never)
        if code == 0 and any(finding.patch.loader_arguments for finding in found.findings):
            console.print(f"{how.apply} written; running the script again with it")
            if _stdin_is_used_up():
                console.print(
                    "note: stdin is a pipe or a file, which the first run has read: "
                    "the second gets an empty one"
                )
            outcome = treat_script(command, found, steps=how.steps, seconds=how.seconds)
            found = replace(found, outcome=outcome)
    how.write(found, found.to_json())
    _print(console, found)
    if attached.stopped:
        console.print(f"the script was ended {_STOPPED[attached.stopped]}")
    for line in text.splitlines():
        console.print(line.expandtabs())
    if how.apply is not None:
        why = f"the script ended with {code}" if code else "the remedies are edits of the script"
        why = why if text else "there is nothing to apply"
        _print_outcome(console, found.outcome, how.apply, why)
    # A shell names the signal that ended a process by 128 and its number.
    return code if code >= 0 else 128 - code


def _stdin_is_used_up() -> bool:
    """Return whether the first run has consumed stdin, so that a second one would find it empty."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _print(console: Console, found: Consultation) -> None:
    console.print(_headline(found))
    _print_parts(console, found.measurements)
    for number, finding in enumerate(found.findings, 1):
        from stoker.doctor.findings_page import gain_text

        after = finding.predicted_samples_per_second
        then = f" → {after[1]:,.0f} samples/s" if after and finding.gain.likely > 1 else ""
        head = styled(f"{number}. ") + styled(finding.name, "bold")
        console.line()
        console.print(head + styled(f"  {gain_text(finding)}{then}"))
        lines = [finding.title, *(f"- {line}" for line in finding.evidence)]
        lines += [f"remedy: {finding.remedy}", finding.docs]
        for line in lines:
            console.print(f"   {line}")
    if not found.findings:
        console.print(found.verdict)
    if found.overlap or found.behind:
        console.line()
    for line in filter(None, (found.overlap, *found.behind)):
        console.print(line)
    # A job's notes are the choices of its run, which `stoker train` prints.
    for note in found.measurements.notes if found.measurements.kind == "script" else ():
        console.print(f"note: {note}")


def _headline(found: Consultation) -> str:
    from stoker.doctor.findings_page import spread_text

    measured = found.measurements
    if measured.step_seconds is None:
        return f"{measured.subject}: no step was measured"
    rate, share = measured.samples_per_second, measured.wait_share
    said = f"{measured.subject}: "
    said += "" if rate is None else f"{rate:,.0f} samples/s, "
    said += f"a step takes {spread_text(measured.step_seconds)}"
    said += "" if share is None else f", {share:.0%} of it waiting for data"
    return f"{said}; {format_count(measured.steps, 'step')} on {measured.machine.device}"


def _print_parts(console: Console, measured: Measurements) -> None:
    from stoker.doctor.cases import milliseconds
    from stoker.doctor.findings_page import spread_text
    from stoker.doctor.gains import split_step

    parts = split_step(measured)
    if not parts:
        return
    whole = sum(part.seconds for part in parts) or 1.0
    rows = [
        (f"  {part.label}", milliseconds(part.seconds), f"{part.seconds / whole:.0%}")
        for part in parts
    ]
    console.print(plain_table(rows, right=(1, 2)))
    ablation, loader = measured.ablation, measured.loader
    if ablation is not None:
        alone = (
            ("step", ablation.step_seconds),
            ("loader", ablation.loader_seconds),
            ("host to device", ablation.copy_seconds),
        )
        said = ", ".join(f"{label} {spread_text(spread)}" for label, spread in alone)
        console.print(f"alone, per batch: {said}")
    work = [] if loader is None else loader.work.parts.items()
    known = ", ".join(
        f"{words} {milliseconds(value)}" for words, value in work if value is not None
    )
    if known:
        console.print(f"the loader's work on a batch: {known}")


def _print_outcome(
    console: Console, outcome: Outcome | None, written: Path, otherwise: str
) -> None:
    console.line()
    if outcome is None:
        console.print(f"not measured again: {otherwise}")
        return
    predicted = outcome.predicted
    said = "n/a"
    if predicted is not None:
        said = f"{predicted[1]:,.0f} ({predicted[0]:,.0f} to {predicted[2]:,.0f})"
    before, after = (known(rate, ",.0f") for rate in (outcome.before, outcome.after))
    ratio = "" if outcome.ratio is None else f"  × {outcome.ratio:.2f}"
    console.print(f"applied {outcome.finding.name}: {outcome.change}")
    console.print(f"samples/s before {before}, predicted {said}, after {after}{ratio}")
    for line in filter(None, (outcome.failure, outcome.miss)):
        console.print(line)
    console.print(f"written: {written}")


def _print_trace(console: Console, trace: Trace) -> None:
    """Print the costliest operations and the device's kernels."""
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


# -- other verbs -----------------------------------------------------------------------------------

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
    from stoker.doctor.comparison import compare as compared
    from stoker.doctor.comparison import read_examination

    found = compared(read_examination(before), read_examination(after), tolerance / 100)
    if as_json:
        print_json(found.to_json())
    else:
        make_console().print(plain_table(found.figures, ("", str(before), str(after))))
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
            display.command("stoker", "doctor", "explain", meant),
        )
    echo_lines(known[name])


def _look_at_process(pid: int, seconds: float, as_json: bool) -> None:
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
