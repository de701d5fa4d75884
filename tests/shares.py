"""How `make test` shares the test files among its workers: whole files, the long ones first.

A file's fixtures are made once, and so are imports and parsed sources for the files of one share. The shares that take
long begin first, so that no worker is busy with one when the others have ended. The order below is by the CPU seconds
of a run; a file that is not named comes later, in its own share.
"""

from __future__ import annotations

import os
from functools import cache

TOGETHER = {
    "imports": (
        "every_pair", "frameworks_lightning", "frameworks_capture", "frameworks_huggingface",
        "frameworks_adapted", "frameworks_accelerate", "examples",
        "doctor_attach", "doctor_between", "doctor_endings", "doctor_samples",
        "advice", "architecture", "ownership", "facts", "printed_commands", "registry", "terminal", "words",
        "bad_machine",
    ),  # Lightning and transformers are 7 s of imports, the sources of the package some of reading
    "graphs": ("export", "recipe_images"),  # the exporter is 3 s of imports
}  # fmt: skip
LONG_FIRST = (
    "imports", "augment_fused", "graphs", "ranks", "cluster", "demo",
    "docs_site", "run", "cli_doctor", "doctor_job", "doctor_cases", "tune", "recipe_massspec",
    "gallery", "packing", "bounds", "docs_code", "predict", "cli", "compat_massspec", "report_page",
    "shipped_configs", "msp", "lifetime", "remote_store", "trainer_edges", "recipe_tabular", "recipe_forex",
    "no_lookahead", "loader_turns", "pack_from", "doctor_benchmark", "update", "elastic", "pictures_loader", "order",
    "trainer", "massspec_answers", "massspec", "recycled", "recipe_segmentation", "loader_edges", "commit",
    "tune_command", "secrets", "checkpoint", "cli_train", "foreign_position",
)  # fmt: skip
_SHARES = {
    name: (share, place) for share, names in TOGETHER.items() for place, name in enumerate(names)
}


@cache
def share_of(file: str) -> str:
    """Return the share of a test file, which is given by its path."""
    return _place(file)[0]


@cache
def rank_of(file: str) -> tuple[int, str, int]:
    """Return what puts the long shares first and the files of one beside each other, in its order."""
    share, place = _place(file)
    number = LONG_FIRST.index(share) if share in LONG_FIRST else len(LONG_FIRST)
    return number, share, place


def _place(file: str) -> tuple[str, int]:
    name = os.path.basename(file).removeprefix("test_").removesuffix(".py")  # noqa: PTH119
    return _SHARES.get(name, (name, 0))


def shares_of(files: list[str]) -> list[list[list[int]]]:
    """Return the places of tests, given by their files, by share and file in the order in which workers take them."""
    found: dict[str, dict[str, list[int]]] = {}
    for number in sorted(range(len(files)), key=lambda number: rank_of(files[number])):
        share = found.setdefault(share_of(files[number]), {})
        share.setdefault(files[number], []).append(number)
    return [[*share.values()] for share in found.values()]
