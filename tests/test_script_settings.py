"""Settings that a script makes for its whole process change no number of stoker's, and are not blamed on others."""

from __future__ import annotations

import contextlib

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stoker
from run_makers import settings_for
from stoker.augment import ColorJitter, Compose, Normalize, RandomCrop, RandomHorizontalFlip
from stoker.errors import InputError
from stoker.packing import PackOptions, pack
from stoker.recipes.run import run_recipe
from stoker.sources.tables import TableSource
from stoker.store.fields import Dense, Ragged
from stoker.train.trainer import Trainer
from store_makers import write_store

GENERATOR = torch.Generator().manual_seed(0)
PICTURES = torch.randint(0, 255, (32, 3, 12, 12), dtype=torch.uint8, generator=GENERATOR)
LABELS = torch.randint(0, 3, (32,), generator=GENERATOR)
AUGMENT = [RandomHorizontalFlip(), RandomCrop(8), ColorJitter(0.4, 0.4), Normalize(0.5, 0.2)]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "anomaly": torch.autograd.detect_anomaly,
}
OF_OTHERS = {name: SETTINGS[name] for name in ("float64", "bfloat16", "autocast")}
OF_OTHERS["device"] = lambda: torch.device("meta")


def make_trainer():
    torch.manual_seed(0)
    with default_dtype(torch.float32):  # the script's own model
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))
    data = {"images": PICTURES, "labels": LABELS}
    train, val = (stoker.Loader(data, 8, "cpu", shuffle=True, seed=3) for _ in range(2))
    return Trainer(
        model, train, val, cross_entropy, torch.optim.AdamW(model.parameters()), device="cpu",
        config={"epochs": 2}, gpu_augmentation=Compose(AUGMENT, seed=1),
    )  # fmt: skip


def train():
    history = make_trainer().fit(quiet=True)
    return [(epoch.train_loss, epoch.metrics) for epoch in history.epochs]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("setting", SETTINGS)
def test_training_is_the_same_under_a_setting_of_the_script(setting):
    wanted = train()
    with SETTINGS[setting]():
        got = train()
    assert got == wanted


class CastsItself(nn.Linear):
    """A layer with an autocast of its own, which caches the weight that it casts."""

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_autocast_of_a_model_sees_every_update(device, precision):
    rows = torch.randn(6, 8, 4, generator=GENERATOR).to(device)
    losses = {}
    for way in ("plain", "trainer"):
        torch.manual_seed(0)
        model = CastsItself(4, 1, device=device)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        batches = [(x, x[:, :1] * 2) for x in rows]
        if way == "trainer":
            config = {"epochs": 1, "precision": precision}
            trainer = Trainer(model, batches, None, nn.MSELoss(), optimizer, None, config, device)
            trainer.fit(quiet=True)
        else:
            for x, y in batches:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        losses[way] = [one.tolist() for one in model.parameters()]
    for ours, plain in zip(losses["trainer"], losses["plain"], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_gradients_that_a_script_turned_off_are_not_blamed_on_the_criterion(without):
    with without(), pytest.raises(InputError, match="gradients are turned off where"):
        make_trainer().fit(quiet=True)


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    """A checkpoint of a classifier of tables."""
    folder = tmp_path_factory.mktemp("table")
    table = folder / "t.csv"
    rows = [f"{n % 7},{n % 5},{'yes' if n % 7 > 3 else 'no'}" for n in range(200)]
    table.write_text("\n".join(["speed,heat,fails", *rows]))
    store = pack(TableSource((table,), target="fails"), folder / "store", PackOptions(jobs=1)).path
    return run_recipe(settings_for("tabular", store, folder / "run"), device="cpu").best


@pytest.mark.parametrize("setting", OF_OTHERS)
def test_a_trained_model_answers_the_same_under_a_setting_of_the_script(best, setting):
    rows = {"speed": [1.0, 2.0, 5.5], "heat": [0.5, 3.0, 4.0]}
    wanted = stoker.load_model(best).predict(rows, device="cpu")
    with OF_OTHERS[setting]():
        got = stoker.load_model(best).predict(rows, device="cpu")
    assert got == wanted


def test_a_shard_has_the_same_bytes_whatever_order_h5py_tracks(tmp_path, monkeypatch):
    fields = {"z": Dense(np.arange(9)), "a": Ragged.from_strings(list("stoker.h5"))}
    for name, tracked in (("one", False), ("other", True)):
        monkeypatch.setattr(h5py.get_config(), "track_order", tracked)
        write_store(tmp_path / name, [fields])
    one, other = (next((tmp_path / name).glob("*.h5")) for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()
