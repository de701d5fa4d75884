"""`stoker inspect FILE_OR_STORE`: what is in it, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import JsonOption, require_output
from stoker.cli.pack import (
    Decimal,
    Drop,
    Dtype,
    Encoding,
    Fields,
    Group,
    Header,
    Keep,
    Missing,
    Range,
    Rows,
    Separator,
    table_source,
)
from stoker.cli.terminal import make_console, print_json
from stoker.display import command, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.packing.samples import Samples
    from stoker.report import Progress
    from stoker.sources.contract import Source
    from stoker.sources.tables import TableSource
    from stoker.store.fields import ShardData
    from stoker.store.inspection import Inspection
    from stoker.store.plain import Selection

_ARRAYS = {".npy", ".npz"}
_LISTED = 20


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="Store folder, its URL, .h5, .npy, .npz; a table, pictures, a spectrum library; or a folder of them.",
            show_default=False,
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            help="Write a page: samples as the model gets them, a histogram per column.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Target column of a table, to look for leaks.")
    ] = None,
    fields: Fields = None,
    group: Group = None,
    rows: Rows = None,
    drop: Drop = None,
    keep: Keep = None,
    dtype: Dtype = None,
    missing: Missing = "stop",
    sep: Separator = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    header: Header = None,
    masks: Annotated[
        Path | None,
        typer.Option(
            "--masks", help="Folder of masks, beside a folder of images.", show_default=False
        ),
    ] = None,
    mask_suffix: Annotated[
        str, typer.Option("--mask-suffix", help="As in `stoker pack segmentation`.")
    ] = "",
    mask_map: Annotated[
        list[str] | None,
        typer.Option(
            "--mask-map", help="As in `stoker pack segmentation`; repeatable.", show_default=False
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            "--labels", help="CSV of names and labels, beside pictures.", show_default=False
        ),
    ] = None,
    size: Annotated[
        str, typer.Option("--size", help="HEIGHTxWIDTH that pictures are looked at.")
    ] = "224x224",
    value_range: Range = None,
    mol_dir: Annotated[
        Path | None,
        typer.Option("--mol-dir", help="Structures of a spectrum library.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every value of a file or store; exit code 3 if the quality gate would refuse the data."""
    from stoker.address import shown
    from stoker.cli.progress import Bar
    from stoker.errors import EXIT_REFUSED
    from stoker.store.plain import Selection

    chosen = Selection(group, tuple(fields.split(",")) if fields else (), rows)
    require_output(html, "--html", [path])
    name = shown(path)
    source = table_source(
        (path,), target, drop, keep, dtype, missing, sep, decimal, encoding, header
    )
    raw = _raw_source(path, masks, mask_suffix, mask_map, labels, size, value_range, mol_dir)
    with Bar(quiet=as_json) as bar:
        if raw is not None:
            inspection, facts, samples = _look_at_source(raw, bar)
        else:
            inspection, facts, samples = _look(path, source, chosen, bar)
    if samples is not None:
        from stoker.packing.samples import sample_facts

        facts |= sample_facts(samples)
    if html is not None:
        from stoker.ownership import write_text
        from stoker.packing.samples import samples_section
        from stoker.store.quality_page import quality_page

        drawn = None if samples is None else samples_section(samples)
        title = f"stoker inspect {name}"
        page = quality_page(title, inspection.stats, inspection.findings, facts, drawn)
        write_text(html, page)
    if as_json:
        stats = {name: stats.to_json(compact=True) for name, stats in inspection.stats.items()}
        findings = [finding.to_json() for finding in inspection.findings]
        refused = bool(inspection.refused)
        print_json(
            {
                "path": name,
                "refused": refused,
                "findings": findings,
                "stats": stats,
                "facts": facts,
            }
        )
    else:
        _print(name, inspection, facts, html)
    if inspection.refused:
        raise typer.Exit(EXIT_REFUSED)


