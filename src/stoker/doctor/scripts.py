"""The examination of a script: run with the probe, judged, and on request run again with a remedy.

Enters: a command line. Leaves: its exit code and a `Consultation`; suggested edits as a unified diff; an `Outcome`
after a second run with other DataLoader arguments. Costs the script's own time for each run. The script's files are
never written. No torch here.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stoker.doctor.attach import Attached, describe_ending, run_script
from stoker.doctor.findings import Consultation, Finding, Outcome
from stoker.doctor.rules import diagnose
from stoker.units import format_count

_CONTEXT = 2
_NO_NEWLINE = "\\ No newline at end of file\n"
_POSITIONAL = 5
"""Positional arguments of a DataLoader before those that the doctor suggests: dataset to batch_sampler."""


def consult_script(
    command: Sequence[str], *, steps: int | None = None, seconds: float | None = None
) -> tuple[Attached, Consultation]:
    """Run a script with the probe, and diagnose the measurements."""
    attached = run_script(command, steps=steps, seconds=seconds)
    measured = attached.measurements
    return attached, Consultation(measured, tuple(diagnose(measured)))


def treat_script(
    command: Sequence[str],
    consultation: Consultation,
    *,
    steps: int | None = None,
    seconds: float | None = None,
) -> Outcome | None:
    """Run a script again with the DataLoader arguments of the first finding that has any; None if none has."""
    found = next((item for item in consultation.findings if item.patch.loader_arguments), None)
    if found is None:
        return None
    arguments: Mapping[str, Any] = found.patch.loader_arguments
    again = run_script(command, steps=steps, seconds=seconds, loader_arguments=arguments)
    words = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return Outcome(
        found,
        f"DataLoader({words})",
        consultation.measurements.samples_per_second,
        again.measurements.samples_per_second,
        _describe_failure(again, seconds),
    )


def _describe_failure(again: Attached, seconds: float | None) -> str:
    """Return what went wrong in the second run; "" if it ended normally and was measured."""
    num_steps = again.measurements.steps
    ended_well = not again.exit_code and again.stopped not in ("interrupt", "termination")
    if ended_well and num_steps:
        return ""
    ending = describe_ending(again.exit_code, again.stopped, seconds, "the second run")
    if num_steps:
        return f"{ending} after {format_count(num_steps, 'step')} that counted"
    return f"{ending} before its first step: nothing was measured"


# -- suggested edits ---------------------------------------------------------------------------------


def suggest_patch(findings: Sequence[Finding]) -> str:
    """Return the suggested edits by finding: comments, and a diff where the call is found."""
    return "\n".join(
        _suggest(finding)
        for finding in findings
        if finding.patch.script or finding.patch.loader_arguments
    )


def _suggest(finding: Finding) -> str:
    patch = finding.patch
    lines = [f"# {finding.name}: {finding.remedy}"]
    diff = edit_call(patch.where, patch.loader_arguments) if patch.loader_arguments else None
    if diff is not None:
        return "\n".join([*lines, diff])
    if patch.where:
        lines.append(f"# at {patch.where}")
    lines += [f"#   {line}" for line in patch.script.splitlines()]
    return "\n".join(lines) + "\n"


def edit_call(where: str | None, arguments: Mapping[str, Any]) -> str | None:
    """Return a unified diff that gives the call at `where` these keyword arguments.

    Args:
        where: file:line of a call, as a traceback would name it.
        arguments: Names and plain values.

    Returns:
        None when the file cannot be read or no call stands there.
    """
    file, _, line = (where or "").rpartition(":")
    if not file or not line.isdigit():
        return None
    try:
        source = Path(file).read_text(encoding="utf-8")
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except (OSError, ValueError, SyntaxError):
        return None
    call = _find_call(calls, int(line))
    if call is None or len(call.args) > _POSITIONAL:
        return None
    edited = _with_arguments(source, call, arguments)
    try:
        ast.parse(edited)
    except (ValueError, SyntaxError):  # for example a last argument in parentheses of its own
        return None
    before, after = source.splitlines(keepends=True), edited.splitlines(keepends=True)
    # Relative to the working folder, where the patch is applied, else to /.
    path, here = Path(file).resolve(), Path.cwd()
    name = path.relative_to(here if path.is_relative_to(here) else path.anchor)
    # With a/ and b/, as `git apply` and `patch -p1` expect them.
    found = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=_CONTEXT)
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" for line in found)


def _find_call(calls: Iterable[ast.Call], line: int) -> ast.Call | None:
    """Return the call that spans a line; a call of something named "Loader" is preferred."""
    spanning = [call for call in calls if call.lineno <= line <= (call.end_lineno or call.lineno)]
    spanning.sort(key=lambda call: ("Loader" not in ast.unparse(call.func), -call.lineno))
    return spanning[0] if spanning else None


class _Edit(NamedTuple):
    """A range of the source, in characters of the whole text, and its replacement."""

    start: int
    end: int
    text: str


def _with_arguments(source: str, call: ast.Call, arguments: Mapping[str, Any]) -> str:
    lines = source.splitlines(keepends=True)

    def place(line: int, offset: int) -> int:
        whole = lines[line - 1].encode()[:offset].decode()  # ast counts bytes
        return sum(map(len, lines[: line - 1])) + len(whole)

    known = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    edits = []
    for name, value in arguments.items():
        node = known.get(name)
        if node is not None:
            start = place(node.lineno, node.col_offset)
            end = place(node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
            edits.append(_Edit(start, end, repr(value)))
    added = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if name not in known)
    if added:
        parts: list[ast.expr] = [*call.args, *(keyword.value for keyword in call.keywords)]
        last: Any = max(
            parts, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0), default=None
        )
        if last is None:
            at = place(call.end_lineno or call.lineno, (call.end_col_offset or 1) - 1)
            edits.append(_Edit(at, at, added))
        else:
            at = place(last.end_lineno, last.end_col_offset)
            edits.append(_Edit(at, at, f", {added}"))
    for edit in sorted(edits, reverse=True):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source
