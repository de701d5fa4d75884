"""`pack(source, out)`: decide whether anything must be done, build the parts, gate, commit; `pack_from(samples, out)`.

Enters: a `Source`, a target folder, options. Leaves: a finished store under the target's name and
a `PackResult`; on any failure the old store, if there was one, is untouched. Costs: the source's
own reading, one write of the store, one pass of the quality gate at about 0.3 GB/s a core; memory for one
part per worker.

Each stage has its own folder, so that a kill at any moment costs at most the parts in progress:
built -> repaired (only with repairs) -> kept (only when rows were quarantined) -> committed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from stoker.arguments import explained
from stoker.bounds import require_disk
from stoker.display import command, look_for, quoted, table_html
from stoker.errors import InputError, QualityError, Refusal, StoreError, count_refused
from stoker.ownership import always, write_text
from stoker.packing.cluster import ClusterWorkers, check_cluster
from stoker.packing.gate import (
    Stage,
    StagedPart,
    change_stage,
    fit_stage,
    open_stage,
    quarantine,
)
from stoker.packing.work_folder import WorkFolder, check_replaceable, check_target, remove_leftovers
from stoker.packing.workers import Poison, Workers, current_guard
from stoker.report import Progress, Silent
from stoker.sources.contract import Part, PartContext, Preparation, Source, make_accounts
from stoker.sources.dataset import samples_source
from stoker.sources.fingerprint import difference, fingerprint
from stoker.stalls import Waiting, start_watch
from stoker.store.hdf5 import PACKED_BY
from stoker.store.inspection import Inspection, inspect_store
from stoker.store.manifest import REFUSED_NAME, FieldInfo, Manifest, Provenance, read_manifest
from stoker.store.repairs import fitted_among, parse_repair
from stoker.store.shard import write_shard
from stoker.strict_json import json_text
from stoker.units import format_count, parse_share

_LISTED = 5
_QUARANTINES = 3
_WORKER_SECONDS = 5.0
"""Samples that take less than this in all are made in this process: workers that import torch start in seconds."""
_FITTED_ON_ALL = (
    "fitted on all rows, also those that training will draw for val and test. In a store with a split (--split of "
    "tables, a field 'split' of arrays) it is fitted on the training rows"
)


@explained("stoker.PackOptions(jobs=2)")
@dataclass(frozen=True)
class PackOptions:
    """Choices that every kind of source shares.

    Attributes:
        jobs: Worker processes; 0 means one per usable core, here or of the cluster.
        force_recreate: Pack again even when the store is up to date.
        on_bad: "stop" refuses the whole pack when anything is bad; "quarantine" leaves the bad
            pieces out, lists them, and goes on within the budget.
        bad_budget: Largest share ("1%") or number ("100") of samples that may be left out.
        repairs: Named repairs for the features, in order ("clip", "robust", ...).
        cluster: Address of a Dask scheduler whose workers build the parts; None builds them here.
    """

    jobs: int = 0
    force_recreate: bool = False
    on_bad: Literal["stop", "quarantine"] = "stop"
    bad_budget: str = "1%"
    repairs: tuple[str, ...] = ()
    cluster: str | None = None

    def __post_init__(self) -> None:
        if self.jobs < 0:
            raise InputError(f"--jobs is {self.jobs}.", "0 (all cores) or more", "--jobs 2")
        if self.on_bad not in ("stop", "quarantine"):
            raise InputError(
                f"--on-bad is {self.on_bad!r}.", "stop or quarantine", "--on-bad quarantine"
            )
        for repair in self.repairs:
            parse_repair(repair)
        try:
            self.allowance(0)
        except InputError as error:
            raise InputError(
                f"--bad-budget is {self.bad_budget!r}.",
                "a share from 0% to 100%, or a number of pieces",
                "--bad-budget 5%",
            ) from error
        if self.on_bad == "stop" and self.bad_budget != PackOptions.bad_budget:
            raise InputError(
                f"--on-bad stop, and a --bad-budget of {self.bad_budget}: it has no effect.",
                "--bad-budget with --on-bad quarantine",
                "--on-bad quarantine (in Python on_bad='quarantine'); or leave --bad-budget out",
            )

    def recorded(self) -> dict[str, Any]:
        """Return the options that change the store's content."""
        return {"on_bad": self.on_bad, "repairs": list(self.repairs)}

    def allowance(self, total: int) -> int:
        """Return how many of `total` pieces may be left out."""
        text = str(self.bad_budget).strip()
        # A whole number is a number of pieces; a share has a percent sign or a point.
        most = int(text) if text.isdigit() else int(parse_share(text) * total)
        return 0 if self.on_bad == "stop" else most


