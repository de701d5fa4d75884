"""`stoker bench augment` and `stoker bench memory`: what things cost on this machine, measured.

Augment: ours, the peers' and the limit. Enters: a batch, an image size, a device. Leaves: one table per
piece of work, a page with bars, or one JSON document. Costs about half a minute on a GPU, some minutes on a
CPU at 32 x 512 x 512.

Memory: what a library of mass spectra takes in RAM. Enters: the library. Leaves: the documented
lines, or one JSON document. Costs about 20 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.terminal import echo, make_console, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from rich.console import Console

    from stoker.augment.bench import Comparison
    from stoker.augment.peers import Work

app = typer.Typer(no_args_is_help=True, help="Measure on this machine, with peers and limits.")
TYPES = ("uint8", "float32", "float16", "bfloat16")


@app.callback()
def _bench() -> None:
    pass


@app.command()
def augment(
    batch: Annotated[int, typer.Option("--batch", help="Images per batch.")] = 32,
    size: Annotated[str, typer.Option("--size", help="HEIGHTxWIDTH of the images.")] = "512x512",
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", help="Measurements of every row; 7, and 3 on a CPU.", show_default=False),
    ] = None,
    workers: Annotated[
        str, typer.Option("--workers", help="DataLoader workers to compare with, or none.")
    ] = "4,8,16",
    device: Annotated[
        str | None,
        typer.Option("--device", help="cuda or cpu; by default the GPU, if any.", show_default=False),
    ] = None,
    given: Annotated[
        str, typer.Option("--input", help="Type of the images: uint8, float32, float16, bfloat16.")
    ] = "float32",
    wanted: Annotated[
        str, typer.Option("--output", help="Type a model would get: float32, float16, bfloat16.")
    ] = "float32",
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with bars.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
) -> None:  # fmt: skip
    """Compare CPU workers, Kornia, torchvision, DALI, stoker and the copy limit."""
    from stoker.augment.bench import cases, check_repeats, compare
    from stoker.cli.outputs import require_output
    from stoker.cli.progress import Bar

    if repeats is not None:
        check_repeats(repeats)
    counts = _parse_workers(workers)
    require_output(html, "--html")
    work = _work(batch, size, device, given, wanted)
    times = repeats or (7 if work.device.type == "cuda" else 3)
    facts = _facts(work, times)
    if not as_json:
        _print_header(facts)
    comparisons = []
    for title, each in cases(work):
        with Bar(quiet=as_json) as bar:
            done = compare(title, each, workers=counts, repeats=times, progress=bar)
        comparisons.append(done)
        if not as_json:
            _print_table(done)
    if html is not None:
        from stoker.augment.bench_page import bench_page
        from stoker.ownership import write_text

        write_text(html, bench_page("stoker bench augment", comparisons, facts))
    if as_json:
        made = [comparison.to_json() for comparison in comparisons]
        print_json({"facts": facts, "cases": made})
    else:
        _print_verdict(comparisons, html)


@app.command()
def memory(
    msp: Annotated[
        Path | None,
        typer.Option("--msp", help="The library, .msp or gzipped.", show_default=False),
    ] = None,
    mol_dir: Annotated[
        Path | None,
        typer.Option(
            "--mol-dir",
            help="A folder of MOL files, a zip of them, or one SDF; without it the library's SMILES.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", help="estimate, lazy, precomputed or all.")
    ] = "all",
    ram_gb: Annotated[
        float, typer.Option("--ram-gb", help="RAM of the machine in question, in GB (10^9 bytes).")
    ] = 32.0,
    samples: Annotated[
        int, typer.Option("--samples", help="Samples to measure with, the library's first.")
    ] = 1000,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
) -> None:  # fmt: skip
    """Measure what mass spectra take in RAM, lazy and precomputed, and project it to 300,000."""
    from stoker.cli.progress import Bar
    from stoker.errors import InputError
    from stoker.units import GB

    if msp is None:
        raise InputError(
            "there is no library to measure with.",
            "an MSP file, and its structures",
            "stoker bench memory --msp LIBRARY.msp --mol-dir MOLS",
        )
    if not 0 < ram_gb < 1e6:
        raise InputError(f"--ram-gb is {ram_gb:g}.", "more than 0, in GB", "--ram-gb 32")
    from stoker.compat.massspec_memory import bench_memory, report_lines

    with Bar(quiet=as_json) as bar:
        report = bench_memory(
            msp, mol_dir, mode=mode, ram_bytes=int(ram_gb * GB), num_samples=samples, say=bar.say
        )
    if as_json:
        print_json(report.to_json())
    else:
        for line in report_lines(report, mode):
            echo(line)


def _work(batch: int, size: str, device: str | None, given: str, wanted: str) -> Work:
    import torch

    from stoker.augment.peers import Work
    from stoker.errors import InputError
    from stoker.sources.images import parse_size

    if not 1 <= batch <= 65535:
        raise InputError(f"--batch is {batch}.", "1 to 65,535", "--batch 32")
    height, width = parse_size(size)
    if not (2 <= height <= 16384 and 2 <= width <= 16384):
        raise InputError(f"--size is {size}.", "2 to 16,384 pixels a side", "--size 512x512")
    for option, value, allowed in (("--input", given, TYPES), ("--output", wanted, TYPES[1:])):
        if value not in allowed:
            raise InputError(f"{option} is {value!r}.", ", ".join(allowed), f"{option} float32")
    return Work(
        batch,
        (height, width),
        _device(device),
        input_dtype=getattr(torch, given),
        output_dtype=getattr(torch, wanted),
    )


def _device(asked: str | None) -> torch.device:
    import torch

    from stoker.errors import InputError

    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = asked.partition(":")
    if kind not in ("cuda", "cpu") or (number and not number.isdigit()):
        raise InputError(
            f"--device is {asked!r}.", "cuda, cuda:0, cuda:1, ... or cpu", "--device cpu"
        )
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise InputError(
            f"--device is {asked}, and torch sees {there} CUDA device{'' if there == 1 else 's'}.",
            "a device that torch can use",
            "stoker machine, or --device cpu",
        )
    return torch.device(asked)


def _parse_workers(text: str) -> list[int]:
    from stoker.errors import InputError

    if text.strip().lower() in ("none", "0", ""):
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= 256 for part in parts):
        raise InputError(
            f"--workers is {text!r}.",
            "numbers from 1 to 256, with commas; or none",
            "--workers 4,8,16",
        )
    return [int(part) for part in parts]


def _facts(work: Work, repeats: int) -> dict[str, str]:
    import torch

    from stoker.augment.bench import dtype_name
    from stoker.machine import probe

    machine = probe()
    if work.device.type == "cuda":
        device = torch.cuda.get_device_name(work.device)
    else:
        device = f"the CPU, no GPU; torch uses {torch.get_num_threads()} threads"
    return {
        "Batch size": str(work.batch),
        "Image size": f"{work.size[0]}x{work.size[1]}",
        "Device": device,
        "Cores": str(machine.cores_usable or "n/a"),
        "Types": f"{dtype_name(work.input_dtype)} in, {dtype_name(work.output_dtype)} out, int64 masks",
        "Versions": f"torch {torch.__version__}, python {machine.python}",
        "Repeats": str(repeats),
    }


def _console() -> Console:

    return make_console(width=140)


def _print_header(facts: Mapping[str, str]) -> None:
    console = _console()
    console.print("GPU Augmentation Benchmark:")
    for name, value in facts.items():
        console.print(f"  {name}: {value}", soft_wrap=True)


def _print_table(comparison: Comparison) -> None:
    from rich.table import Table

    from stoker.augment.bench_page import cells

    table = Table(title=comparison.title, title_justify="left")
    table.add_column("way")
    for name in ("ms per batch", "spread", "images/s", "x Kornia", "x limit"):
        table.add_column(name, justify="right")
    table.add_column("remark", overflow="fold")
    for row in comparison.rows:
        style = {"ours": "bold", "limit": "dim"}.get(row.kind)
        table.add_row(row.name, *cells(comparison, row), row.reason, style=style)
    _console().print(table)


def _print_verdict(comparisons: list[Comparison], html: Path | None) -> None:
    from stoker.augment.bench_page import verdict

    console = _console()
    console.print(verdict(comparisons), soft_wrap=True)
    console.print("x Kornia: how many times as fast; x limit: how many times the limit's time.")
    if html is not None:
        console.print(f"page written to {html}", soft_wrap=True)
