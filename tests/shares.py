"""How `make test` shares the test files among its workers: whole files, the long ones first.

A file's fixtures are made once, and so are imports and parsed sources for the files of one share. The shares that take
long begin first, so that no worker is busy with one when the others have ended. The order below is by the CPU seconds
of a run; a file that is not named comes later, in its own share.
"""

from __future__ import annotations

import os
from functools import cache

TOGETHER = {
    "frameworks": (
        "every_pair", "frameworks_lightning", "frameworks_capture", "frameworks_huggingface",
        "frameworks_adapted", "frameworks_accelerate",
    ),  # Lightning and transformers are 7 s of imports
    "graphs": ("export", "recipe_images"),  # the exporter is 3 s of imports
    "sources": (
        "advice", "architecture", "ownership", "facts", "printed_commands", "registry", "terminal",
        "words", "bad_machine",
    ),  # they read the whole package
    "watched": ("doctor_attach", "doctor_between", "doctor_endings", "doctor_samples"),  # of the same scripts
}  # fmt: skip
LONG_FIRST = (
    "augment_fused", "sources", "watched", "frameworks", "graphs", "ranks", "cluster", "examples", "demo",
    "docs_site", "run", "cli_doctor", "doctor_job", "doctor_cases", "tune", "recipe_massspec",
    "gallery", "packing", "bounds", "docs_code", "predict", "cli", "compat_massspec", "report_page",
    "shipped_configs", "msp", "lifetime", "remote_store", "trainer_edges", "recipe_tabular", "recipe_forex",
    "no_lookahead", "loader_turns", "pack_from", "doctor_benchmark", "update", "elastic", "pictures_loader", "order",
    "trainer", "massspec_answers", "massspec", "recycled", "recipe_segmentation", "loader_edges", "commit",
    "tune_command", "secrets", "checkpoint", "cli_train", "foreign_position",
)  # fmt: skip
_SHARES = {name: share for share, names in TOGETHER.items() for name in names}


@cache
def share_of(file: str) -> str:
    """Return the share of a test file, which is given by its path."""
    name = os.path.basename(file).removeprefix("test_").removesuffix(".py")  # noqa: PTH119
    return _SHARES.get(name, name)


@cache
def rank_of(file: str) -> tuple[int, str]:
    """Return what puts the long shares first and the files of one beside each other."""
    share = share_of(file)
    return (LONG_FIRST.index(share) if share in LONG_FIRST else len(LONG_FIRST)), share


def shares_of(nodeids: list[str]) -> list[list[int]]:
    """Return the places of the tests, share by share, in the order in which the workers take them."""
    found: dict[tuple[int, str], list[int]] = {}
    for number, nodeid in enumerate(nodeids):
        found.setdefault(rank_of(nodeid.partition("::")[0]), []).append(number)
    return [found[rank] for rank in sorted(found)]