def _raw_source(
    path: Path,
    masks: Path | None,
    mask_suffix: str,
    mask_map: list[str] | None,
    labels: Path | None,
    size: str,
    value_range: str | None,
    mol_dir: Path | None,
) -> Source | None:
    """Return the source of pictures or spectra that lie at the path; None for anything else."""
    from stoker.sources.images import (
        ImagesSource,
        SegmentationSource,
        find_pairs,
        holds_pictures,
        parse_range,
        parse_size,
    )
    from stoker.sources.massspec import MassSpecSource, holds_spectra
    from stoker.store.manifest import MANIFEST_NAME

    if not path.exists() or (path / MANIFEST_NAME).exists():
        return None
    limits = parse_range(value_range)
    images, found_masks = find_pairs(path) if masks is None else (path, masks)
    if found_masks is not None and labels is None:
        return SegmentationSource(
            parse_size(size),
            3,
            images,
            found_masks,
            mask_suffix,
            mask_map=tuple(mask_map or ()),
            value_range=limits,
        )
    if labels is not None or holds_pictures(path):
        return ImagesSource(parse_size(size), 3, path, labels, value_range=limits)
    if holds_spectra(path):
        return MassSpecSource(path, mol_dir, spectra="all", without_spectra=True)
    return None


def _look_at_source(
    source: Source, bar: Progress
) -> tuple[Inspection, dict[str, str], Samples | None]:
    """Build all parts of a source in memory, one after the other, as `pack` would."""
    from dataclasses import replace

    from stoker.errors import RefusalList
    from stoker.ownership import temporary_folder
    from stoker.packing.samples import Samples
    from stoker.packing.worker import unguarded
    from stoker.sources.contract import PartContext, make_accounts
    from stoker.sources.massspec import MassSpecSource
    from stoker.store.inspection import inspect_parts

    refused = RefusalList()
    samples = Samples()
    extras, ignored = [], []
    with temporary_folder("stoker-inspect-") as scratch:
        preparation = source.prepare(scratch)
        is_empty = not any(part.num_samples for part in preparation.parts)
        if isinstance(source, MassSpecSource) and is_empty:
            source = replace(source, structures="none")
            preparation = source.prepare(scratch)

        def parts() -> Iterator[ShardData]:
            bar.start("inspecting", sum(part.num_samples for part in preparation.parts), "samples")
            for part in preparation.parts:
                built = source.build(part, PartContext(scratch, unguarded, {}))
                refused.extend(built.refused)
                extras.append(built.extra)
                ignored.append(built.ignored)
                samples.take(built.fields)
                yield built.fields
                bar.advance(part.num_samples)

        inspection = inspect_parts(parts())
    everything = [*preparation.refused, *refused]
    samples.attributes = source.finish(extras) if extras else {}
    own = samples.attributes.get("accounts", [])
    accounts = make_accounts(
        preparation, own, everything, [preparation.ignored, *ignored], samples.num_samples
    )
    lines = [line for account in accounts for line in account.lines()]
    facts = {"input": "; ".join(line.strip() for line in lines)}
    notes = [*preparation.notes, *(samples.attributes.get("notes") or ())]
    facts |= {f"note {number}": note for number, note in enumerate(notes, 1)}
    facts |= {f"refused {n}": str(refusal) for n, refusal in enumerate(everything[:_LISTED], 1)}
    return inspection, facts, samples


