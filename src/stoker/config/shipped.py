"""Config files that come with stoker, found by name.

Enters: what was typed as a config. Leaves: the path of a file. Costs a look into one folder; imports nothing.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "configs"
_OLD_NAMES = {
    "s0_chunk_loader": "forex_16gb",
    "s1_massspec": "massspec_32gb",
    "s4_tabular": "tabular_large_batch",
}


def shipped_configs() -> dict[str, Path]:
    """Return the shipped files by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def find_config(typed: str | Path) -> Path:
    """Return the file that is meant: one that exists, or a shipped one by its name.

    `forex` is a shipped file; `configs/forex.yaml`, where these files lay once, is too. A file of the user's
    own that has such a name comes first.
    """
    path = Path(typed)
    if path.is_file():
        return path
    is_name = path.suffix == "" and len(path.parts) == 1
    is_old_place = path.suffix == ".yaml" and path.parts[:-1] in ((), ("configs",))
    name = _OLD_NAMES.get(path.stem, path.stem)
    shipped = FOLDER / f"{name}.yaml"
    return shipped if (is_name or is_old_place) and shipped.is_file() else path
