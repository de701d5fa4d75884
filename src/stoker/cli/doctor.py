"""`stoker doctor`: why a training job is slow, what would help and by how much, and whether it did.

Enters: a config of stoker's own, or behind `--` somebody's command, which is run as it is. Leaves: findings
on stdout, or on stderr beside a script, whose own output and exit code are untouched; a page, a JSON
document, a chrome trace, a changed config or a suggested patch where asked. Costs seconds for a config; for a
script its own time, or `--steps` and `--seconds` of it.

A config ends with 0 whatever is found; a script with its own exit code, or 0 when the doctor ended it after
its steps or seconds. Ctrl-C and SIGTERM end the script as well: 130 and 143. `compare`, `explain` and `--pid` are in
`doctor_verbs.py`.
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.doctor_verbs import (
    look_at_process,
    print_trace,
    record_job,
    require_trace,
    run_verb,
    trace_facts,
)
from stoker.cli.options import DeviceOption, SetOption, StoreOption, require_output, verb
from stoker.cli.terminal import Bar, make_console, print_json, styled
from stoker.display import quoted
from stoker.errors import EXIT_INTERRUPTED, InputError
from stoker.ownership import SIGNATURE, always, never, write_text
from stoker.strict_json import json_text

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.doctor.findings import Consultation, Outcome
    from stoker.doctor.job_config import JobConfig
    from stoker.doctor.measurements import Measurements

_STOPPED = {
    "steps": "after its steps",
    "seconds": "after its seconds",
    "interrupt": "with the doctor, by Ctrl-C",
    "termination": "with the doctor, by SIGTERM",
}
_ENDED_BY = {"interrupt": EXIT_INTERRUPTED, "termination": 128 + 15}
_BOTH_FORMS = "stoker doctor --config tabular --store STORE, or stoker doctor -- python train.py"


@verb
def doctor(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND")] = None,
    *,
    pid: Annotated[int | None, typer.Option(min=1)] = None,
    config: Path | None = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    device: DeviceOption = None,
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1)] = None,
    apply: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    force: bool = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    trace_steps: Annotated[int, typer.Option(min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Find out why a training job is slow, what would help, and by how much.

    Give a config of stoker's own, or any command behind two dashes: it runs unmodified. `stoker doctor compare A.json
    B.json` compares two results of --out, for CI; `stoker doctor explain NAME` prints what a finding means.

    Options:
        command: A script to run and look at, such as -- python train.py.
        pid: A process that already runs: where its time goes (by py-spy).
        config: A job of stoker's own: its YAML file, or a shipped name.
        steps: Measure so many steps; a script is ended after them.
        seconds: A script: end it after so long. A config: the most for each measurement.
        apply: Write the changed config, or a patch for a script, and measure again.
        force: Let --apply replace FILE.
        html: Write a page for a browser.
        out: Write the JSON document to a file.
        trace: A config: also record a few steps with torch's profiler, as a chrome trace; .json.gz is
            compressed.
        trace_steps: Steps that --trace records.
        as_json: Print one JSON document on stdout (beside a script: use --out).
    """
    if command and command[0] in ("compare", "explain"):
        raise typer.Exit(run_verb(command) or 0)
    if pid is not None:
        if command or config is not None:
            raise InputError(
                "--pid and something to run were given.",
                "a process that runs, or a job to start",
                f"stoker doctor --pid {quoted(pid)}",
            )
        look_at_process(pid, seconds or 10.0, as_json)
        return
    if bool(command) == (config is not None):
        given = (
            "nothing to examine was given." if not command else "a config and a command were given."
        )
        raise InputError(given, "--config FILE, or -- and a command", _BOTH_FORMS)
    read = [config, *map(Path, command or ())]
    require_output(html, "--html", read)
    require_output(out, "--out", read)
    require_output(apply, "--apply", read, force=force)
    if command:
        if overrides or any(given is not None for given in (store, device, trace)):
            raise InputError(
                "--set, --store, --device and --trace are for a config, and a command was given.",
                "a command with options of its own, behind --",
                "stoker doctor -- python train.py",
            )
        if as_json and out is None:
            raise InputError(
                "--json beside a script: stdout is the script's own.",
                "a file for the JSON document",
                "--out doctor.json instead of --json",
            )
        raise typer.Exit(_examine_script(command, steps, seconds, apply, html, out, force))
    from stoker.doctor.job_config import JobConfig

    assert config is not None
    require_trace(trace, config)
    job = JobConfig.read(config, overrides or (), store)
    _examine_job(job, device, steps, seconds, apply, html, out, as_json, force, trace, trace_steps)


# -- stoker's own jobs -----------------------------------------------------------------------------


