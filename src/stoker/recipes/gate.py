"""The quality gate in front of a recipe: data that would ruin training never reaches the first step.

Enters: an open store, and the fields that training reads. Leaves: the findings that only warn, or a
`QualityError` with the gate's own findings and what to type. Costs: nothing for a packed store, which
carries what the gate found; a plain HDF5 file is read once, at about 0.3 GB/s a core.

S4's inputs reached 1e15 and were met with checks in every step, each of which makes the GPU wait. A
look before the first step finds the same, names the column and the rows, and costs no step anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.display import quoted
from stoker.errors import QualityError
from stoker.store.inspection import inspect_store
from stoker.store.quality import Finding, sorted_findings
from stoker.store.reader import Store
from stoker.units import format_count

_LISTED = 5


def quality_gate(store: Store, fields: Sequence[str], *, scaled: bool) -> list[Finding]:
    """Refuse a store whose values would ruin training; return the findings that only warn.

    A store of `stoker pack` carries the gate's findings; anything else is looked at now. NaN,
    infinities and extremes (the 1e15 of S4) are refused. Values above 65,504 are infinite in float16:
    they are refused only where nothing scales them first.

    `scaled`: the model scales its inputs, in float32, before anything else.

    Raises:
        QualityError: With the gate's own findings, and what to type.
    """
    listed = store.manifest.quality.get("findings")
    if listed is None:
        findings = list(inspect_store(store).findings)
    else:
        findings = [Finding.from_json(finding) for finding in listed]
    mine = sorted_findings(finding for finding in findings if finding.field in fields)
    refused = [
        finding
        for finding in mine
        if finding.severity == "refuse" or (finding.name == "overflows-fp16" and not scaled)
    ]
    if refused:
        raise _refusal(store, refused)
    return [finding for finding in mine if finding.severity == "warn"]


def gate_notes(warnings: Sequence[Finding]) -> list[str]:
    """Return the first warnings for the log, how many more there are, and what scaling takes care of."""
    over = [finding for finding in warnings if finding.name == "overflows-fp16"]
    others = [finding for finding in warnings if finding.name != "overflows-fp16"]
    notes = [f"gate: {finding}" for finding in others[:_LISTED]]
    if len(others) > _LISTED:
        notes.append(f"gate: and {len(others) - _LISTED} more warnings, in `stoker inspect`")
    if over:
        notes.append(
            f"gate: {format_count(len(over), 'column')} above 65,504, infinite in float16; the model "
            "scales them in float32 first"
        )
    return notes


def _refusal(store: Store, refused: Sequence[Finding]) -> QualityError:
    listed = [str(finding) for finding in refused[:_LISTED]]
    left = len(refused) - _LISTED
    listed += [f"and {format_count(left)} more"] if left > 0 else []
    repairs = dict.fromkeys(finding.repair for finding in refused if finding.repair is not None)
    typed = " ".join(f"--repair {quoted(repair)}" for repair in repairs)
    made_by = store.manifest.provenance
    kind = "arrays" if made_by is None else made_by.kind
    fix = f"stoker pack {kind} FILE OUT {typed or '--on-bad quarantine'}, then train on OUT"
    return QualityError(
        f"the quality gate refuses {store.name}:",
        "finite values of usable size",
        fix,
        listed,
    )
