"""The segmentation recipe over a store of encoded pictures: the same job as over pixels."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import stoker
from stoker.errors import InputError
from stoker.packing import PackOptions, pack
from stoker.recipes.contract import Job
from stoker.recipes.images.recipe import ImagesRecipe
from stoker.recipes.options import parse_options
from stoker.recipes.segmentation.recipe import SegmentationRecipe
from stoker.sources.images import ImagesSource, KeepEncoded, SegmentationSource
from stoker.store.reader import open_store

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra 'vision')")
TINY = {"widths": [4, 4, 8, 8], "depths": [1, 1, 1, 1], "heads": [1, 1, 1, 1], "head_width": 8}


@pytest.fixture
def folders(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for number in range(10):
        size = (32 + number % 3, 40)
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
        Image.fromarray((pixels[..., 0] > 128).astype(np.uint8)).save(
            tmp_path / "masks" / f"{number}.png"
        )
    return tmp_path


def packed(folders, out, keep):
    source = SegmentationSource(
        (32, 32), 3, folders / "images", folders / "masks", keep_encoded=keep
    )
    pack(source, folders / out, PackOptions(jobs=1))
    return folders / out


def first_loss(job: Job, path) -> torch.Tensor:
    job.model.eval()
    with stoker.Loader(
        path, 4, "cpu", fields=job.fields, samples=job.samples["train"], augment=job.augmentation
    ) as loader:
        inputs, targets = job.unpack(next(iter(loader)))
        return job.criterion(job.model(inputs), targets)


def test_either_kind_of_store_gives_a_job_that_trains(folders):
    losses = []
    for out, keep, options in (
        ("encoded", KeepEncoded(), {"size": [32, 32]}),
        ("raw", None, {}),
    ):
        path = packed(folders, out, keep)
        with open_store(path) as store:
            chosen = {**TINY, **options, "augmentation": "none"}
            job = SegmentationRecipe().make_job(store, chosen, 0)
            facts = SegmentationRecipe().describe(job)
            assert facts["size"] == [32, 32]
            assert facts.get("encoded", False) == (out == "encoded")
            losses.append(first_loss(job, path).item())
    # The same network over the same pictures, resized by the same rule.
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_pictures_of_several_sizes_are_resized_without_being_told(folders):
    path = packed(folders, "encoded", KeepEncoded())
    with open_store(path) as store:
        job = SegmentationRecipe().make_job(store, TINY, 0)
        assert "pictures are resized to 512 x 512" in job.notes
        options = parse_options(SegmentationRecipe.Options, TINY, "segmentation")
        made = SegmentationRecipe().rebuild(options, SegmentationRecipe().describe(job))
        with stoker.Loader(store, 2, "cpu", fields=["images"], augment=made.augment) as loader:
            assert next(iter(loader))["images"].shape == (2, 3, 512, 512)


def test_pictures_are_classified_from_either_kind_of_store(folders):
    for number in range(10):
        home = folders / "classes" / "ab"[number % 2]
        home.mkdir(parents=True, exist_ok=True)
        (folders / "images" / f"{number}.png").rename(home / f"{number}.png")
    losses = []
    for out, keep in (("encoded", KeepEncoded()), ("raw", None)):
        source = ImagesSource((32, 32), 3, folders / "classes", keep_encoded=keep)
        pack(source, folders / out, PackOptions(jobs=1))
        chosen = {"width": 4, "augmentation": "none", "ema": 0.0}
        with open_store(folders / out) as store:
            job = ImagesRecipe().make_job(store, chosen | ({"size": [32, 32]} if keep else {}), 0)
            losses.append(first_loss(job, folders / out).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_size_is_refused_where_pixels_have_another(folders):
    path = packed(folders, "raw", None)
    with open_store(path) as store, pytest.raises(InputError, match="holds pixels of"):
        SegmentationRecipe().make_job(store, {**TINY, "size": [16, 16]}, 0)


def test_a_run_trains_validates_and_answers_from_encoded_pictures(folders):
    from typer.testing import CliRunner

    from stoker.cli.main import app

    rng = np.random.default_rng(1)
    for number in range(40):
        home = folders / "classes" / "ab"[number % 2]
        home.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 80, (20 + number % 4, 24, 3), dtype=np.uint8) + 150 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(home / f"{number}.jpg")
    source = ImagesSource((8, 8), 3, folders / "classes", keep_encoded=KeepEncoded())
    pack(source, folders / "encoded", PackOptions(jobs=1))
    words = ["train", "--config", "images", "--store", str(folders / "encoded"), "--device", "cpu"]
    words += ["--json", "--set", f"run.dir={folders / 'run'}", "--set", "training.epochs=1"]
    words += ["--set", "training.batch_size=8", "--set", "recipe.options.width=4"]
    words += ["--set", "recipe.options.size=[16,16]", "--set", "recipe.options.network=resnet9"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    made = json.loads(done.stdout)
    assert len(made["epochs"]) == 1
    assert any("encoded pictures in host memory" in str(note) for note in made["notes"])