@dataclass(frozen=True)
class PackResult:
    """What a pack did.

    Attributes:
        path: The store.
        manifest: Its manifest.
        reused: True when the store was up to date and nothing was done.
        reason: Why it was built, or why not, in words.
        refused: Everything that was left out.
        inspection: The quality gate's view; None when reused.
        seconds: Wall time.
    """

    path: Path
    manifest: Manifest
    reused: bool
    reason: str
    seconds: float
    refused: Sequence[Refusal] = field(default=())
    inspection: Inspection | None = None

    def __repr__(self) -> str:
        return f"PackResult({', '.join(f'{name} {value}' for name, value in self._summary())})"

    def _repr_html_(self) -> str:
        return table_html("PackResult", self._summary())

    def _summary(self) -> list[tuple[str, str]]:
        return [
            ("store", repr(str(self.path))),
            ("samples", f"{self.manifest.num_samples:,}"),
            ("refused", f"{len(self.refused):,}"),
            ("seconds", f"{self.seconds:.1f}"),
            ("reason", repr(self.reason)),
        ]


@explained("stoker.pack(source, 'out')")
def pack(
    source: Source,
    out: str | Path,
    options: PackOptions | None = None,
    progress: Progress | None = None,
    **others: Any,
) -> PackResult:
    """Make the store `out` from `source`, or find that it is up to date.

    Args:
        source: A `Source`; files of the kinds that `stoker pack` knows are packed by that command.
        out: The folder of the store.
        options: How to pack.
        progress: Receives the progress.
        **others: Refused, with the command to type; so is a path as `source`.

    Raises:
        InputError: The source is no `Source`.
        SourceError: An input cannot be read as the kind of file that the user named.
        QualityError: The data was refused; nothing was replaced.
        StoreError: The disk is full, read-only, or in use by another packer.
    """
    if others or not hasattr(source, "prepare"):
        raise _no_source(source, out, others)
    options, progress, out = options or PackOptions(), progress or Silent(), Path(out)
    began = time.perf_counter()
    start_watch()
    target = check_target(out, source.files())
    if options.cluster:
        progress.say(f"packing with {check_cluster(options.cluster, source.files())}")
    try:
        old = read_manifest(target)
    except StoreError:
        old = None
    provenance = fingerprint(source, options.recorded(), old.provenance if old else None)
    reason = _why_build(target, old, provenance, options.force_recreate)
    if old is not None and not reason:
        remove_leftovers(target)
        return PackResult(out, old, True, "up to date", time.perf_counter() - began)
    check_replaceable(out, target)
    progress.say(f"packing {out}: {reason}")
    # Built parts stay valid when only the gate's options change.
    job = provenance.model_copy(update={"options": dict(source.options())})
    with WorkFolder(target, job, progress.say) as work:
        manifest, refused, inspection = _make(source, options, work, provenance, progress)
    seconds = time.perf_counter() - began
    return PackResult(out, manifest, False, reason, seconds, refused, inspection)


def _no_source(source: Any, out: str | Path, others: Mapping[str, Any]) -> InputError:
    """Return the error for files or samples that were handed to `pack`, or for options of `stoker pack`."""
    paths = list(source) if isinstance(source, list | tuple) else [source]
    given = f"pack was given a {type(source).__name__}"
    given += f" and {', '.join(others)}." if others else "."
    allowed = "a Source, and PackOptions; files are packed by the command `stoker pack`, Python samples by pack_from"
    if hasattr(source, "prepare"):
        return InputError(given, allowed, f"leave {next(iter(others))} out")
    if not paths or not all(isinstance(path, str | Path) for path in paths):
        return InputError(given, allowed, "stoker.pack_from(SAMPLES, OUT)")
    options = (word for name, value in others.items() for word in (f"--{name}", value))
    if not Path(paths[0]).exists():
        return InputError(given, allowed, look_for(Path(paths[0])))
    kind = "images" if Path(paths[0]).is_dir() else PACKED_BY.get(Path(paths[0]).suffix.lower())
    fix = command("stoker", "pack", kind or "arrays", *paths, out, *options)
    return InputError(given, allowed, fix)


