"""The balance of a pack: found = packed + refused + ignored, each with its reasons.

Enters: what a source found, and the refusals and ignored pieces of all its parts. Leaves: a `Counts`, which the
manifest keeps under `counts` and the command prints. Costs: one pass over the refusals.

*Refused* is input of the right kind that could not be taken; the bad-budget limits it. *Ignored* is whatever was left
out by rule (system files, other endings, records beyond `--max-samples`); it is counted and never limited. A piece is
what becomes one sample: a picture, a record, a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.display import printable
from stoker.errors import Refusal, StokerError

MOST_REASONS = 20
OTHER_REASONS = "other reasons"


@dataclass(frozen=True)
class Counts:
    """How many pieces of input were found, and what became of them.

    Attributes:
        found: Pieces that the source met.
        packed: Samples of the store.
        refused: Reason to number of pieces; the commonest first, at most `MOST_REASONS`.
        ignored: The same for what was left out by rule.
    """

    found: int
    packed: int
    refused: Mapping[str, int]
    ignored: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the value of the manifest's key `counts`."""
        return {
            "found": self.found,
            "packed": self.packed,
            "refused": dict(self.refused),
            "ignored": dict(self.ignored),
        }

    def lines(self) -> list[str]:
        """Return the balance for people: one line, then one per reason."""
        return counts_lines(self.to_json())


def counts_lines(counts: Mapping[str, Any]) -> list[str]:
    """Return the balance of a manifest's `counts` for people; nothing for a store that has none."""
    if not counts:
        return []
    refused, ignored = sum(counts["refused"].values()), sum(counts["ignored"].values())
    lines = [
        f"found {counts['found']:,} = packed {counts['packed']:,} + refused {refused:,} + ignored {ignored:,}"
    ]
    for what in ("refused", "ignored"):
        lines += [f"  {what} {num:,}: {reason}" for reason, num in counts[what].items()]
    return lines


def balance(
    found: int | None,
    packed: int,
    refused: Iterable[Refusal],
    ignored: Iterable[Mapping[str, int]],
) -> Counts:
    """Add everything up, and compare it with what the source says it found.

    Args:
        found: The source's own count; None takes the sum (a source that does not count).
        packed: Samples in the store.
        refused: Everything that was refused, while scanning, building or by the quality gate.
        ignored: What was ignored while scanning and in each part, by reason.

    Raises:
        StokerError: The sum differs: a piece of input was lost without a word.
    """
    why_refused: Counter[str] = Counter()
    for refusal in refused:
        why_refused[printable(refusal.kind or refusal.reason)] += refusal.count
    why_ignored: Counter[str] = Counter()
    for reasons in ignored:
        why_ignored.update(reasons)
    total = packed + why_refused.total() + why_ignored.total()
    if found is not None and found != total:
        raise StokerError(
            f"the source found {found:,} pieces of input, but {packed:,} were packed, "
            f"{why_refused.total():,} refused and {why_ignored.total():,} ignored.",
            "equal counts: this is a fault in stoker or in the source",
            "",
        )
    return Counts(total, packed, _commonest(why_refused), _commonest(why_ignored))


def _commonest(reasons: Counter[str]) -> dict[str, int]:
    """Return the reasons, commonest first; above `MOST_REASONS` the rest become one."""
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    if len(ordered) <= MOST_REASONS:
        return dict(ordered)
    kept = dict(ordered[: MOST_REASONS - 1])
    kept[OTHER_REASONS] = sum(num for _, num in ordered[MOST_REASONS - 1 :])
    return kept
