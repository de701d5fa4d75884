"""The images recipe: networks, mixing, averages, splits, metrics; from a folder to answers."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from kept_commands import said_by as run
from stoker.errors import InputError, MissingExtraError
from stoker.recipes.images.evaluation import ImageMetrics, fit_ridge, hits_in_top, thumbnails
from stoker.recipes.images.networks import (
    ClassificationLoss,
    Classifier,
    ConvNext,
    ResNet9,
    load_weights,
    make_network,
)
from stoker.recipes.images.recipe import ImagesOptions, ImagesRecipe, split_pictures
from stoker.store.fields import Dense
from store_makers import write_store

TINY = {"width": 4, "label_smoothing": 0.0}


def write_pictures(folder, count=60, size=16, classes=3, **more):
    """Write a store whose class is the colour of the picture."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) % classes
    images = rng.integers(0, 60, (count, 3, size, size), dtype=np.uint8)
    for row, label in enumerate(labels):
        images[row, label % 3] += 150
    fields = {"images": Dense(images), "labels": Dense(labels.astype(np.int64)), **more}
    return write_store(folder, [fields])


# -- networks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "size"), [(ResNet9, 16), (ResNet9, 19), (ConvNext, 70)])
def test_our_networks_give_a_score_per_class(kind, size):
    network = kind(7, channels=1, width=8)
    scores = network(torch.randn(2, 1, size, size + 3))
    assert scores.shape == (2, 7)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_a_network_of_a_library_that_is_absent_names_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match="models"):
        make_network("timm/resnet18", 3, 3, 8, (32, 32))