@explained("stoker.pack_from(dataset, 'out')")
def pack_from(
    samples: Any,
    out: str | Path,
    *,
    ragged: Sequence[str] = (),
    options: PackOptions | None = None,
    progress: Progress | None = None,
) -> PackResult:
    """Make a store of Python samples.

    Samples are dicts of values, tuples of them, or single values: numbers, arrays, tensors, pictures, text. Where they
    can be asked for by number (`__len__` and `__getitem__`), worker processes build the parts, and an interrupted pack
    reuses its finished parts. Samples of an iterable are read in sequence, in this process.

    Args:
        samples: A Dataset, a list of samples, a dict or tuple of arrays, or anything that yields samples.
        out: The store's folder.
        ragged: Fields whose number of rows differs between samples. 64 samples are read to find them; name those
            that they do not show.
        options: As for `pack`. With `on_bad="quarantine"` samples that raise an error are left out and listed.
        progress: Receives the progress.

    Returns:
        As `pack` does. A store that is there is kept if the dataset pickles to the same bytes and 64 of its samples
        are the same; `PackOptions(force_recreate=True)` packs it again.

    Raises:
        InputError: Samples do not have the same fields, types or shapes.
    """
    options, progress = options or PackOptions(), progress or Silent()
    if isinstance(ragged, str):
        raise InputError(f"ragged is {ragged!r}.", "a list of names", f"ragged=[{ragged!r}]")
    with samples_source(samples, ragged) as (source, is_portable):
        if not is_portable:
            if options.cluster:
                raise InputError(
                    f"{source.name} cannot be sent to the workers of a cluster.",
                    "a dataset that can be pickled, and whose samples can be asked for by number",
                    "options=PackOptions()",
                )
            if options.jobs != 1 and source.num_samples is not None:
                progress.say(f"{source.name} cannot be pickled: it is read in this process alone")
            options = replace(options, jobs=1)
        elif not options.jobs and not options.cluster:
            seconds = source.sample_seconds * (source.num_samples or 0)
            if seconds < _WORKER_SECONDS:
                options = replace(options, jobs=1)
        return pack(source, out, options, progress)


def _why_build(out: Path, old: Manifest | None, new: Provenance, force: bool) -> str:
    if force:
        return "asked to recreate it"
    if old is None:
        is_there = (out / "store.json").exists()
        return "its manifest cannot be read" if is_there else "it does not exist yet"
    if old.provenance is None:
        return "it does not say what it was made from"
    for shard in old.shards:
        file = out / shard.file
        if not file.exists() or file.stat().st_size != shard.size_bytes:
            return f"shard {shard.file} is missing or has the wrong size"
    return difference(old.provenance, new)