def _examine_job(
    job: JobConfig,
    device: str | None,
    steps: int | None,
    seconds: float | None,
    apply: Path | None,
    html: Path | None,
    out: Path | None,
    as_json: bool,
    force: bool,
    trace: Path | None,
    trace_steps: int,
) -> None:
    # The profiler's library talks on stderr while it is loaded, unless it is told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from stoker.doctor.consultation import choose_treatment, consult_job, treat_job

    with Bar(quiet=as_json) as bar:
        found = consult_job(job, device=device, steps=steps, seconds=seconds, progress=bar)
        treatment = choose_treatment(job, found.findings) if apply is not None else None
        if apply is not None and treatment is not None:
            finding, treated = treatment
            treated.write(apply, replace=force)
            bar.say(f"{apply} written; measuring as it was and as it is now")
            outcome = treat_job(
                job, treated, finding, device=device, steps=steps, seconds=seconds, progress=bar
            )
            found = replace(found, outcome=outcome)
        recorded = None
        if trace is not None:
            bar.say(f"recording {trace_steps} steps for {trace}")
            recorded = record_job(job, device, trace_steps, trace)
    document = found.to_json()
    if trace is not None and recorded is not None:
        document["trace"] = trace_facts(recorded, trace)
    _write(found, document, html, out)
    if as_json:
        print_json(document)
        return
    console = make_console(soft_wrap=True)
    _print(console, found)
    if trace is not None and recorded is not None:
        console.line()
        print_trace(console, recorded, trace)
    if apply is not None and found.outcome is not None:
        _print_outcome(console, found.outcome, apply)
    elif apply is not None:
        console.line()
        console.print("not measured again: there is nothing to apply")


# -- other people's scripts ------------------------------------------------------------------------


def _examine_script(
    command: list[str],
    steps: int | None,
    seconds: float | None,
    apply: Path | None,
    html: Path | None,
    out: Path | None,
    force: bool,
) -> int:
    """Return the exit code to end with."""
    from stoker.doctor.scripts import consult_script, suggest_patch, treat_script

    attached, found = consult_script(command, steps=steps, seconds=seconds)
    console = make_console(stderr=True, soft_wrap=True)
    code = _ENDED_BY.get(attached.stopped, attached.exit_code or 0)
    text = suggest_patch(found.findings) if apply is not None else ""
    if apply is not None and text:
        write_text(apply, text, always if force else never)
        if code == 0 and any(finding.patch.loader_arguments for finding in found.findings):
            console.print(f"{apply} written; running the script again with it")
            if _stdin_is_used_up():
                console.print(
                    "note: stdin is a pipe or a file, which the first run has read: "
                    "the second gets an empty one"
                )
            outcome = treat_script(command, found, steps=steps, seconds=seconds)
            found = replace(found, outcome=outcome)
    _write(found, found.to_json(), html, out)
    _print(console, found)
    if attached.stopped:
        console.print(f"the script was ended {_STOPPED[attached.stopped]}")
    for line in text.splitlines():
        console.print(line.expandtabs())
    if apply is not None and found.outcome is not None:
        _print_outcome(console, found.outcome, apply)
    elif apply is not None:
        console.line()
        why = f"the script ended with {code}" if code else "the remedies are edits of the script"
        console.print(f"not measured again: {why if text else 'there is nothing to apply'}")
    # A shell names the signal that ended a process by 128 and its number.
    return code if code >= 0 else 128 - code


def _stdin_is_used_up() -> bool:
    """Return whether a second run finds nothing on stdin that the first one has found."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


# -- printing --------------------------------------------------------------------------------------


def _write(
    found: Consultation, document: dict[str, Any], html: Path | None, out: Path | None
) -> None:
    if out is not None:
        write_text(out, json_text({"generator": SIGNATURE, **document}, indent=1) + "\n")
    if html is not None:
        from stoker.doctor.findings_page import findings_page

        write_text(html, findings_page(found))


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
    return f"{said}; {measured.steps:,} steps on {measured.machine.device}"


def _print_parts(console: Console, measured: Measurements) -> None:
    from rich.table import Table

    from stoker.doctor.cases import milliseconds
    from stoker.doctor.findings_page import spread_text
    from stoker.doctor.gains import split_step, split_work

    parts = split_step(measured)
    if not parts:
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify)
    whole = sum(part.seconds for part in parts) or 1.0
    for part in parts:
        table.add_row(f"  {part.label}", milliseconds(part.seconds), f"{part.seconds / whole:.0%}")
    console.print(table)
    ablation, loader = measured.ablation, measured.loader
    if ablation is not None:
        alone = (
            ("step", ablation.step_seconds),
            ("loader", ablation.loader_seconds),
            ("host to device", ablation.copy_seconds),
        )
        said = ", ".join(f"{label} {spread_text(spread)}" for label, spread in alone)
        console.print(f"alone, per batch: {said}")
    work = [] if loader is None else split_work(loader.work)
    known = ", ".join(
        f"{words} {milliseconds(value)}" for words, value in work if value is not None
    )
    if known:
        console.print(f"the loader's work on a batch: {known}")


def _print_outcome(console: Console, outcome: Outcome, written: Path) -> None:
    predicted = outcome.predicted
    said = "n/a"
    if predicted is not None:
        said = f"{predicted[1]:,.0f} ({predicted[0]:,.0f} to {predicted[2]:,.0f})"
    before = "n/a" if outcome.before is None else f"{outcome.before:,.0f}"
    after = "n/a" if outcome.after is None else f"{outcome.after:,.0f}"
    ratio = "" if outcome.ratio is None else f"  × {outcome.ratio:.2f}"
    console.line()
    console.print(f"applied {outcome.finding.name}: {outcome.change}")
    console.print(f"samples/s before {before}, predicted {said}, after {after}{ratio}")
    for line in filter(None, (outcome.failure, outcome.miss)):
        console.print(line)
    console.print(f"written: {written}")
