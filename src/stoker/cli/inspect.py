"""`stoker inspect FILE_OR_STORE`: what is in it, and what is wrong with it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.address import as_url, shown
from stoker.cli.data_options import (
    BarReading,
    Chosen,
    Labels,
    Masks,
    Range,
    Stride,
    Table,
    Text,
    refuse_given,
    split_names,
)
from stoker.cli.options import JsonOption, require_output, require_page, verb
from stoker.cli.terminal import Bar, make_console, print_json
from stoker.display import command, printable
from stoker.errors import EXIT_REFUSED, InputError, RefusalList
from stoker.ownership import temporary_folder, write_text
from stoker.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.packing.samples import Samples
    from stoker.report import Progress
    from stoker.sources.contract import Source
    from stoker.store.fields import ShardData
    from stoker.store.inspection import Inspection
    from stoker.store.plain import Selection

_ARRAYS = {".npy", ".npz"}
_LISTED = 20


@verb
def inspect(
    path: Path,
    *,
    html: Path | None = None,
    kind: Annotated[str | None, typer.Option("--as")] = None,
    arrays: Chosen,
    table: Table,
    text: Text,
    masks: Path | None = None,
    how: Masks,
    labels: Labels,
    size: str = "224x224",
    value_range: Range = None,
    mol_dir: Path | None = None,
    windows: str | None = None,
    horizon: int | None = None,
    reading: BarReading,
    window: int | None = None,
    stride: Stride = None,
    dtype: list[str] | None = None,
    columns: str | None = None,
    time_column: str | None = None,
    as_json: JsonOption = False,
) -> None:
    """Check every value of a file or store; exit code 3 if the quality gate would refuse the data.

    Options:
        path: Store folder, its URL, .h5, .npy, .npz; a table, bars (also SYMBOL:TF=file), pictures, a spectrum
            library; or a folder of them.
        html: Write a page: samples as the model gets them, a histogram per column.
        kind: Read CSV, Parquet or Feather as table or as bars [default: bars if name and columns say so].
        masks: Folder of masks, beside a folder of images.
        size: HEIGHTxWIDTH that pictures are looked at.
        mol_dir: Structures of a spectrum library.
        windows: As in `stoker pack bars` [default: what fits].
        horizon: As in `stoker pack bars` [default: what fits].
        window: As in `stoker pack series`.
    """
    from stoker.sources.bars.files import holds_bars
    from stoker.store.manifest import run_error

    if kind not in (None, "table", "bars"):
        raise InputError(f"--as is {kind!r}.", "table or bars", "--as table")
    chosen = arrays.selection()
    require_page(html, "--html")
    require_output(html, "--html", [path])
    # First of all, so that a run's folder is refused: its plots and predictions would be taken for data.
    if (error := run_error(path)) is not None:
        raise error
    name = shown(path)
    source: Source | None
    if window is not None:
        from stoker.sources.series import SeriesSource

        numbers = dtype[0] if dtype else None
        source = SeriesSource((path,), window, stride, numbers, split_names(columns), time_column)
    else:
        source = _picture_or_spectrum_source(path, masks, how, labels, size, value_range, mol_dir)
    if source is None and (kind == "bars" or (kind is None and holds_bars(path))):
        source = _bars_source(path, windows, horizon, reading)
    if source is None:
        source = _array_or_table_source(path, table.source((path,), text), chosen)
    with Bar(quiet=as_json) as bar:
        if source is None:
            refuse_given(table, path)
            refuse_given(text, path)
            inspection, facts, samples = _look_at_store(path, chosen, bar)
        else:
            inspection, facts, samples = _look_at_source(source, bar)
    if html is not None:
        from stoker.packing.samples import samples_page

        title = f"stoker inspect {name}"
        write_text(html, samples_page(title, inspection, facts, samples))
    if as_json:
        stats = {name: stats.to_json() for name, stats in inspection.stats.items()}
        findings = [finding.to_json() for finding in inspection.findings]
        about = {"path": name, "refused": bool(inspection.refused), "findings": findings}
        print_json({**about, "stats": stats, "facts": facts})
    else:
        _print(name, inspection, facts, html)
    if inspection.refused:
        raise typer.Exit(EXIT_REFUSED)


# -- what lies there -----------------------------------------------------------------------------


def _picture_or_spectrum_source(
    path: Path,
    masks: Path | None,
    how: Masks,
    labels: Labels,
    size: str,
    value_range: str | None,
    mol_dir: Path | None,
) -> Source | None:
    """Return the source of pictures or spectra at the path; None for anything else."""
    from stoker.sources import images as pictures
    from stoker.sources.massspec import MassSpecSource, holds_spectra
    from stoker.store.manifest import MANIFEST_NAME

    if not path.exists() or (path / MANIFEST_NAME).exists():
        return None
    wanted, limits = pictures.parse_size(size), pictures.parse_range(value_range)
    images, found = pictures.find_pairs(path) if masks is None else (path, masks)
    if found is not None and labels.labels is None:
        return pictures.SegmentationSource(
            wanted, images=images, masks=found, value_range=limits, **how.settings()
        )
    if labels.labels is not None or pictures.holds_pictures(path):
        return pictures.ImagesSource(wanted, folder=path, value_range=limits, **vars(labels))
    if holds_spectra(path):
        return MassSpecSource(path, mol_dir, spectra="all", without_spectra=True)
    return None


def _bars_source(
    path: Path, windows: str | None, horizon: int | None, reading: BarReading
) -> Source:
    from stoker.sources.bars import BarsSource, parse_windows
    from stoker.sources.bars.files import fitting_windows

    settings = reading.settings()
    chosen, fitting = fitting_windows((path,), settings["naming"], reading.decimal)
    return BarsSource(
        (path,),
        windows=parse_windows(windows) if windows else chosen,
        horizon=fitting if horizon is None else horizon,
        **settings,
    )


def _array_or_table_source(path: Path, table: Source, chosen: Selection) -> Source | None:
    """Return the source of arrays or of a table; None for a store or a file that is opened in place."""
    from stoker.sources.arrays import ArraysSource
    from stoker.sources.tables.reading import is_table
    from stoker.store.manifest import MANIFEST_NAME
    from stoker.store.plain import Selection

    if not path.exists() and re.search(r"[*?\[]", path.name):  # a pattern, as `pack table` takes it
        return table
    is_array = bool({suffix.lower() for suffix in path.suffixes} & _ARRAYS)
    is_file = path.is_file() and (is_array or is_table(path))
    is_folder = path.is_dir() and not (path / MANIFEST_NAME).exists()
    if not is_file and not (is_folder and any(map(is_table, path.rglob("*")))):
        return None
    if is_array:
        return ArraysSource((path,), chosen=chosen)
    if chosen != Selection():
        raise InputError(
            f"--fields, --group or --rows with the table {path}.",
            "these options with an HDF5 or .npz file",
            command("stoker", "inspect", path),
        )
    return table


# -- looking -------------------------------------------------------------------------------------


def _look_at_source(source: Source, bar: Progress) -> tuple[Inspection, dict[str, str], Samples]:
    """Build all parts of a source in memory, one after the other, as `pack` would."""
    from stoker.packing.samples import Samples, sample_facts
    from stoker.packing.workers import unguarded
    from stoker.sources.arrays import ArraysSource
    from stoker.sources.bars.files import bars_hint
    from stoker.sources.contract import PartContext, Preparation, make_accounts
    from stoker.sources.massspec import MassSpecSource
    from stoker.sources.tables import TableSource
    from stoker.store.inspection import inspect_parts

    refused = RefusalList()
    samples = Samples()
    extras, ignored = [], []
    with temporary_folder("stoker-inspect-") as scratch:
        if isinstance(source, ArraysSource):
            preparation = Preparation([], 0, unit="rows")
        else:
            preparation = source.prepare(scratch)
        is_empty = not any(part.num_samples for part in preparation.parts)
        if isinstance(source, MassSpecSource) and is_empty:
            source = replace(source, structures="none")
            preparation = source.prepare(scratch)

        def parts() -> Iterator[ShardData]:
            total = sum(part.num_samples for part in preparation.parts)
            bar.start("inspecting", total or None, preparation.unit)
            if isinstance(source, ArraysSource):  # as a stream: an .npz is not unpacked for a look
                for num_rows, fields in source.blocks(scratch):
                    samples.take(fields)
                    yield fields
                    bar.advance(num_rows)
            for part in preparation.parts:
                built = source.build(part, PartContext(scratch, unguarded, {}))
                refused.extend(built.refused)
                extras.append(built.extra)
                ignored.append(built.ignored)
                samples.take(built.fields, part.label)
                yield built.fields
                bar.advance(part.num_samples)

        inspection = inspect_parts(parts())
    everything = [*preparation.refused, *refused]
    samples.attributes = source.finish(extras) if extras else {}
    accounts = make_accounts(
        preparation,
        samples.attributes.get("accounts", []),
        everything,
        [preparation.ignored, *ignored],
        samples.num_samples,
    )
    lines = [line.strip() for account in accounts for line in account.lines()]
    files = [file for file in source.files() if file.is_file()]
    unit = "rows" if preparation.unit == "rows" else "samples"
    facts = {unit: format_count(samples.num_samples)}
    if files:
        facts["on disk"] = format_bytes(sum(file.stat().st_size for file in files))
    facts |= {"files": format_count(len(files))} if len(files) > 1 else {}
    facts |= {"input": "; ".join(lines)} if extras else {}
    facts |= sample_facts(samples)
    notes = [*preparation.notes, *(samples.attributes.get("notes") or ())]
    if isinstance(source, TableSource) and (hint := bars_hint(files)):
        notes.append(hint)
    facts |= {f"note {number}": note for number, note in enumerate(notes, 1)}
    for is_asked, word in ((False, "refused"), (True, "ignored")):
        those = [refusal for refusal in everything if refusal.is_asked == is_asked]
        total = sum(refusal.count for refusal in those)
        for number, refusal in enumerate(those[:_LISTED], 1):
            facts[f"{word} {number} of {total}"] = str(refusal)
    return inspection, facts, samples


def _look_at_store(
    path: Path, chosen: Selection, bar: Progress
) -> tuple[Inspection, dict[str, str], Samples | None]:
    """Inspect a store, an HDF5 file or a Zarr folder in place."""
    from stoker.packing.samples import sample_facts, samples_of
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
            lines = Account(**store.manifest.counts).lines()
            facts["input"] = "; ".join(line.strip() for line in lines)
        notes = [*store.notes, *(store.manifest.attributes.get("notes") or ())]
        for number, note in enumerate(notes):
            facts[f"note {number + 1}"] = str(note)
        samples = None if as_url(path) else samples_of(store)
        if samples is not None:
            facts |= sample_facts(samples)
        for place in (
            array.location for shard in store.shards[:1] for array in shard.arrays.values()
        ):
            if place.reason:
                facts[f"slow: {place.dataset}"] = f"read through h5py: {place.reason}"
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
