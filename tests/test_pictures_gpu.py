"""Encoded pictures on a GPU: the pixels of the engines' decoder, and what it refuses.

Without a GPU only the search for the library is tried; the rest runs in `tests/parity`'s way, where one is.
"""

from __future__ import annotations

from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stoker import Loader
from stoker.augment import Compose, Resize
from stoker.loader import nvjpeg, pictures
from stoker.loader.planned import PlannedBatch
from stoker.sources.images import decoding
from stoker.sources.images.encoded import picture_field
from stoker.store.fields import Dense
from stoker.store.memory import memory_store
from test_pictures_loader import make_store, random_ops

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GPU = torch.device("cuda:0")


def jpeg(height, width, seed=0, mode="RGB", **options):
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height)).convert(mode)
    file = BytesIO()
    image.save(file, "JPEG", quality=90, **options)
    return torch.from_numpy(np.frombuffer(file.getvalue(), np.uint8).copy())


def opened(channels=3):
    decoder = nvjpeg.open_decoder(GPU, channels)
    if decoder is None:
        pytest.skip("this GPU has no JPEG engines, or nvJPEG is not installed")
    return decoder


def in_one_block(images):
    """What the engines' decoder returns for these pictures."""
    ends = np.cumsum([image.numel() for image in images])
    memory = torch.cat([image.reshape(-1) for image in images])
    sizes = np.array([image.shape[1:] for image in images])
    return nvjpeg.Block(memory, np.concatenate([[0], ends[:-1]]), sizes, images[0].shape[0])


def test_jpeg_that_holds_rgb_is_told_from_the_others():
    for options, expected in (
        ({}, False),
        ({"subsampling": 0}, False),
        ({"mode": "L"}, False),
        ({"keep_rgb": True}, True),
        ({"progressive": True}, False),
    ):
        data = jpeg(24, 31, 0, **options)
        assert nvjpeg.holds_rgb(memoryview(data.numpy())) is expected, options
    rgb = jpeg(24, 31, 0, keep_rgb=True).numpy().tobytes()
    at = rgb.index(b"Adobe") - 4
    by_names = rgb[:at] + rgb[at + 16 :]  # without the marker: the components are named R, G and B
    assert nvjpeg.holds_rgb(by_names)
    pixels = [np.asarray(Image.open(BytesIO(each))) for each in (by_names, rgb)]
    assert (pixels[0] == pixels[1]).all()
    filled = rgb[:2] + b"\xff\xff" + rgb[2:]
    assert nvjpeg.holds_rgb(filled)


@given(st.binary(max_size=80), st.integers(0, 700), st.integers(0, 3))
def test_any_bytes_are_looked_at_for_rgb(noise, cut, way):
    whole = jpeg(16, 16, 0, keep_rgb=True).numpy().tobytes()
    given_bytes = (noise, whole[:cut], whole[:cut] + noise, b"\xff\xd8" + noise)[way]
    assert nvjpeg.holds_rgb(given_bytes) in (True, False)


def test_a_batch_of_all_kinds_is_decoded_by_who_takes_each(monkeypatch):
    files = [jpeg(33, 47, 0), jpeg(21, 30, 1, "L"), jpeg(20, 20, 2, keep_rgb=True)]
    png = BytesIO()
    Image.open(BytesIO(jpeg(22, 29, 3).numpy().tobytes())).save(png, "PNG")
    files.append(torch.frombuffer(bytearray(png.getvalue()), dtype=torch.uint8))
    files.append(jpeg(30, 41, 4))
    turns = [1, 1, 1, 1, 6]
    upright = [
        decoding.turned(Image.open(BytesIO(each.numpy().tobytes())).convert("RGB"), turn)
        for each, turn in zip(files, turns, strict=True)
    ]
    store = memory_store(
        {
            "images": picture_field([each.numpy().tobytes() for each in files]),
            "image_size": Dense(np.array([(e.height, e.width) for e in upright], np.int32)),
            "image_orientation": Dense(np.array(turns, np.uint8)),
        },
        "pictures",
    )
    made = pictures.Pictures(
        store, ["images"], np.arange(5), torch.device("cpu"), pictures.Policy()
    )
    made.use(Compose([Resize((16, 24))]))
    seen = []

    def decode(data, sizes, unknown):
        opened = [Image.open(BytesIO(each.numpy().tobytes())).convert("RGB") for each in data]
        assert [(each.height, each.width) for each in opened] == [tuple(size) for size in sizes]
        seen.append((len(data), unknown.tolist()))
        return in_one_block([torch.from_numpy(np.array(e)).permute(2, 0, 1) for e in opened])

    made._engines, made._decode_batch = SimpleNamespace(decode=decode), lambda _: []
    for order in ([4, 3, 2, 1, 0], [0, 1, 2, 3, 4]):
        planned = PlannedBatch(0, np.array(order), (0,), (5,), 5)
        work = pictures.Work(planned, {}, {"images": [files[number] for number in order]})
        images, reasons = made._images_on_gpu(work, made._boxes(planned, 0))
        assert not reasons
        for image, number in zip(images, order, strict=True):
            told = np.asarray(upright[number].resize((24, 16), Image.Resampling.BILINEAR), int)
            away = np.abs(image.permute(1, 2, 0).numpy().astype(int) - told)
            assert away.max() <= 2, (number, away.max())
    assert seen == [(3, [0, 1, 2]), (3, [])]
    # Of large pictures, the ones of a batch are decoded a few at a time.
    monkeypatch.setattr(pictures, "_MOST_DECODED", 8000)
    monkeypatch.setattr(pictures, "_wait", lambda: None)
    made.policy.on_broken = "skip"
    damaged = work._replace(damaged=frozenset([3]))
    pieces, reasons = made._in_pieces(damaged, made._boxes(planned, 0))
    assert [count for count, _ in seen[2:]] == [2, 1]
    assert list(reasons) == [3]
    assert torch.equal(pieces[[0, 1, 2, 4]], images[[0, 1, 2, 4]])


