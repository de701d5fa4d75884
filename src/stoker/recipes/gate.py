"""Checks before a training: data that would ruin it is refused, and empty parts of a split are filled.

Enters: an open store, and the fields that training reads; a drawn split. Leaves: findings that only warn, or a
`QualityError` with the other findings and what to type; a split without an empty part. Costs: nothing for a packed
store, which contains the findings of its pack; a plain HDF5 file is read once, at about 0.3 GB/s a core.

Extreme inputs (1e15) are often caught by checks in every step, each of which makes the GPU wait. One check
before the first step finds the same values, names the column and the rows, and slows no step down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stoker.display import quoted
from stoker.errors import InputError, QualityError
from stoker.loader.splits import SplitName, samples_of, select_samples
from stoker.store.fields import Array
from stoker.store.inspection import inspect_store
from stoker.store.quality import Finding, sorted_findings
from stoker.store.reader import Store
from stoker.units import format_count

SPLITS: tuple[SplitName, ...] = ("train", "val", "test")
_LISTED = 5


def quality_gate(store: Store, fields: Sequence[str], *, scaled: bool) -> list[Finding]:
    """Refuse a store whose values would ruin training; return the findings that only warn.

    A store of `stoker pack` contains the gate's findings; any other store is inspected now. NaN,
    infinities and extremes (such as 1e15) are refused. Values above 65,504 are infinite in float16:
    they are refused unless the model first scales its inputs in float32 (`scaled`).

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


def own_parts(store: Store) -> dict[str, Array]:
    """Return the sample numbers of the store's own split."""
    return {name: select_samples(store, name) for name in SPLITS}


def drawn_parts(division: Array) -> dict[str, Array]:
    """Return the sample numbers of a split that `loader.splits` made: 0, 1, 2 or 3 per sample."""
    return {name: samples_of(division, name) for name in SPLITS}


def fill_parts(
    samples: Mapping[str, Array],  # of "train", "val" and "test"
    ratios: Sequence[float],  # their shares
    seed: int,  # decides which group is moved
    # one whole number per sample of the store; samples of equal numbers stay together. None: the parts are spans of
    # time, so nothing may be moved.
    groups: Array | None,
    what: str,  # the groups in words, such as "compounds"
) -> tuple[dict[str, Array], str]:
    """Return a drawn split in which every part with a share has samples, and a note on what was moved, or "".

    A split of few samples may leave val or test empty. One group of train is then moved there.

    Raises:
        InputError: There are too few groups to divide.
    """
    filled = dict(samples)
    parts = zip(("val", "test"), ratios[1:], strict=True)
    lacks = [name for name, share in parts if share > 0 and not len(samples[name])]
    for name in lacks:
        train = filled["train"]
        own = groups[train] if groups is not None else np.zeros(0)
        if len(np.unique(own)) < 2:
            sizes = ", ".join(f"{len(ids):,} {part}" for part, ids in samples.items())
            raise InputError(
                f"there are too few {what} for train, val and test: {sizes}.",
                "at least one in each part that has a share",
                "ratios=[1.0, 0.0, 0.0]",
            )
        taken = own == np.random.default_rng(seed).choice(np.unique(own))
        filled |= {"train": train[~taken], name: train[taken]}
    moved = [f"{name} ({format_count(len(filled[name]), 'sample')})" for name in lacks]
    told = f", and {' and '.join(moved)} from train, since there are few {what}" if moved else ""
    return filled, told


def complete_parts(
    samples: Mapping[str, Array], seed: int, groups: Array
) -> tuple[dict[str, Array], str]:
    """Return a store's own split with an empty val or test part filled, and a note on it, or "".

    Many data sets have train and val only, or train and test only. A missing val is a tenth of train; a missing test
    is half of val. A group stays together.

    Args:
        samples: Sample numbers of "train", "val" and "test".
        seed: Decides which groups are moved.
        groups: One whole number per sample of the store.
    """
    lacks = [name for name in ("val", "test") if not len(samples[name])]
    if len(lacks) != 1:
        return dict(samples), ""
    (name,) = lacks
    source, share = ("train", 0.1) if name == "val" else ("val", 0.5)
    ids = samples[source]
    own = np.random.default_rng(seed).permutation(np.unique(groups[ids]))
    count = max(1, round(share * len(own)))
    if count >= len(own):
        return dict(samples), ""
    taken = np.isin(groups[ids], own[:count])
    part = "a tenth" if name == "val" else "half"
    told = f", and {part} of {source} as {name} ({int(taken.sum()):,}), since it has none"
    return {**samples, source: ids[~taken], name: ids[taken]}, told


def gate_notes(warnings: Sequence[Finding]) -> list[str]:
    """Return notes for the log: the first warnings, the number of others, and columns beyond float16's range."""
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
