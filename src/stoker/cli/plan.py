"""`stoker plan [STORE]`: what would live where, and why; nothing is loaded.

Enters: a store and amounts of memory; those not given are read from the machine. Leaves: a
table with bytes and reasons, or one JSON document. Costs about 0.2 s; loads no data and no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.address import as_url, shown
from stoker.cli.options import JsonOption, verb
from stoker.cli.terminal import make_console, make_table, print_json
from stoker.errors import InputError
from stoker.units import GIB, format_bytes, parse_bytes, parse_memory, parse_share

if TYPE_CHECKING:
    from stoker.machine import Machine
    from stoker.plan import ModelCost, Plan
    from stoker.plan.pictures import PictureChoice

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True)
class Budget:
    """How much memory there is, and what takes it.

    Attributes:
        gpu_memory: Free GPU memory, such as 16GB, or none; by default this machine's.
        ram: Free RAM, such as 32GB; by default this machine's.
        batch_size: Samples per batch; by default chosen.
        parameters: Parameters of the model, such as 1.8M.
        activations: Bytes per sample, such as 2MB; by default estimated.
        ranks_per_host: Processes with a GPU each that share this machine's RAM.
        optimizer: sgd, momentum, rmsprop, adagrad, adam, adamw.
        share: Most of the memory that data may take; 60% is the fallback.
    """

    gpu_memory: str | None = None
    ram: str | None = None
    batch_size: int | None = None
    parameters: str | None = None
    activations: str | None = None
    ranks_per_host: Annotated[int, typer.Option(min=1)] = 1
    optimizer: str = "adamw"
    share: str = "75%"


@verb
def plan(
    store: Path | None = None,
    *,
    budget: Budget,
    table: bool = False,
    as_json: JsonOption = False,
) -> None:
    """Show what would be kept on the GPU and in RAM, and why; or print the published table.

    Options:
        store: Store folder, HDF5 file or URL.
        table: Print the published table of chunk and batch sizes by card, computed.
    """
    if store is None and not table:
        raise InputError(
            "no store was given.", "a store, or --table", "stoker plan STORE --gpu-memory 16GB"
        )
    documents = []
    if store is not None:
        made, origins, pictures = _make(store, budget, _model(budget))
        documents.append({"store": shown(store), "origins": origins, **made.to_json()})
        if pictures is not None:
            documents.append({"pictures": pictures.to_json()})
        if not as_json:
            _print_plan(shown(store), made, origins, pictures)
    if table:
        from stoker.compat.published import published_json

        documents.append({"table": published_json()})
        if not as_json:
            _print_table()
    if as_json:
        print_json({key: value for part in documents for key, value in part.items()})


def _model(budget: Budget) -> ModelCost | None:
    from stoker.plan import estimate_model

    parameters, activations, optimizer = budget.parameters, budget.activations, budget.optimizer
    if parameters is None:
        estimate_model(0, optimizer=optimizer)  # refuses an unknown name
        if activations is not None:
            raise InputError(
                "--activations without --parameters.", "both", "--parameters 1.8M --activations 2MB"
            )
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmb]?)", parameters.strip().lower())
    if match is None:
        raise InputError(
            f"cannot read {parameters!r} as a number of parameters.",
            "a number, with k, M or B for thousands, millions, billions",
            "--parameters 1.8M",
        )
    count = round(float(match[1]) * _COUNTS[match[2]])
    each = None if activations is None else parse_bytes(activations)
    return estimate_model(count, optimizer=optimizer, activation_bytes_per_sample=each)


def _make(
    path: Path, budget: Budget, model: ModelCost | None
) -> tuple[Plan, list[str], PictureChoice | None]:
    """Return the plan, where each amount of memory comes from, and which kind of store suits pictures."""
    from stoker.loader.columns import check_samples, column_facts, make_columns
    from stoker.machine import probe
    from stoker.plan import FALLBACK_SHARE, make_plan, store_facts
    from stoker.plan.pictures import choose_kind, picture_bytes
    from stoker.store.reader import open_store

    with open_store(path) as opened:
        # Exact facts read offsets and window ends, which a remote store would have to send first.
        facts = store_facts(opened.manifest)
        if as_url(path) is None:
            samples = check_samples(None, opened)
            facts = column_facts(opened, make_columns(opened, None, samples), len(samples))
            facts = replace(facts, left_out=store_facts(opened.manifest).left_out)
        machine = probe(opened.path)
        stored = picture_bytes(opened.manifest)
        is_encoded = stored is not None and stored.kind == "encoded"
        decoded_per_second = None
        if is_encoded and as_url(path) is None:
            from stoker.loader.pictures import measure_decoding

            decoded_per_second = measure_decoding(opened)
    gpu_bytes, gpu_origin = _gpu_memory(budget.gpu_memory, machine)
    ram_bytes, ram_origin = machine.ram_available_bytes, "RAM: free on this machine"
    if budget.ram is not None:
        ram_bytes, ram_origin = parse_memory(budget.ram, "--ram"), "RAM: as given"
    if ram_bytes is None:
        raise InputError("the free RAM of this machine is unknown.", "an amount", "--ram 32GB")
    data_share = parse_share(budget.share)
    made = make_plan(
        facts,
        # Decoders read encoded pictures from host memory, so that is where they are kept.
        gpu_memory_bytes=None if is_encoded else gpu_bytes,
        ram_bytes=ram_bytes,
        batch_size=budget.batch_size,
        model=model,
        gpu_share=data_share,
        fallback_share=min(FALLBACK_SHARE, data_share),
        threads=min(16, machine.cores_usable or 8),
        ranks_per_host=budget.ranks_per_host,
    )
    origins = [gpu_origin, ram_origin]
    if is_encoded:
        origins.append(
            "encoded pictures stay in RAM and are decoded ahead, on a GPU where there is one"
        )
    if stored is None:
        return made, origins, None
    choice = choose_kind(stored, gpu_bytes, ram_bytes, decoded_per_second, data_share)
    return made, origins, choice


def _gpu_memory(given: str | None, machine: Machine) -> tuple[int | None, str]:
    if given is not None:
        if given.strip().lower() == "none":
            return None, "GPU: none, as given"
        size = parse_memory(given, "--gpu-memory")
        return size, f"GPU: as given; {given} is {format_bytes(size)}, as on a card's label"
    seen = [gpu for gpu in machine.gpus if gpu.visible is not False and gpu.memory_free_bytes]
    if not seen:
        return None, "GPU: none on this machine; --gpu-memory 16GB plans for another"
    first = seen[0]
    return first.memory_free_bytes, f"GPU: free now on GPU {first.index}, {first.name or 'unnamed'}"


def _print_plan(
    name: str, made: Plan, origins: list[str], pictures: PictureChoice | None = None
) -> None:
    console = make_console(width=160)
    title = f"{name}: {made.tier}, batch size {made.batch_size}"
    table = make_table(title, ("where", "what", "bytes", "reason"), left=(0, 1, 3))
    caps = {"gpu": made.gpu_memory_bytes, "ram": made.ram_bytes}
    for where, total in made.totals.items():
        lines = [line for line in made.lines if line.where == where]
        for line in lines:
            table.add_row(where, line.what, format_bytes(line.num_bytes), line.reason)
        if lines:
            free = f"of {format_bytes(caps[where])} free"
            table.add_row(where, "total", format_bytes(total), free, style="bold", end_section=True)
    console.print(table)
    for reason in (*made.reasons, *origins, *(pictures.reasons if pictures else ())):
        console.print(f"- {reason}")


def _print_table() -> None:
    from stoker.compat.published import describe_cards, published_cards, published_counts

    console = make_console(width=160)
    heads = ("GPU memory", "data, 75 %", "data, 60 %", "batch size")
    cards = make_table("GPU memory, data and batch size", heads, left=())
    for row in published_cards():
        sizes = (row.gpu_memory_bytes, row.data_bytes, row.fallback_bytes)
        cards.add_row(
            f"{sizes[0] / GIB:.0f} GB", *(f"{size / GIB:.1f} GiB" for size in sizes[1:]), str(row.batch_size)
        )  # fmt: skip
    console.print(cards)
    console.print(describe_cards())
    rows = [
        (each.what, f"{each.sample_bytes:,.0f}", each.budget, f"{each.num_samples:,}", each.remark)
        for each in published_counts()
    ]
    names = ("sample", "bytes", "in", "samples", "remark")
    console.print(make_table("samples that fit", names, rows, left=(0, 4)))
