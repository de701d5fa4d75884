"""The `Source` protocol: raw files in, parts of a store out; and the accounts of all its input.

Enters: files and options, held by a frozen, picklable object. Leaves: parts, each built on its
own in any process, so that packing runs in parallel, resumes after a kill, and gives the same
bytes whatever the number of workers. Costs: `prepare` may scan the files once; `build` holds
one part in memory.

A user's own source only has to meet the `Source` protocol; there is nothing to register.

For every input, found = packed + refused + ignored. *Refused* input is of the right kind but unusable; `--bad-budget`
limits it. *Ignored* input was left out by a rule (system files, other endings, records beyond `--max-samples`); it is
counted, without a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from stoker.errors import InputError, Refusal, count_kinds
from stoker.store.fields import ShardData
from stoker.strict_json import exact_text, parse_json

Json = Any  # a JSON value: dict, list, str, int, float, bool, None


@dataclass(frozen=True)
class Part:
    """One independent piece of the input; becomes one shard.

    Attributes:
        index: Position in the store; the order of samples follows it.
        label: For people: "rows 0-49999 of train.npy".
        num_samples: Samples expected, for progress; refusals may lower it.
        payload: The source's own picklable description of the piece.
        file: The input file, where a part is rows of one file.
        first_row: Number of the part's first row in that file.
    """

    index: int
    label: str
    num_samples: int
    payload: Any
    file: str = ""
    first_row: int = 0


@dataclass(frozen=True)
class Preparation:
    """The outcome of looking at the files once.

    Attributes:
        parts: In store order. Must not depend on the number of workers.
        estimated_bytes: Upper estimate of the finished store, for the disk check.
        refused: What was refused while scanning.
        notes: Lines for the user ("Found 300,000 compounds with MOL files").
        found: Pieces of input that were found, each to become a sample, a refusal, or one of `ignored`; None where
            the source counts otherwise (`Account`s under "accounts" of `Source.finish`) or not at all.
        ignored: Reason to number of pieces that were never meant as samples (blank lines, hidden files).
        unit: What `found` counts: "rows", "images".
    """

    parts: Sequence[Part]
    estimated_bytes: int
    refused: Sequence[Refusal] = ()
    notes: Sequence[str] = ()
    found: int | None = None
    ignored: Mapping[str, int] = field(default_factory=dict)
    unit: str = "samples"


_MOST_KINDS = 20


@dataclass(frozen=True)
class Account:
    """Counts of the pieces of one kind of input: found = packed + refused + ignored."""

    unit: str  # what is counted: "rows", "M5 bars"
    found: int  # pieces in the input
    packed: int  # pieces in the store
    # reason to number of pieces that are wrong; each is listed in `refused.jsonl`
    refused: Mapping[str, int] = field(default_factory=dict)
    # reason to number of pieces that are no samples
    ignored: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("refused", "ignored"):
            object.__setattr__(self, name, _largest(getattr(self, name)))
        total = self.packed + sum(self.refused.values()) + sum(self.ignored.values())
        if total != self.found:  # a bug of the source: it lost pieces silently
            raise RuntimeError(
                f"{self.found:,} {self.unit} were found, but {total:,} are accounted for: "
                f"{self.packed:,} packed, refused {dict(self.refused)}, ignored {dict(self.ignored)}"
            )

    def lines(self) -> list[str]:
        """Return the account as text: one line, then one for each reason."""
        num_refused, num_ignored = sum(self.refused.values()), sum(self.ignored.values())
        sums = f"{self.packed:,} packed + {num_refused:,} refused + {num_ignored:,} ignored"
        lines = [f"{self.found:,} {self.unit} found = {sums}"]
        for name in ("refused", "ignored"):
            reasons: Mapping[str, int] = getattr(self, name)
            lines += [f"  {name} {count:,}: {reason}" for reason, count in reasons.items()]
        return lines


def _largest(reasons: Mapping[str, int]) -> dict[str, int]:
    """Return the reasons by falling count; the rare ones of a long list are merged as "other reasons"."""
    ranked = sorted(((n, r) for r, n in reasons.items() if n), key=lambda pair: (-pair[0], pair[1]))
    if len(ranked) <= _MOST_KINDS + 1:
        return {reason: count for count, reason in ranked}
    kept = Counter({reason: count for count, reason in ranked[:_MOST_KINDS]})
    kept["other reasons"] += sum(count for count, _ in ranked[_MOST_KINDS:])
    return dict(kept)


def make_accounts(
    preparation: Preparation,
    own: Sequence[Mapping[str, Json]],
    refused: Iterable[Refusal],
    ignored: Iterable[Mapping[str, int]],
    num_samples: int,
) -> list[Account]:
    """Return the accounts of all input; the last one counts samples.

    The `own` accounts of a source are used if it has any. Otherwise one is made from its preparation.

    Raises:
        RuntimeError: A piece of input is in no count: a bug in stoker or in the source.
    """
    if own:
        *others, samples = own
        # The gate leaves samples out after the source has counted them.
        dropped = samples["packed"] - num_samples
        gated = {"left out by the quality gate": dropped} if dropped else {}
        last = {**samples, "packed": num_samples, "refused": {**samples["refused"], **gated}}
        return [Account(**account) for account in (*others, last)]
    refused = list(refused)
    why_refused = count_kinds(refused)
    why_ignored: Counter[str] = Counter(count_kinds(refused, is_asked=True))
    for reasons in ignored:
        why_ignored.update(reasons)
    # The source does not count its input: take the sum, which balances.
    found = preparation.found
    if found is None:
        found = num_samples + sum(why_refused.values()) + why_ignored.total()
    return [Account(preparation.unit, found, num_samples, why_refused, why_ignored)]


def recorded_options(source: Any, *without: str) -> dict[str, Json]:
    """Return a dataclass's fields, except `without`, as JSON values for a manifest: lists, no tuples."""
    values = {name: value for name, value in asdict(source).items() if name not in without}
    recorded: dict[str, Json] = parse_json(exact_text(values))
    return recorded


