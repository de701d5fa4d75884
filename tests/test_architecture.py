"""The layer rule of docs/architecture.md, the size of files, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from source_trees import nodes, parsed

PACKAGE = Path(stoker.__file__).parent
LAYERS = [
    {"strict_json"},
    {"address"},
    {"display"},
    {"errors"},
    {"units", "lifetime", "arguments", "host_memory"},
    {"ownership", "stalls"},
    {"config", "machine", "report", "page"},
    {"runs", "bounds"},
    {"store"},
    {"sources"},
    {"packing"},
    {"plan"},
    {"loader", "augment"},
    {"train"},
    {"recipes"},
    {"measure"},
    {"tune", "doctor", "monitor"},
    {"compat"},
    {"basics"},
    {"frameworks"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def module_files() -> list[Path]:
    return sorted(
        path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__"
    )


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in nodes(path.read_text(), ast.Import, ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("stoker.")}
    return {name for name in rooms if name in RANK}


def test_imports_go_down_only():
    wrong = []
    for path in module_files():
        own = room(path)
        assert own in RANK, f"{own} has no layer: add it to the rule and to docs/architecture.md"
        higher = {name for name in imported_rooms(path) if name != own and RANK[name] >= RANK[own]}
        wrong += [f"{path.name} is in {own} and imports {sorted(higher)}"] if higher else []
    assert not wrong


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """Return the modules of ours that a file imports anywhere: in functions and for type checkers, too."""
    found = set()
    for node in nodes(path.read_text(), ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole & known or {node.module}
    return found & known


def test_no_module_imports_itself_through_others():
    paths = {
        ".".join(("stoker", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in module_files()
        if path.stem != "__init__"
    }
    waiting = {name: imported_modules(path, {*paths}) - {name} for name, path in paths.items()}
    while free := [name for name, needs in waiting.items() if not needs]:
        for name in free:
            del waiting[name]
        waiting = {name: needs - {*free} for name, needs in waiting.items()}
    assert not waiting, "in a circle, or above one"


def test_the_rule_can_fail(tmp_path):
    bad = tmp_path / "x.py"
    bad.write_text("from stoker.cli.main import run\nimport stoker.store.fields\n")
    assert imported_rooms(bad) == {"cli", "store"}


def test_no_file_is_too_long_and_none_is_a_drawer():
    files = sorted(PACKAGE.rglob("*.py"))
    assert not [path for path in files if len(path.read_text().splitlines()) > 800]
    drawers = {"utils", "util", "common", "helpers", "misc"}
    assert not [path for path in files if path.stem in drawers]


def test_every_module_opens_by_saying_what_it_does():
    assert not [path for path in module_files() if not ast.get_docstring(parsed(path.read_text()))]


def test_architecture_page_names_every_room():
    page = (PACKAGE.parent.parent / "docs" / "architecture.md").read_text()
    for name in {room(path) for path in module_files()} - {"__main__"}:
        assert f"`{name}" in page, f"docs/architecture.md does not mention {name}"


@pytest.mark.parametrize(
    "code",
    ["import stoker", "import stoker.cli.main", "import stoker.packing", "import stoker.store"],
)
def test_importing_loads_no_torch(code):
    heavy = {"torch", "rdkit", "pandas"}
    check = f"import sys; {code}; bad = {heavy} & set(sys.modules); sys.exit(f'loaded {{bad}}' if bad else 0)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_help_loads_nothing_heavy():
    check = (
        "import sys\nfrom stoker.cli.main import app\n"
        "try:\n app(['--help'])\nexcept SystemExit:\n pass\n"
        "heavy = {'torch', 'numpy', 'h5py', 'pyarrow', 'pydantic', 'cloudpickle'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL)


def test_the_public_names_are_pinned():
    assert stoker.__all__ == [
        "Loader",
        "Plan",
        "StokerError",
        "Store",
        "TrainSettings",
        "Trainer",
        "capture",
        "find_max_batch_size",
        "load_config",
        "load_model",
        "make_plan",
        "mix",
        "open_store",
        "pack",
        "pack_from",
        "prefetch",
        "probe",
        "select_samples",
    ]
    names = set(stoker.__all__) | set(stoker._HOMES)
    assert names <= set(dir(stoker))
    assert not {"Any", "TYPE_CHECKING", "importlib"} & set(dir(stoker))
    for name in names:
        assert getattr(stoker, name) is not None
