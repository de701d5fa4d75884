"""`stoker bench memory`: what a library of mass spectra takes in RAM, measured and projected.

Enters: the library. Leaves: the documented lines, or one JSON document. Costs about 20 s. Not listed in
`stoker --help`: docs/memory.md describes it. The work is `compat/massspec_memory.py`.
"""

from __future__ import annotations

from pathlib import Path

import typer

from stoker.cli.options import JsonOption, verb
from stoker.cli.renamed import PASS_ON, bench_augment
from stoker.cli.terminal import Bar, echo, print_json
from stoker.errors import InputError
from stoker.units import GB

app = typer.Typer(no_args_is_help=True, help="Measure what data takes on this machine.")
app.command("augment", hidden=True, context_settings=PASS_ON)(bench_augment)


@app.command()
@verb
def memory(
    *,
    msp: Path | None = None,
    mol_dir: Path | None = None,
    mode: str = "all",
    ram_gb: float = 32.0,
    samples: int = 1000,
    as_json: JsonOption = False,
) -> None:
    """Measure what mass spectra take in RAM, lazy and precomputed, and project it to 300,000.

    Options:
        msp: The library, .msp or gzipped.
        mol_dir: A folder of MOL files, a zip of them, or one SDF; without it the library's SMILES.
        mode: estimate, lazy, precomputed or all.
        ram_gb: RAM of the machine in question, in GB (10^9 bytes).
        samples: Samples to measure with, the library's first.
    """
    if msp is None and mode != "estimate":
        raise InputError(
            "there is no library to measure with.",
            "an MSP file, and its structures; --mode estimate needs none",
            "stoker bench memory --msp LIBRARY.msp --mol-dir MOLS",
        )
    if not 0 < ram_gb < 1e6:
        raise InputError(f"--ram-gb is {ram_gb:g}.", "more than 0, in GB", "--ram-gb 32")
    from stoker.compat.massspec_memory import bench_memory, estimate_memory, report_lines

    ram_bytes = int(ram_gb * GB)
    if msp is None:
        report = estimate_memory(ram_bytes)
    else:
        with Bar(quiet=as_json) as bar:
            report = bench_memory(
                msp, mol_dir, mode=mode, ram_bytes=ram_bytes, num_samples=samples, say=bar.say
            )
    if as_json:
        print_json(report.to_json())
    else:
        for line in report_lines(report, mode):
            echo(line)