def test_a_network_of_a_library_is_found_by_name(monkeypatch):
    import sys
    from types import SimpleNamespace

    def create_model(name, num_classes, in_chans):
        assert name == "tiny"
        head = torch.nn.Linear(in_chans * 16 * 16, num_classes)
        return torch.nn.Sequential(torch.nn.Flatten(), head)

    library = SimpleNamespace(list_models=lambda: ["tiny"], create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", library)
    assert make_network("timm/tiny", 3, 1, 8, (16, 16))(torch.zeros(2, 1, 16, 16)).shape == (2, 3)
    with pytest.raises(InputError, match="does not take pictures of 20 x 20"):
        make_network("timm/tiny", 3, 1, 8, (20, 20))
    with pytest.raises(InputError, match="no network 'timm/tony'") as raised:
        make_network("timm/tony", 3, 1, 8, (16, 16))
    assert raised.value.fix == "network='tiny'"


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_pretrained_weights_keep_all_but_the_last_layer(tmp_path, ending):
    from safetensors.torch import save_file

    trained, fresh = ResNet9(5, width=4), ResNet9(3, width=4)
    path = tmp_path / f"weights.{ending}"
    if ending == "pt":
        torch.save({"state_dict": trained.state_dict()}, path)
    else:
        save_file(trained.state_dict(), path)
    before = fresh.head.weight.clone()
    note = load_weights(fresh, path)
    assert torch.equal(fresh.stem[0].weight, trained.stem[0].weight)
    assert torch.equal(fresh.head.weight, before)
    assert "head.bias, head.weight start from random values" in note


def test_weights_of_another_network_and_pickles_are_refused(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(ResNet9(3, width=8).state_dict(), path)
    with pytest.raises(InputError, match="fit the network"):
        load_weights(ResNet9(3, width=4), path)
    torch.save(ResNet9(3, width=4), path)  # a pickled object, which could run anything
    with pytest.raises(InputError, match="cannot be read as weights"):
        load_weights(ResNet9(3, width=4), path)
    with pytest.raises(InputError, match="there is no file"):
        load_weights(ResNet9(3, width=4), tmp_path / "absent.pt")


# -- mixing and averages -------------------------------------------------------------------------


class Keep(torch.nn.Module):
    """Keeps the pictures that it sees."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, images):
        self.seen = images
        return images.mean(dim=(2, 3)) + self.weight


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_the_share_says_what_the_picture_kept(mixup, cutmix):
    torch.manual_seed(0)
    network = Keep()
    model = Classifier(network, mixup, cutmix).train()
    # Picture n is n everywhere, so the mean of a mixed one tells its share.
    images = torch.arange(32.0).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    _, share = model(images)
    before = images.roll(1, 0)
    expected = images.mean((1, 2, 3)) * share + before.mean((1, 2, 3)) * (1 - share)
    assert torch.allclose(network.seen.mean((1, 2, 3)), expected, atol=1e-4)
    assert 0 <= float(share.min()) < 0.95
    assert torch.equal(model.eval()(images), images.mean((2, 3)))


def test_the_loss_of_a_mixed_picture_is_towards_both_classes():
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    share = torch.rand(6)
    loss = ClassificationLoss(smoothing=0.1)
    soft = torch.eye(4)[labels] * share[:, None] + torch.eye(4)[labels.roll(1)] * (
        1 - share[:, None]
    )
    soft = soft * 0.9 + 0.1 / 4
    wanted = -(soft * logits.log_softmax(dim=1)).sum(dim=1).mean()
    assert torch.allclose(loss((logits, share), labels), wanted)
    plain = torch.nn.functional.cross_entropy(logits, labels)
    assert torch.allclose(loss(logits, labels), plain)


def test_weights_of_classes_count_by_the_class():
    logits, labels = torch.randn(4, 2), torch.tensor([0, 0, 0, 1])
    weights = torch.tensor([2 / 3, 2.0])
    each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    wanted = (each * weights[labels]).mean()
    assert torch.allclose(ClassificationLoss(0.0, weights)((logits,), labels), wanted)


def test_the_average_follows_the_weights_and_answers():
    model = Classifier(torch.nn.Linear(2, 2), average=0.9).train()
    expected = model.network.weight.detach().clone()
    for step in range(1, 30):
        with torch.no_grad():
            model.network.weight.fill_(float(step))
        model(torch.zeros(1, 2))
        decay = min(0.9, (1 + step) / (10 + step))
        expected = expected * decay + step * (1 - decay)
    assert torch.allclose(model.averaged.weight, expected, atol=1e-4)
    images = torch.randn(3, 2)
    assert torch.equal(model.eval()(images), model.averaged(images))
    assert not model.averaged.training


# -- metrics -------------------------------------------------------------------------------------


@given(
    st.integers(2, 8).flatmap(
        lambda num: st.tuples(
            st.just(num),
            npst.arrays(np.int64, st.integers(1, 40), elements=st.integers(0, num - 1)),
            st.integers(0, 2**32 - 1),
        )
    )
)
def test_metrics_are_those_of_a_plain_count(case):
    num, labels, seed = case
    scores = np.random.default_rng(seed).normal(size=(len(labels), num)).astype("f4")
    metrics = ImageMetrics(num)
    for part in np.array_split(np.arange(len(labels)), 3):
        if len(part):
            metrics.update(torch.from_numpy(scores[part]), torch.from_numpy(labels[part]))
    found = metrics.compute()
    answers = scores.argmax(axis=1)
    f1, recalls = [], []
    for one in sorted(set(labels.tolist())):
        hits = sum(1 for true, said in zip(labels, answers, strict=True) if true == said == one)
        true, said = int((labels == one).sum()), int((answers == one).sum())
        recalls.append(hits / true)
        f1.append(2 * hits / (true + said))
    near = [label in np.argsort(-row)[:5] for row, label in zip(scores, labels, strict=True)]
    assert math.isclose(found["accuracy"], float((labels == answers).mean()))
    assert math.isclose(found["macro_f1"], float(np.mean(f1)), abs_tol=1e-12)
    assert math.isclose(found["balanced_accuracy"], float(np.mean(recalls)), abs_tol=1e-12)
    assert ("top5_accuracy" in found) == (num > 5)
    assert math.isclose(found.get("top5_accuracy", 1.0), float(np.mean(near)))


def test_equal_scores_are_no_hits():
    assert not hits_in_top(torch.zeros(1, 6), torch.tensor([0])).any()


def test_the_linear_baseline_separates_colours(tmp_path):
    with write_pictures(tmp_path / "store") as store:
        features = thumbnails(store.read_rows("images", 0, 60))
        labels = store.read_rows("labels", 0, 60)
    assert features.shape == (60, 3 * 64 + 1)
    weights = fit_ridge(features[:40], labels[:40], 3)
    assert ((features[40:] @ weights).argmax(axis=1) == labels[40:]).all()


# -- from a store --------------------------------------------------------------------------------


def test_pictures_without_a_split_are_divided_class_by_class(tmp_path):
    with write_pictures(tmp_path / "store", 90) as store:
        labels = store.read_rows("labels", 0, 90)
        samples, _ = split_pictures(store, labels, (0.8, 0.1, 0.1), 0)
    assert sorted(np.concatenate(list(samples.values())).tolist()) == list(range(90))
    assert [np.bincount(labels[ids]).tolist() for ids in samples.values()] == [
        [24] * 3,
        [3] * 3,
        [3] * 3,
    ]


@pytest.mark.parametrize(
    ("given", "note"),
    [((0, 2), "a tenth of train as val (6)"), ((0, 1), "half of val as test (6)")],
)
def test_a_split_that_is_absent_is_taken_from_another(tmp_path, given, note):
    split = np.array([given[0]] * 60 + [given[1]] * 12, np.uint8)
    with write_pictures(tmp_path / "store", 72, split=Dense(split)) as store:
        labels = store.read_rows("labels", 0, 72)
        samples, said = split_pictures(store, labels, (0.8, 0.1, 0.1), 0)
    assert note in said
    assert all(len(ids) for ids in samples.values())
    assert len(np.unique(np.concatenate(list(samples.values())))) == 72


@pytest.mark.parametrize("augmentation", ["none", "light", "standard", "strong"])
def test_every_preset_gives_normal_pictures_of_the_same_size(tmp_path, augmentation):
    with write_pictures(tmp_path / "store") as store:
        job = ImagesRecipe().make_job(store, TINY | {"augmentation": augmentation}, 0)
        images = torch.from_numpy(store.read_rows("images", 0, 32))
    made = job.augmentation(images)
    assert made.shape == images.shape
    assert abs(float(job.augmentation.validation()(images).mean())) < 0.5
    assert (augmentation == "none") == torch.equal(made, job.augmentation.validation()(images))


def test_balance_is_by_weights_or_by_the_loader(tmp_path):
    with write_pictures(tmp_path / "store") as store:
        weighed = ImagesRecipe().make_job(store, TINY | {"balance": "weights"}, 0)
        drawn = ImagesRecipe().make_job(store, TINY | {"balance": "sampling"}, 0)
    assert torch.allclose(weighed.criterion.weights, torch.ones(3))
    assert (weighed.balance, drawn.balance, drawn.criterion.weights) == (None, "labels", None)


def test_options_out_of_range_are_refused():
    for name, value in (("mixup", -1), ("ema", 1.0), ("label_smoothing", 1.5), ("width", 0)):
        with pytest.raises(InputError, match=name):
            ImagesOptions(**{name: value})


def test_a_store_of_something_else_is_refused(tmp_path):
    fields = {"features": Dense(np.zeros((4, 3), "f4"))}
    with (
        write_store(tmp_path / "store", [fields]) as store,
        pytest.raises(InputError, match="labels"),
    ):
        ImagesRecipe().make_job(store, {}, 0)


# -- from a folder to answers ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from PIL import Image

    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(1)
    for number, name in enumerate(("blue sky", "green", "red")):
        (root / "pictures" / name).mkdir(parents=True)
        for place in range(20):
            pixels = rng.integers(0, 60, (20, 24, 3), dtype=np.uint8)
            pixels[..., 2 - number] += 150
            Image.fromarray(pixels).save(root / "pictures" / name / f"{place}.png")
    return root


@pytest.fixture(scope="module")
def trained(folder):
    run("pack", "images", folder / "pictures", folder / "store", "--size", "16x16", "--jobs", "1")
    told = run(
        "train", "--config", "images", "--store", folder / "store", "--device", "cpu", "--json",
        *("--set", f"run.dir={folder / 'run'}", "--set", "training.epochs=8"),
        *("--set", "training.batch_size=16", "--set", "training.lr=0.02"),
        *("--set", "recipe.options.width=8", "--set", "recipe.options.cutmix=0.5"),
    )  # fmt: skip
    return folder, json.loads(told)


def test_a_run_is_evaluated_by_class_beside_baselines(trained):
    _, made = trained
    evaluation = made["evaluation"]
    assert evaluation["metrics"]["accuracy"] > 0.6
    assert list(evaluation["groups"]["class"]) == ["blue sky", "green", "red"]
    assert len(evaluation["baselines"]) == 2
    assert np.array(evaluation["confusion"]["counts"]).sum() == 6
    for example in evaluation["examples"]:
        assert example["pictures"]["picture"].startswith("data:image/png;base64,")


def test_new_pictures_get_class_names_or_a_reason(trained):
    folder, _ = trained
    new = folder / "new"
    (new / "deep").mkdir(parents=True)
    (new / "deep" / "a.png").write_bytes((folder / "pictures" / "red" / "3.png").read_bytes())
    (new / "broken.png").write_bytes(b"no picture")
    run("predict", folder / "run" / "best.pt", new, folder / "answers.csv", "--device", "cpu")
    with (folder / "answers.csv").open() as file:
        rows = {row["file"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"broken.png", "deep/a.png"}
    answer = rows["deep/a.png"]
    shares = [float(answer[f"probability_{name}"]) for name in ("blue sky", "green", "red")]
    assert answer["class"] == ("blue sky", "green", "red")[int(np.argmax(shares))]
    assert abs(sum(shares) - 1) < 1e-4
    assert rows["broken.png"]["class"] == ""
    assert "cannot be opened as an image" in rows["broken.png"]["reason"]


def test_pictures_in_folders_of_their_class_are_evaluated(trained):
    folder, made = trained
    told = run(
        *("predict", folder / "run" / "best.pt", folder / "pictures", folder / "all.csv"),
        *("--device", "cpu", "--json"),
    )
    again = json.loads(told)["evaluation"]
    assert again["num_samples"] == 60
    assert again["compared_by"] == made["evaluation"]["compared_by"] == "accuracy"


@pytest.mark.slow  # an export takes seconds: tests/test_export.py has two
def test_the_graph_answers_as_the_model_does(one_registry, trained):
    import onnx
    import onnxruntime
    from PIL import Image

    folder, _ = trained
    run("export", folder / "run" / "best.pt", folder / "model.onnx")
    graph = onnx.load(folder / "model.onnx")
    about = {entry.key: entry.value for entry in graph.metadata_props}
    assert json.loads(about["stoker.classes"]) == ["blue sky", "green", "red"]
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    with Image.open(folder / "pictures" / "red" / "3.png") as opened:
        picture = opened.resize((16, 16), Image.Resampling.BILINEAR)
    pixels = np.moveaxis(np.asarray(picture), -1, 0)[None]
    names = [output.name for output in session.get_outputs()]
    made = dict(zip(names, session.run(None, {"images": pixels}), strict=True))
    run(
        "predict",
        folder / "run" / "best.pt",
        folder / "pictures" / "red" / "3.png",
        folder / "one.csv",
        "--device",
        "cpu",
    )
    with (folder / "one.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert np.allclose(made["probability"][0, 2], float(row["probability_red"]), atol=1e-4)


def test_the_page_shows_the_mistakes(trained):
    folder, _ = trained
    run("report", folder / "run", "--out", folder / "page.html")
    page = (folder / "page.html").read_text()
    assert "blue sky" in page
