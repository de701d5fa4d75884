"""Small stores and configs for whole runs of every recipe."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stoker.config import Settings, parse_config, resolve
from stoker.store.fields import Dense
from stoker.store.reader import Store, open_store
from store_makers import write_store
from test_recipe_forex import make_fields
from test_recipe_segmentation import TINY, VOID, write_shapes
from test_recipe_tabular import class_table, series_fields, window_fields

# Name to recipe and options; several stores of one recipe have names of their own.
OPTIONS: dict[str, tuple[str, dict]] = {
    "forex": ("forex", {"d_model": 8, "heads": 2, "layers": 1, "dropout": 0.1}),
    "stateful": (
        "forex",
        {"d_model": 8, "heads": 2, "layers": 1, "stateful": True, "carried": ["M5"]},
    ),
    "massspec": ("massspec", {"width": 32, "num_blocks": 1}),
    "massspec-teacher": (
        "massspec-teacher",
        {"width": 32, "num_blocks": 1, "num_layers": 1, "graph_width": 8},
    ),
    "segmentation": ("segmentation", TINY | {"ignore_values": [VOID]}),
    "tabular": ("tabular", {"hidden": [16]}),
    "windows": (
        "tabular",
        {"d_model": 8, "heads": 2, "layers": 1, "patch": 4, "stride": 2, "channels": "independent"},
    ),
    "series": ("tabular", {"hidden": [16], "model": "mlp"}),
}


def make_store(kind: str, folder: Path) -> Store:
    """Write the store of a kind of `OPTIONS`."""
    if kind in ("forex", "stateful"):
        # Lanes of a stateful run need longer splits.
        return write_store(folder, [make_fields(260 if kind == "forex" else 420)])
    if kind == "segmentation":
        return write_shapes(folder, 24)
    if kind.startswith("massspec"):
        return _make_spectra(folder)
    made = {"tabular": class_table, "windows": window_fields, "series": series_fields}[kind](200)
    return write_store(folder, [made])


def _make_spectra(folder: Path) -> Store:
    from molecule_makers import inchikey, msp_record
    from stoker.packing import PackOptions, pack
    from stoker.sources.massspec import MassSpecSource
    from test_recipe_massspec import made_molecules  # needs rdkit

    records = [
        msp_record(f"c{number}", peaks=peaks, InChIKey=inchikey(smiles), SMILES=smiles, ID=str(number))
        for number, (smiles, peaks) in enumerate(made_molecules()[:60])
    ]  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    library = folder.with_suffix(".msp")
    library.write_text("".join(records))
    pack(MassSpecSource(library, max_mz=150, seed=3), folder, PackOptions(jobs=1))
    return open_store(folder)


def settings_for(kind: str, store: Path | str, run_dir: Path, *overrides: str) -> Settings:
    """Settings of a short run on the CPU."""
    import json

    recipe, options = OPTIONS[kind]
    given = {
        "training.epochs": "2",
        "training.batch_size": "16",
        "training.lr": "0.003",
        "training.precision": "fp32",
        "recipe.name": recipe,
        "recipe.store": json.dumps(str(store)),
        "run.dir": json.dumps(str(run_dir)),
    }
    given |= {f"recipe.options.{name}": json.dumps(value) for name, value in options.items()}
    given |= dict(text.split("=", 1) for text in overrides)
    return resolve(parse_config("", overrides=[f"{key}={value}" for key, value in given.items()]))


def dirty_table(folder: Path, at: int = 5) -> Store:
    """Rows with one that is infinite, past the gate: the manifest says that nothing was found."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(300, 4)).astype("f4")
    fields = {"features": Dense(features), "targets": Dense((features[:, 0] > 0).astype("i8"))}
    fields["features"].values[at, 2] = np.inf
    store = write_store(folder, [fields])
    store.close()
    from stoker.ownership import always, write_text
    from stoker.store.manifest import read_manifest

    manifest = read_manifest(folder).model_copy(update={"quality": {"findings": []}})
    write_text(folder / "store.json", manifest.to_text(), always)
    return open_store(folder)
