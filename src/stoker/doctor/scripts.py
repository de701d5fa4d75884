"""Examines a script: runs it with the probe, diagnoses it, and on request runs it again with a remedy.

Enters: a command line. Leaves: its exit code and a `Consultation`; suggested edits as a unified diff; after a second
run with other DataLoader arguments, an `Outcome`. Costs the script's own time for each run. The script's files are
never written. Imports no torch.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.doctor.attach import Attached, describe_ending, run_script
from stoker.doctor.findings import Consultation, Finding, Outcome
from stoker.doctor.rules import consult
from stoker.units import format_count

_CONTEXT = 2
_NO_NEWLINE = "\\ No newline at end of file\n"
_POSITIONAL = 5
"""A DataLoader call with more positional arguments than this (dataset to batch_sampler) is not edited."""


def consult_script(
    command: Sequence[str], *, steps: int | None = None, seconds: float | None = None
) -> tuple[Attached, Consultation]:
    """Run a script with the probe, and diagnose the measurements."""
    attached = run_script(command, steps=steps, seconds=seconds)
    return attached, consult(attached.measurements)


def treat_script(
    command: Sequence[str],
    consultation: Consultation,
    *,
    steps: int | None = None,
    seconds: float | None = None,
) -> Outcome | None:
    """Run a script again with the first DataLoader arguments that a finding suggests; None if no finding has any."""
    found = next((item for item in consultation.findings if item.patch.loader_arguments), None)
    if found is None:
        return None
    arguments: Mapping[str, Any] = found.patch.loader_arguments
    again = run_script(command, steps=steps, seconds=seconds, loader_arguments=arguments)
    words = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    num_steps, failure = again.measurements.steps, ""
    if again.exit_code or again.stopped in ("interrupt", "termination") or not num_steps:
        failure = describe_ending(again.exit_code, again.stopped, seconds, "the second run")
        after = f"after {format_count(num_steps, 'step')} that counted"
        failure += f" {after}" if num_steps else " before its first step: nothing was measured"
    return Outcome(
        found,
        f"DataLoader({words})",
        consultation.measurements.samples_per_second,
        again.measurements.samples_per_second,
        failure,
    )


# -- suggested edits ---------------------------------------------------------------------------------


def suggest_patch(findings: Sequence[Finding]) -> str:
    """Return the suggested edit of each finding as comments, with a diff where the call is found in the source."""
    return "\n".join(
        _suggest(finding)
        for finding in findings
        if finding.patch.script or finding.patch.loader_arguments or finding.patch.replacement
    )


def _suggest(finding: Finding) -> str:
    patch = finding.patch
    lines = [f"# {finding.name}: {finding.remedy}"]
    diff = None
    if patch.loader_arguments:
        diff = edit_call(patch.where, patch.loader_arguments)
    elif patch.replacement:
        lines.append(
            "# What the dataset does to the values it reads goes into the loop, or into stoker.augment."
        )
        diff = replace_call(patch.where, patch.replacement)
    if diff is not None:
        return "\n".join([*lines, diff])
    if patch.replacement:
        lines.append(f"#   {patch.replacement}")
    if patch.where:
        lines.append(f"# at {patch.where}")
    lines += [f"#   {line}" for line in patch.script.splitlines()]
    return "\n".join(lines) + "\n"


def edit_call(where: str | None, arguments: Mapping[str, Any]) -> str | None:
    """Return a unified diff that sets these keyword arguments in the call at file:line.

    None if the file cannot be read, no call is on that line, or the call cannot be edited.
    """
    found = _call_at(where)
    if found is None or len(found[2].args) > _POSITIONAL:
        return None
    file, source, call = found
    return _diff(file, source, _with_arguments(source, call, arguments))


def replace_call(where: str | None, code: str) -> str | None:
    """Return a unified diff that replaces the call at file:line by `code`, and imports stoker if necessary.

    None if the file cannot be read or no call is on that line.
    """
    found = _call_at(where)
    if found is None:
        return None
    file, source, call = found
    start, end = _span(source, call)
    edited = source[:start] + code + source[end:]
    tree = ast.parse(source)
    known = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    if "stoker" not in known and imports:
        line = imports[-1].end_lineno or imports[-1].lineno
        lines = edited.splitlines(keepends=True)
        edited = "".join([*lines[:line], "import stoker\n", *lines[line:]])
    return _diff(file, source, edited)


def _call_at(where: str | None) -> tuple[str, str, ast.Call] | None:
    """Return (file, source, call) for the call at file:line; None if there is no call."""
    file, _, line = (where or "").rpartition(":")
    if not file or not line.isdigit():
        return None
    try:
        source = Path(file).read_text(encoding="utf-8")
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except (OSError, ValueError, SyntaxError):
        return None
    number = int(line)
    spanning = [call for call in calls if call.lineno <= number <= (call.end_lineno or call.lineno)]
    # A call of something named "Loader" is preferred.
    spanning.sort(key=lambda call: ("Loader" not in ast.unparse(call.func), -call.lineno))
    return (file, source, spanning[0]) if spanning else None


def _diff(file: str, source: str, edited: str) -> str | None:
    """Return a unified diff with paths for `git apply`; None if the edited source does not parse."""
    try:
        ast.parse(edited)
    except (ValueError, SyntaxError):  # for example a last argument in parentheses of its own
        return None
    before, after = source.splitlines(keepends=True), edited.splitlines(keepends=True)
    # Paths in the diff are relative to the working folder if the file is below it, else to /.
    path, here = Path(file).resolve(), Path.cwd()
    name = path.relative_to(here if path.is_relative_to(here) else path.anchor)
    # `git apply` and `patch -p1` expect the prefixes a/ and b/.
    found = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=_CONTEXT)
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" for line in found)


def _span(source: str, node: ast.expr) -> tuple[int, int]:
    """Return the offsets of a node's begin and end in characters of `source`; ast counts columns in UTF-8 bytes."""
    lines = source.splitlines(keepends=True)

    def place(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)


def _with_arguments(source: str, call: ast.Call, arguments: Mapping[str, Any]) -> str:
    known = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    edits = [
        (*_span(source, known[name]), repr(value))
        for name, value in arguments.items()
        if name in known
    ]
    added = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if name not in known)
    if added:
        parts = [*call.args, *(keyword.value for keyword in call.keywords)]
        at = max((_span(source, part)[1] for part in parts), default=_span(source, call)[1] - 1)
        edits.append((at, at, f", {added}" if parts else added))
    for start, end, text in sorted(edits, reverse=True):
        source = source[:start] + text + source[end:]
    return source