def cut_rows(num_rows: int, rows: int, label: str, file: str) -> list[Part]:
    """Return parts of `rows` rows each; the last may be shorter. Zero rows give one empty part.

    The payload of a part is its first row. `label` precedes the row numbers: "x.npy rows".
    """
    return [
        Part(number, f"{label} {low}-{min(low + rows, num_rows)}", min(rows, num_rows - low), low, file, low)
        for number, low in enumerate(range(0, max(1, num_rows), rows))
    ]  # fmt: skip


class PlainSource:
    """Base of most sources: files named by `paths`, no time limit per row, no attributes in the manifest."""

    version: ClassVar[int] = 1
    row_limit_seconds: ClassVar[float | None] = None

    def files(self) -> Sequence[Path]:
        """Return the paths as the user gave them."""
        return tuple(getattr(self, "paths", ()))

    def options(self) -> Mapping[str, Json]:
        """Return every option except the paths."""
        return recorded_options(self, "paths")

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Add no attributes."""
        del extras
        return {}


def check_shares(split: Sequence[float], name: str = "split") -> None:
    """Refuse a `split` that is neither empty nor three shares that add up to 1; `name` is the argument's name."""
    if split and (len(split) != 3 or abs(sum(split) - 1) > 1e-6 or min(split) < 0):
        raise InputError(
            f"the split shares are {tuple(split)}.",
            "three shares that add up to 1",
            f"{name}=(0.8, 0.1, 0.1), or --split 0.8,0.1,0.1",
        )


@dataclass(frozen=True)
class PartData:
    """One built part.

    Attributes:
        fields: Field name to data; every field has the same number of samples.
        refused: Input of this part that was not taken.
        extra: JSON facts that `Source.finish` merges into the manifest (scalers, counts).
        ignored: As in `Preparation`, of this part.
    """

    fields: ShardData
    refused: Sequence[Refusal] = ()
    extra: Mapping[str, Json] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PartContext:
    """What the packer passes to `Source.build`."""

    scratch: Path  # a folder that lives as long as the pack job (shared by all parts)
    # call `guard(row)` before work on a row that may hang or crash the process, and `guard(None)` after the last: a
    # worker that spends longer than the source's `row_limit_seconds` on one row is killed, and the part is built
    # again without it
    guard: Callable[[int | None], None]
    # rows, by the numbers given to `guard`, that killed a worker before, with the reason: refuse them instead of
    # touching them again
    poisoned: Mapping[int, str]


class Source(Protocol):
    """Raw files of one kind. Frozen and picklable: it travels to worker processes."""

    @property
    def kind(self) -> str:
        """The word after `stoker pack`."""

    @property
    def version(self) -> int:
        """Raised whenever the same input would give other bytes."""

    @property
    def row_limit_seconds(self) -> float | None:
        """Time limit of one guarded row, or None when nothing can hang."""

    def files(self) -> Sequence[Path]:
        """Every input file or folder; their hashes decide whether a store is stale."""

    def options(self) -> Mapping[str, Json]:
        """Every option that changes the output, under the name the user typed."""

    def prepare(self, scratch: Path) -> Preparation:
        """Look at the files and split the work. May leave files in `scratch` for `build`."""

    def build(self, part: Part, context: PartContext) -> PartData:
        """Read one part. Runs in any process; must depend on nothing but its arguments."""

    def finish(self, extras: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
        """Merge the `extra` of all parts, in order, into the manifest's `attributes`."""
