"""`stoker machine`: what this machine has and what this process may use of it.

Enters: a path whose disk matters. Leaves: a table or one JSON document on stdout. Costs about
30 ms, and up to a second more with `--measure-disk`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.address import shown
from stoker.cli.options import JsonOption, verb
from stoker.cli.terminal import known, make_console, plain_table, print_json
from stoker.display import look_for
from stoker.errors import InputError
from stoker.units import format_bytes, format_rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.machine import Gpu, Machine


@verb
def machine(
    path: Annotated[Path, typer.Argument(show_default=True)] = Path(),
    *,
    as_json: JsonOption = False,
    measure_disk: bool = False,
) -> None:
    """Show the cores, memory, disk and GPUs that this process may use.

    Options:
        path: File or folder whose disk to describe.
        measure_disk: Read from the disk for up to a second.
    """
    from stoker.machine import probe

    if not path.exists():  # the disk of another folder would be described
        raise InputError(f"{shown(path)} does not exist.", "a file or folder", look_for(path))
    found = probe(path, measure=measure_disk)
    if as_json:
        print_json(found.to_json(), indent=2)
    else:
        console = make_console(width=200)
        console.print(plain_table(_rows(found)))
        for note in found.notes:
            console.print(f"note: {note}")


def _rows(found: Machine) -> Iterator[tuple[str, str]]:
    from stoker.machine import recommended_workers

    quota = "" if found.cores_quota is None else f", cgroup quota {found.cores_quota:g}"
    yield "cores", f"{known(found.cores_usable)} usable of {known(found.cores_total)}{quota}"
    yield "cpu", known(found.cpu)
    most = found.ram_limit_bytes
    limit = "" if most is None else f", cgroup limit {format_bytes(most)}"
    available, total = format_bytes(found.ram_available_bytes), format_bytes(found.ram_total_bytes)
    yield "memory", f"{available} available of {total}{limit}"
    disk = found.disk
    speed = format_rate(disk.read_bytes_per_second, 1)
    yield "disk", f"{format_bytes(disk.free_bytes)} free of {format_bytes(disk.total_bytes)}"
    yield (
        "",
        f"{known(disk.filesystem)} on {known(disk.device)}, {disk.bandwidth_class}, read {speed}",
    )
    for gpu in found.gpus:
        yield from _gpu_rows(gpu)
    if not found.gpus:
        yield "gpu", "n/a"
    yield "driver", known(found.driver)
    yield "torch", f"{known(found.torch)}, CUDA {known(found.torch_cuda)}"
    yield "python", f"{found.python} on {found.os}"
    for who in ("gpu", "cpu"):
        choice = recommended_workers(found, who)
        yield f"workers ({who.upper()} augments)", f"{choice.value}: {choice.reason}"


def _gpu_rows(gpu: Gpu) -> Iterator[tuple[str, str]]:
    capability = ".".join(map(str, gpu.compute_capability or ("n/a",)))
    hidden = "" if gpu.visible is not False else ", hidden by CUDA_VISIBLE_DEVICES"
    free, total = format_bytes(gpu.memory_free_bytes), format_bytes(gpu.memory_total_bytes)
    yield f"gpu {gpu.index}", f"{known(gpu.name)}, compute capability {capability}{hidden}"
    yield "", f"{free} free of {total}"
    now = f"{known(gpu.pcie_generation)} x{known(gpu.pcie_width)}"
    best = f"{known(gpu.pcie_generation_max)} x{known(gpu.pcie_width_max)}"
    yield "", f"PCIe {now} (best {best}, {format_rate(gpu.pcie_bytes_per_second, 1)})"
    power = f"{known(gpu.power_watts, '.0f')} W of {known(gpu.power_limit_watts, '.0f')} W"
    yield (
        "",
        f"{power}, {known(gpu.temperature_celsius)} °C, busy {known(gpu.utilization_percent)} %",
    )
    reasons = gpu.throttle_reasons
    yield "", f"clocks held by: {'n/a' if reasons is None else ', '.join(reasons) or 'nothing'}"
