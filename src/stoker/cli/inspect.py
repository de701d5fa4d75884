"""`stoker inspect FILE_OR_STORE`: what is in it, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.pack import (
    Decimal,
    Drop,
    Dtype,
    Encoding,
    Header,
    Keep,
    Missing,
    Separator,
    table_source,
)
from stoker.cli.terminal import make_console, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.report import Progress
    from stoker.sources.tables import TableSource
    from stoker.store.fields import ShardData
    from stoker.store.inspection import Inspection

_ARRAYS = {".npy", ".npz"}


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="Store folder, its URL, .h5, .npy, .npz; a table or a folder of tables.",
            show_default=False,
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write a page with a histogram per column.", show_default=False
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Target column of a table, to look for leaks.")
    ] = None,
    drop: Drop = None,
    keep: Keep = None,
    dtype: Dtype = None,
    missing: Missing = "stop",
    sep: Separator = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    header: Header = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
) -> None:
    """Check every value of a file or store; exit code 3 if the quality gate would refuse the data."""
    from stoker.address import shown
    from stoker.cli.outputs import require_output
    from stoker.cli.progress import Bar
    from stoker.errors import EXIT_REFUSED

    require_output(html, "--html", [path])
    name = shown(path)
    source = table_source(
        (path,), target, drop, keep, dtype, missing, sep, decimal, encoding, header
    )
    with Bar(quiet=as_json) as bar:
        inspection, facts = _look(path, source, bar)
    if html is not None:
        from stoker.ownership import write_text
        from stoker.store.quality_page import quality_page

        page = quality_page(f"stoker inspect {name}", inspection.stats, inspection.findings, facts)
        write_text(html, page)
    if as_json:
        stats = {name: stats.to_json(compact=True) for name, stats in inspection.stats.items()}
        findings = [finding.to_json() for finding in inspection.findings]
        refused = bool(inspection.refused)
        print_json({"path": name, "refused": refused, "findings": findings, "stats": stats})
    else:
        _print(name, inspection, facts, html)
    if inspection.refused:
        raise typer.Exit(EXIT_REFUSED)


def _look(path: Path, source: TableSource, bar: Progress) -> tuple[Inspection, dict[str, str]]:
    """Inspect a store in place, or a raw file part by part as `pack` would read it."""
    from stoker.sources.tables.reading import is_table
    from stoker.store.manifest import MANIFEST_NAME
    from stoker.units import format_bytes, format_count

    is_array = {suffix.lower() for suffix in path.suffixes} & _ARRAYS
    if path.is_file() and (is_array or is_table(path)):
        return _look_at_file(path, source, not is_array, bar)
    if (
        path.is_dir()
        and not (path / MANIFEST_NAME).exists()
        and any(map(is_table, path.rglob("*")))
    ):
        return _look_at_file(path, source, True, bar)
    from stoker.store.inspection import inspect_store
    from stoker.store.reader import open_store

    with open_store(path) as store:
        inspection = inspect_store(store, bar)
        facts = {
            "samples": format_count(store.num_samples),
            "fields": ", ".join(f"{name} ({info.kind})" for name, info in store.fields.items()),
            "on disk": format_bytes(store.num_bytes),
        }
        for number, note in enumerate(store.notes):
            facts[f"note {number + 1}"] = note
        for array in {
            name: array for shard in store.shards[:1] for name, array in shard.arrays.items()
        }.values():
            if array.location.reason:
                facts[f"slow: {array.location.dataset}"] = (
                    f"read through h5py: {array.location.reason}"
                )
    return inspection, facts


def _look_at_file(
    path: Path, source: TableSource, is_table: bool, bar: Progress
) -> tuple[Inspection, dict[str, str]]:
    from stoker.errors import RefusalList, count_refused
    from stoker.ownership import temporary_folder
    from stoker.packing.worker import unguarded
    from stoker.sources.arrays import ArraysSource
    from stoker.sources.contract import PartContext
    from stoker.store.inspection import inspect_parts
    from stoker.units import format_bytes, format_count

    refused = RefusalList()
    total, notes = 0, []

    def array_parts(scratch: Path) -> Iterator[ShardData]:
        nonlocal total
        bar.start("inspecting", None, "rows")
        for num_rows, fields in ArraysSource((path,)).blocks(scratch):
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
    return inspection, facts


def _print(name: str, inspection: Inspection, facts: dict[str, str], html: Path | None) -> None:

    console = make_console(soft_wrap=True)
    console.print(name, style="bold")
    for what, value in facts.items():
        console.print(f"  {what}: {value}")
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