def _make(
    source: Source,
    options: PackOptions,
    work: WorkFolder,
    provenance: Provenance,
    progress: Progress,
) -> tuple[Manifest, Sequence[Refusal], Inspection]:
    progress.start("reading", None, "files")
    preparation = source.prepare(work.scratch)
    for line in preparation.notes:
        progress.say(line)
    if not preparation.parts and (preparation.refused or preparation.ignored):
        _check_budget(preparation.refused, [preparation.ignored], 0, options)
    # A repair or a quarantine writes the shards once more.
    times = 2 if options.repairs or options.on_bad != "stop" else 1
    what = f"packing {work.target}"
    require_disk(work.target, times * preparation.estimated_bytes, what, StoreError)
    limit_seconds = source.row_limit_seconds
    workers: Workers | ClusterWorkers = (
        ClusterWorkers(options.cluster, options.jobs, limit_seconds, work.folder)
        if options.cluster
        else Workers(options.jobs, limit_seconds)
    )
    with contextlib.closing(workers):
        change_all = partial(change_stage, workers=workers, progress=progress)
        stage = _build(source, preparation, workers, work, progress)
        refused = [*preparation.refused, *(each for part in stage.parts for each in part.refused)]
        ignored = [preparation.ignored, *(part.ignored for part in stage.parts)]
        _check_budget(refused, ignored, stage.num_samples, options)
        fitted: dict[str, list[dict[str, Any]]] = {}
        if options.repairs:
            change, fitted = fit_stage(stage, options.repairs)
            stage, _ = change_all(stage, change, work.stage("repaired"), "repairing")
        inspection = _inspect(stage, progress)
        for attempt in range(_QUARANTINES):
            if not inspection.refused:
                break
            if options.on_bad == "stop":
                raise _gate_error(inspection)
            folder = work.stage(f"kept-{attempt}")
            stage, dropped = change_all(stage, quarantine(inspection), folder, "quarantining")
            refused.extend(dropped)
            _check_budget(refused, ignored, stage.num_samples, options)
            # Without the worst rows the medians change: inspect the remaining rows again.
            inspection = _inspect(stage, progress)
    if inspection.refused:
        raise _gate_error(inspection)
    attributes = dict(source.finish([part.extra for part in stage.parts]))
    accounts = make_accounts(
        preparation, attributes.get("accounts", []), refused, ignored, stage.num_samples
    )
    attributes["accounts"] = [asdict(account) for account in accounts]
    for repairs in fitted.values():
        if (names := fitted_among(repairs)) and "split" not in stage.parts[0].fields:
            attributes["notes"] = [*attributes.get("notes", []), f"{names}: {_FITTED_ON_ALL}"]
    manifest = Manifest(
        num_samples=stage.num_samples,
        fields=dict(stage.parts[0].fields),
        shards=[part.shard for part in stage.parts if part.shard.num_samples],
        provenance=provenance,
        attributes=attributes,
        repairs=fitted,
        quality=inspection.summary(),
        num_refused=count_refused(refused),
        counts=asdict(accounts[-1]),
    )
    listing = "".join(json_text(asdict(refusal)) + "\n" for refusal in refused)
    work.commit(stage.folder, manifest, listing)
    return manifest, refused, inspection


def _inspect(stage: Stage, progress: Progress) -> Inspection:
    with open_stage(stage) as store:
        return inspect_store(store, progress)


def _build(
    source: Source,
    preparation: Preparation,
    workers: Workers | ClusterWorkers,
    work: WorkFolder,
    progress: Progress,
) -> Stage:
    folder = work.stage("built")
    total = sum(part.num_samples for part in preparation.parts)
    progress.start("packing", total, "samples")
    done = {
        part.index: staged
        for part in preparation.parts
        if (staged := load_part(folder, part.index, work.job)) and staged.label == part.label
    }
    if done:
        progress.say(f"resuming: {len(done)} of {len(preparation.parts)} parts were already built")
    sizes = {part.index: part.num_samples for part in preparation.parts}
    progress.advance(sum(sizes[index] for index in done))
    waiting = [part for part in preparation.parts if part.index not in done]
    context = (source, folder, work.scratch, work.job)
    build: Callable[[Part, Poison], StagedPart] = partial(_build_part, *context)
    for index, staged in workers.run(build, waiting):
        done[index] = staged
        progress.advance(sizes[index])
    stage = Stage(folder, [done[index] for index in sorted(done)])
    _check_fields(stage)
    return stage


def _build_part(
    source: Source, folder: Path, scratch: Path, job: str, part: Part, poison: Poison
) -> StagedPart:
    """Build and write one part; runs in a worker process."""
    with Waiting(part.label, is_work=True):
        built = source.build(part, PartContext(scratch, current_guard(), poison))
    staged = StagedPart(
        index=part.index,
        label=part.label,
        file=part.file,
        first_row=part.first_row,
        shard=write_shard(folder / f"shard-{part.index:05d}.h5", built.fields, part.label),
        fields={name: FieldInfo.of(data) for name, data in built.fields.items()},
        refused=tuple(built.refused),
        extra=dict(built.extra),
        job=job,
        ignored=dict(built.ignored),
    )
    write_text(_sidecar(folder, part.index), staged.to_text(), always)
    return staged


def _sidecar(folder: Path, index: int) -> Path:
    return folder / f"part-{index:05d}.json"