def _look(
    path: Path, source: TableSource, chosen: Selection, bar: Progress
) -> tuple[Inspection, dict[str, str], Samples | None]:
    """Inspect a store in place, or a raw file part by part as `pack` would read it."""
    from stoker.errors import InputError
    from stoker.sources.tables.reading import is_table
    from stoker.store.manifest import MANIFEST_NAME
    from stoker.store.plain import Selection
    from stoker.units import format_bytes, format_count

    is_array = bool({suffix.lower() for suffix in path.suffixes} & _ARRAYS)
    is_file = path.is_file() and (is_array or is_table(path))
    is_folder = path.is_dir() and not (path / MANIFEST_NAME).exists()
    if is_file or (is_folder and any(map(is_table, path.rglob("*")))):
        if not is_array and chosen != Selection():
            raise InputError(
                f"--fields, --group or --rows with the table {path}.",
                "these options with an HDF5 or .npz file",
                command("stoker", "inspect", path),
            )
        return _look_at_file(path, source, chosen, not is_array, bar)
    from stoker.address import as_url
    from stoker.packing.samples import samples_of
    from stoker.sources.contract import Account
    from stoker.store.inspection import inspect_store
    from stoker.store.reader import open_store

    with open_store(path, **vars(chosen)) as store:
        inspection = inspect_store(store, bar)
        facts = {
            "samples": format_count(store.num_samples),
            "fields": ", ".join(f"{name} ({info.kind})" for name, info in store.fields.items()),
            "on disk": format_bytes(store.num_bytes),
        }
        if store.manifest.counts:
            lines = Account.from_json(store.manifest.counts).lines()
            facts["input"] = "; ".join(line.strip() for line in lines)
        notes = [*store.notes, *(store.manifest.attributes.get("notes") or ())]
        for number, note in enumerate(notes):
            facts[f"note {number + 1}"] = str(note)
        samples = None if as_url(path) else samples_of(store)
        for array in {
            name: array for shard in store.shards[:1] for name, array in shard.arrays.items()
        }.values():
            if array.location.reason:
                facts[f"slow: {array.location.dataset}"] = (
                    f"read through h5py: {array.location.reason}"
                )
    return inspection, facts, samples


def _look_at_file(
    path: Path, source: TableSource, chosen: Selection, is_table: bool, bar: Progress
) -> tuple[Inspection, dict[str, str], Samples | None]:
    from stoker.errors import RefusalList, count_refused
    from stoker.ownership import temporary_folder
    from stoker.packing.samples import Samples
    from stoker.packing.worker import unguarded
    from stoker.sources.arrays import ArraysSource
    from stoker.sources.contract import PartContext
    from stoker.store.inspection import inspect_parts
    from stoker.units import format_bytes, format_count

    refused = RefusalList()
    samples = Samples()
    total = 0
    notes: list[str] = []

    def array_parts(scratch: Path) -> Iterator[ShardData]:
        nonlocal total
        bar.start("inspecting", None, "rows")
        for num_rows, fields in ArraysSource((path,), chosen=chosen).blocks(scratch):
            samples.take(fields)
            yield fields
            total += num_rows
            bar.advance(num_rows)

    def table_parts(scratch: Path) -> Iterator[ShardData]:
        nonlocal total
        context = PartContext(scratch, unguarded, {})
        preparation = source.prepare(scratch)
        total = sum(part.num_samples for part in preparation.parts)
        notes.extend(preparation.notes)
        bar.start("inspecting", total, "rows")
        refused.extend(preparation.refused)
        for part in preparation.parts:
            built = source.build(part, context)
            refused.extend(built.refused)
            samples.take(built.fields)
            yield built.fields
            bar.advance(part.num_samples)

    with temporary_folder("stoker-inspect-") as scratch:
        inspection = inspect_parts((table_parts if is_table else array_parts)(scratch))
    files = source.files() if is_table else [path]
    size = sum(file.stat().st_size for file in files)
    facts = {"rows": format_count(total), "on disk": format_bytes(size)}
    facts |= {"files": format_count(len(files))} if len(files) > 1 else {}
    facts |= {f"note {number}": note for number, note in enumerate(notes, 1)}
    for number, refusal in enumerate(refused[:20]):
        facts[f"refused {number + 1} of {count_refused(refused)}"] = str(refusal)
    return inspection, facts, samples


def _print(name: str, inspection: Inspection, facts: dict[str, str], html: Path | None) -> None:
    console = make_console(soft_wrap=True)
    console.print(name, style="bold")
    for what, value in facts.items():
        console.print(f"  {what}: {printable(value)}")
    styles = {"refuse": "bold red", "warn": "yellow", "note": "dim"}
    shown = inspection.findings[:40]
    for finding in shown:
        console.print(str(finding), style=styles[finding.severity])
    if len(inspection.findings) > len(shown):
        console.print(
            f"... and {len(inspection.findings) - len(shown)} more; --json or --html shows all"
        )
    if not inspection.findings:
        console.print("nothing wrong: every value is finite and of usable size")
    if html is not None:
        console.print(f"page written to {html}")
