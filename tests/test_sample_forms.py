"""Samples and arrays of anybody's script: what a batch holds is what the script's own DataLoader would hold."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker import Loader
from stoker.augment import Compose, RandomAffine, RandomHorizontalFlip
from stoker.errors import InputError
from stoker.loader import arguments

FLAGS = torch.tensor([True, False, True, True, False, False, True])
MASKS = torch.arange(21).reshape(7, 3) % 2 == 0


class Items(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return len(FLAGS)

    def __getitem__(self, number):
        return self.make(number)


@pytest.fixture(autouse=True)
def told_anew(monkeypatch):
    monkeypatch.setattr(arguments, "_told", set())


def quiet(data, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Loader(data, 4, "cpu", **more)


@pytest.mark.parametrize("way", ["arrays", "tensors", "samples", "packed", "chunked"])
def test_booleans_stay_booleans(tmp_path, way):
    # As uint8, `~mask` is 254 or 255, which is true, and a mask picks other elements.
    samples = [{"flag": bool(FLAGS[n]), "mask": MASKS[n].numpy()} for n in range(len(FLAGS))]
    if way == "packed":
        stoker.pack_from(samples, tmp_path / "store", options=stoker.PackOptions(jobs=1))
    data = {
        "arrays": {"flag": FLAGS.numpy(), "mask": MASKS.numpy()},
        "tensors": {"flag": FLAGS, "mask": MASKS},
        "samples": samples,
        "packed": tmp_path / "store",
        "chunked": {"flag": FLAGS, "mask": MASKS},
    }[way]
    more = {"chunk_bytes": 18} if way == "chunked" else {}
    with quiet(data, **more) as loader:
        batches = list(loader)
    assert torch.equal(torch.cat([~batch["flag"] for batch in batches]), ~FLAGS)
    assert torch.equal(torch.cat([batch["mask"] for batch in batches]), MASKS)


def test_boolean_masks_move_with_their_images():
    images, masks = torch.zeros(8, 3, 4, 4, dtype=torch.uint8), torch.arange(128) % 3 == 0
    masks = masks.reshape(8, 4, 4)
    shifted = Compose([RandomHorizontalFlip(1.0), RandomAffine(0, (0.9, 0.9))])
    with quiet({"images": images, "masks": masks}, augment=Compose([shifted.ops[0]])) as loader:
        got = torch.cat([batch["masks"] for batch in loader])
    assert torch.equal(got.bool(), masks.flip(-1))
    moved = shifted(images, masks)[1]
    assert moved.dtype == torch.uint8
    assert (moved == shifted.ignore_index).any()


def test_a_list_of_views_is_told_to_be_one_tensor():
    views = Items(lambda n: ([torch.full((2,), n), torch.full((2,), -n)], n))
    as_list = next(iter(DataLoader(views, 4)))[0]
    assert [view.shape for view in as_list] == [(4, 2), (4, 2)]
    with (
        pytest.warns(UserWarning, match="stays the same"),
        pytest.warns(UserWarning, match=r"2 arrays that 'features'.*\(batch, 2, ...\)"),
        Loader(views, 4, "cpu") as loader,
    ):
        assert torch.equal(next(iter(loader))[0], torch.stack(as_list, 1))


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ({"id": 3, "size": (4, 5)}, "{'id': value['id'], 'size': value['size']}"),
        ([np.zeros(3), np.zeros(4)], "{'view_0': value[0], 'view_1': value[1]}"),
        (np.ones(3, np.complex64), "np.stack([np.real(value), np.imag(value)], -1)"),
        (np.zeros(3, "M8[s]"), "np.asarray(value).astype('int64')"),
    ],
)
def test_what_no_field_holds_is_answered_without_a_loss(value, advice):
    with pytest.raises(InputError) as caught:
        quiet([{"x": value}])
    assert caught.value.fix.startswith(advice)


def test_numbers_of_two_types_are_answered_with_the_wider_one():
    with pytest.raises(InputError, match=r"int64.*float64") as caught:
        quiet([{"x": 1}, {"x": 1.5}])
    assert "np.float64" in caught.value.fix


def test_a_wrong_name_is_answered_with_one_that_is_not_taken():
    with pytest.raises(InputError) as caught:
        quiet({"x": FLAGS, "y": FLAGS}, as_tuple=("x", "label"))
    assert caught.value.fix == "as_tuple=('x', 'y')"


@pytest.mark.parametrize(
    "shape",
    [
        (9, 8, 8),
        (3, 8, 8),
        (8, 8, 3),
        (8, 8),
        (2, 3, 3, 8, 8),
        (9, 8, 8, 3),
        (9, 6, 6, 1),
        (9, 40, 17, 3),
    ],
)
def test_images_of_another_shape_are_answered_with_one_that_fits(shape):
    images = torch.zeros(shape, dtype=torch.uint8)
    flip = Compose([RandomHorizontalFlip(1.0)])
    with pytest.raises(InputError, match="images of shape") as caught:
        flip(images)
    made = flip(eval(caught.value.fix))
    assert made.shape[1] in (1, 3)
    assert made.numel() == images.numel()