def test_the_library_of_torchs_cuda_is_taken(tmp_path, monkeypatch):
    for name in ("torchvision/__init__.py", "torchvision.libs/libnvjpeg.0a1b.so.13"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    specs = {"torchvision": SimpleNamespace(origin=str(tmp_path / "torchvision/__init__.py"))}
    monkeypatch.setattr(nvjpeg.importlib.util, "find_spec", specs.get)
    for cuda, found in (("13.0", "libnvjpeg.0a1b.so.13"), ("12.8", None), (None, None)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        path = nvjpeg._library_path.__wrapped__()
        assert (path.name if path else None) == found


@pytest.mark.parametrize("channels", [3, 1])
def test_a_library_that_gives_other_pixels_is_not_taken(channels):
    def decode(data, sizes):
        made = [np.asarray(Image.open(BytesIO(each.numpy().tobytes()))) for each in data]
        if channels == 1:
            made = [np.asarray(Image.fromarray(each).convert("L"))[..., None] for each in made]
        assert [each.shape[:2] for each in made] == [tuple(size) for size in sizes.tolist()]
        return in_one_block([torch.from_numpy(each.transpose(2, 0, 1).copy()) for each in made])

    nvjpeg._prove(SimpleNamespace(channels=channels, decode=decode))
    turned = SimpleNamespace(
        channels=channels,
        decode=lambda *given: in_one_block([e.flip(2) for e in decode(*given).tensors()]),
    )
    with pytest.raises(nvjpeg.DecoderError, match="levels away"):
        nvjpeg._prove(turned)


@needs_gpu
@pytest.mark.parametrize("channels", [3, 1])
def test_pixels_are_those_of_torchvision(channels):
    io = pytest.importorskip("torchvision.io")
    decoder = opened(channels)
    sizes = [(33, 47), (375, 500), (256, 341), (8, 8), (64, 200), (121, 77)]
    data = [jpeg(*size, seed) for seed, size in enumerate(sizes)]
    data.append(jpeg(90, 60, 9, subsampling=0))
    data.append(jpeg(90, 60, 9, subsampling=1))
    data.append(jpeg(50, 70, 9, "L"))
    sizes += [(90, 60), (90, 60), (50, 70)]
    mode = io.ImageReadMode.RGB if channels == 3 else io.ImageReadMode.GRAY
    wanted = io.decode_jpeg(data, mode=mode, device=GPU)
    for _ in range(3):
        made = decoder.decode(data, np.array(sizes)).tensors()
        torch.cuda.synchronize()
        for mine, theirs in zip(made, wanted, strict=True):
            assert torch.equal(mine, theirs)


@needs_gpu
def test_another_size_and_no_jpeg_are_refused_before_anything_is_decoded():
    decoder = opened()
    good = jpeg(64, 64)
    for bad, size in ((jpeg(65, 64), (64, 64)), (torch.zeros(99, dtype=torch.uint8), (64, 64))):
        with pytest.raises(nvjpeg.DecoderError, match="no JPEG of 64 x 64"):
            decoder.decode([good, bad], np.array([(64, 64), size]))
    decoder.decode([good], np.array([(64, 64)]))
    torch.cuda.synchronize()


@needs_gpu
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_broken_pictures_follow_the_policy_on_a_gpu(policy):
    store, _ = make_store(24, broken=(5, 17), form="JPEG")
    options = {"augment": random_ops(), "on_broken": policy, "broken_budget": 2}
    with Loader(store, 8, GPU, **options) as loader:
        batches = list(loader)
        assert sorted(loader.broken) == [5, 17]
    seen = np.concatenate([batch.sample_ids for batch in batches])
    assert not {5, 17} & set(seen.tolist())
    assert len(seen) == (22 if policy == "skip" else 24)


@needs_gpu
def test_epochs_on_a_gpu_repeat_to_the_bit_and_streams_are_kept():
    store, _ = make_store(40, form="JPEG")
    with Loader(store, 8, GPU, shuffle=True, augment=random_ops()) as loader:
        first = [batch["images"].clone() for batch in loader]
        lanes = loader._pictures._streams.qsize()
        list(loader)
        loader.set_epoch(0)
        again = [batch["images"].clone() for batch in loader]
        assert loader._pictures._streams.qsize() == lanes == pictures._GPU_THREADS
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