def load_part(folder: Path, index: int, job: str) -> StagedPart | None:
    """Return a part that an earlier try of the same job has built; None when it must be built.

    Size and checksum of the shard must be those in the part's sidecar file, and the sidecar must be
    of this job. Any other file there is ignored.
    """
    try:
        staged = StagedPart.from_text(_sidecar(folder, index).read_text())
        if staged.job != job or staged.index != index:
            return None
        with open_stage(Stage(folder, [staged])) as store:
            store.shards[0].arrays  # noqa: B018  opening compares size and checksum
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return staged


def _check_fields(stage: Stage) -> None:
    if not stage.parts:
        raise InputError(
            "the source has nothing to pack.",
            "at least one file or row of the kind that is packed",
            "stoker pack --help (the kinds, and what each one reads)",
        )
    first = stage.parts[0]
    for part in stage.parts[1:]:
        if part.fields != first.fields:
            names = sorted({*first.fields, *part.fields})
            name = next(n for n in names if first.fields.get(n) != part.fields.get(n))
            raise InputError(
                f"{part.label!r} and {first.label!r} differ in field {name!r}: "
                f"{part.fields.get(name)} against {first.fields.get(name)}.",
                "the same fields, shapes and types in every input",
                "pack them into separate stores",
            )


def _check_budget(
    refused: Sequence[Refusal],
    ignored: Sequence[Mapping[str, int]],
    num_samples: int,
    options: PackOptions,
) -> None:
    num_refused = count_refused(refused)
    total = num_samples + num_refused
    wanted = Counter(refusal.fix for refusal in refused if refusal.fix)
    fixes = [fix for fix, _ in wanted.most_common(1)]
    if num_samples and num_refused <= options.allowance(total):
        return
    listed = [str(refusal) for refusal in refused[:_LISTED]]
    listed += [f"... and {num_refused - _LISTED:,} more"] if num_refused > _LISTED else []
    pieces = f"{format_count(num_refused, 'piece')} of input"
    if not num_samples:  # whatever the budget: a store without samples is useless
        left_out = [f"ignored {num:,}: {why}" for each in ignored for why, num in each.items()]
        raise QualityError(
            f"no sample is left: {pieces}, and all of it refused:"
            if num_refused
            else "the input holds no sample.",
            "at least one sample",
            "; or ".join(fixes) or "mend the input, or name other files",
            [*left_out, *listed],
        )
    share = f"{math.ceil(1000 * num_refused / total) / 10:g}%"
    if options.on_bad == "stop":
        leave_out = f"{_quarantine(share)}: leaves them out and lists them in OUT/{REFUSED_NAME}"
    else:
        leave_out = f"--bad-budget {share}, or mend the input"
    raise QualityError(
        f"{pieces} refused ({share} of {total:,}):",
        f"at most {options.allowance(total):,} (--on-bad {options.on_bad}, --bad-budget {options.bad_budget})",
        "; or ".join([*fixes, leave_out]),
        listed,
    )


def _quarantine(budget: str) -> str:
    """Return how to leave bad input out, for the command and for Python."""
    python = f"PackOptions(on_bad='quarantine', bad_budget='{budget}')"
    return f"--on-bad quarantine --bad-budget {budget} (in Python options={python})"


def _gate_error(inspection: Inspection) -> QualityError:
    remedies = sorted({finding.remedy for finding in inspection.refused if finding.remedy})[:3]
    repairs = [finding.repair for finding in inspection.refused]
    if len(repairs) > 1 and None not in repairs:
        # All at once: a remedy for each column would take as many tries as there are columns.
        fills = [repair for repair in repairs if repair and repair.startswith("fill:")]
        typed = [repair for repair in repairs if repair not in fills] + fills
        typed = [*typed[: -len(fills)], "fill:median"] if len(fills) > _LISTED else typed
        remedies = [" ".join(f"--repair {quoted(repair)}" for repair in dict.fromkeys(typed))]
    # In a table, the sum over the columns is an upper bound of the rows that they touch together.
    share = min(1.0, sum(finding.share for finding in inspection.refused))
    budget = f"{max(1.0, math.ceil(1000 * share) / 10):g}%"
    leave_out = f"{_quarantine(budget)}: leaves the bad rows out"
    return QualityError(
        "the quality gate refuses the data:",
        "finite values of usable size",
        "; or ".join([*remedies, leave_out]),
        inspection.lines(only_refused=True)[:12],
    )
