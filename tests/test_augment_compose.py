"""Compose: what enters is checked, what is drawn can be repeated, what validates is not random."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from stoker.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    GaussianBlur,
    Normalize,
    Params,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    ToDtype,
    draw,
    philox,
    reference,
)
from stoker.augment.position import Position
from stoker.errors import InputError

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def every_op():
    return [
        RandomHorizontalFlip(),
        RandomVerticalFlip(),
        RandomRotation(20),
        RandomAffine(5, (0.1, 0.1), (0.9, 1.1), (3, 3), p=0.5),
        RandomResizedCrop((20, 24)),
        RandomCrop(18, padding=2),
        ColorJitter(0.2, 0.2, 0.2, 0.1, p=0.8),
        GaussianBlur(3, p=0.5),
        RandomErasing(0.5),
        Normalize(MEAN, STD),
        ToDtype(torch.float32),
    ]


def pictures(batch=6, size=(30, 34), seed=0, channels=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, channels, *size), dtype=torch.uint8, generator=generator)


def labels(batch=6, size=(30, 34)):
    return torch.randint(0, 19, (batch, *size), generator=torch.Generator().manual_seed(9))


# -- repeating a draw ----------------------------------------------------------------------------


def test_calls_differ_and_seek_brings_any_of_them_back():
    compose, images = Compose(every_op(), seed=3), pictures()
    made = [compose(images) for _ in range(4)]
    assert not torch.equal(made[0], made[1])
    compose.seek(0, 2)
    assert torch.equal(compose(images), made[2])
    compose.set_epoch(0)
    assert torch.equal(compose(images), made[0])
    compose.set_epoch(1)
    assert not torch.equal(compose(images), made[0])
    assert torch.equal(Compose(every_op(), seed=3)(images), made[0])
    assert not torch.equal(Compose(every_op(), seed=4)(images), made[0])
    assert not torch.equal(Compose(every_op(), seed=3, stream=1)(images), made[0])


def test_a_state_goes_on_where_it_was_taken():
    first, images = Compose(every_op(), seed=(1 << 64) - 5), pictures()
    first.seek(7, 3)
    first(images)
    state = first.state_dict()
    assert (state["epoch"], state["step"], state["stream"]) == (7, 4, 0)
    second = Compose(every_op())
    second.load_state_dict(state)
    assert torch.equal(first(images), second(images))
    with pytest.raises(InputError, match="without stream"):
        second.load_state_dict({"seed": 0, "epoch": 0, "step": 0})


def test_a_copy_draws_the_same_and_the_original_is_left_alone():
    compose, images = Compose(every_op(), seed=3), pictures()
    compose(images)
    twins = copy.deepcopy(compose), pickle.loads(pickle.dumps(compose))
    expected = compose(images)
    for twin in twins:
        assert torch.equal(twin(images), expected)


def test_the_dtype_of_the_images_does_not_change_the_draw():
    images = pictures()
    wide = Compose(every_op())(images.float() / 255)
    torch.testing.assert_close(Compose(every_op())(images), wide, atol=1e-5, rtol=0)


def test_a_failed_call_draws_nothing():
    compose, images = Compose(every_op()), pictures()
    with pytest.raises(InputError):
        compose(images, labels(5))
    assert compose.state_dict()["step"] == 0


# -- one draw for everything ---------------------------------------------------------------------


def test_drawn_parameters_serve_images_masks_boxes_and_keypoints():
    compose, images, masks = Compose(every_op()), pictures(), labels()
    params = compose.draw(6, (30, 34), 3, "cpu")
    assert isinstance(params, Params)
    result, moved = compose.apply(images, params, masks)
    assert torch.equal(compose.apply(images, params), result)
    assert compose.state_dict()["step"] == 1
    compose.seek(0)
    again, classes = compose(images, masks)
    assert torch.equal(again, result)
    assert torch.equal(classes, moved)
    assert result.shape == (6, 3, 18, 18)
    assert moved.shape == (6, 18, 18)
    boxes, valid = compose.boxes(torch.tensor([[[1.0, 2, 20, 22]]]).expand(6, 1, 4), params)
    points, inside = compose.keypoints(torch.full((6, 2, 2), 9.0), params)
    assert boxes.shape == (6, 1, 4)
    assert valid.dtype == inside.dtype == torch.bool
    assert points.shape == (6, 2, 2)


def test_rows_are_the_same_as_picking_first():
    images, masks, rows = pictures(9), labels(9), torch.tensor([8, 1, 1, 0])
    result, moved = Compose(every_op())(images, masks, rows=rows)
    expected, classes = Compose(every_op())(images[rows], masks[rows])
    assert torch.equal(result, expected)
    assert torch.equal(moved, classes)


def test_one_image_goes_through_apply():
    image, mask = pictures(1)[0], labels(1)[0]
    result, moved = Compose(every_op()).apply(image, masks=mask)
    expected, classes = Compose(every_op())(image[None], mask[None])
    assert torch.equal(result, expected[0])
    assert torch.equal(moved, classes[0])
    assert Compose(every_op()).apply(image).shape == (3, 18, 18)


def test_every_op_can_be_applied_alone_and_two_of_them_are_not_in_step():
    image = pictures(1)[0]
    for op in every_op():
        assert op.apply(image).is_floating_point()
    flips = RandomHorizontalFlip(), RandomHorizontalFlip()
    plain = image.float() * torch.tensor(1 / 255)
    seen = [[torch.equal(flip.apply(image), plain) for _ in range(40)] for flip in flips]
    assert seen[0] != seen[1]
    assert 8 < sum(seen[0]) < 32


# -- validation ----------------------------------------------------------------------------------


def test_validation_has_nothing_random_and_the_same_shape():
    images, masks = pictures(4), labels(4)
    train = Compose(every_op(), seed=5, ignore_index=7)
    fixed = train.validation()
    assert fixed.ops == (
        Resize((20, 24)),
        CenterCrop(18, 2),
        Normalize(MEAN, STD),
        ToDtype(torch.float32),
    )
    first, second = fixed(images, masks), fixed(images, masks)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(
        fixed(images)[:1].expand(4, -1, -1, -1), fixed(images[:1].repeat(4, 1, 1, 1))
    )
    assert first[0].shape == train(images).shape
    assert fixed.ignore_index == 7
    assert fixed.validation().ops == fixed.ops


def test_validation_of_the_chapters_crop_is_the_image_itself():
    images = pictures(2, (32, 32))
    fixed = Compose([RandomCrop(32, padding=4), RandomHorizontalFlip()]).validation()
    assert torch.equal(fixed(images), images * torch.tensor(1 / 255))


# -- what may enter ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([[1, 2]], "images are a list"),
        (pictures()[0], "shape (3, 30, 34)"),
        (pictures()[None], "shape (1, 6, 3, 30, 34)"),
        (pictures().long(), "dtype torch.int64"),
        (pictures().bool(), "dtype torch.bool"),
        (pictures()[:0], "there is no pixel"),
        (pictures()[..., :0], "there is no pixel"),
        (pictures()[:, :0], "there is no pixel"),
        (torch.full((2, 3, 30, 34), float("nan")), "NaN or infinity"),
        (torch.full((2, 3, 30, 34), float("-inf")), "NaN or infinity"),
        (pictures().float(), "outside 0 to 1"),
        ((pictures().float() / 255 - 0.5) / 0.2, "outside 0 to 1"),
        (torch.rand(2, 3, 30, 34, requires_grad=True), "require a gradient"),
        (pictures(channels=5), "contrast on images with 5 channels"),
        (pictures(channels=1), "mean has 3 numbers and the images have 1 channels"),
    ],
)
def test_images_that_are_none_are_refused(images, words):
    with pytest.raises(InputError) as caught:
        Compose(every_op())(images)
    assert words in str(caught.value)
    assert caught.value.allowed
    assert caught.value.fix


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        (labels().float(), "masks.long()"),
        (labels(5), "masks of shape (5, 30, 34) beside images of shape (6, 3, 30, 34)"),
        (labels(6, (34, 30)), "(6, 30, 34) or (6, 1, 30, 34)"),
        (labels()[:, None, None], "masks of shape"),
        (labels()[:, None].expand(6, 3, 30, 34), "masks of shape (6, 3, 30, 34)"),
        (labels().to(torch.int8), "ignore_index 255 with masks of dtype torch.int8"),
        (labels().to(torch.int8), "ignore_index=-1"),
        (labels().to(torch.uint16), "masks.to(torch.int32)"),
        (labels().to(torch.uint32), "masks.to(torch.int32)"),
        (labels().to(torch.uint64), "masks.to(torch.int32)"),
        (labels().tolist(), "masks are a list"),
    ],
)
def test_masks_that_do_not_belong_are_refused(masks, words):
    with pytest.raises(InputError) as caught:
        Compose(every_op())(pictures(), masks)
    assert words in str(caught.value)
    assert caught.value.allowed
    assert caught.value.fix


def test_an_ignore_index_that_fits_is_taken():
    masks = labels().to(torch.int8)
    _, moved = Compose([RandomRotation((45, 45))], ignore_index=-1)(pictures(), masks)
    assert moved.dtype == torch.int8
    assert (moved[:, 0, 0] == -1).all()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([0, 1], "rows are [0, 1]"),
        (torch.tensor([0, 1], dtype=torch.int32), "rows are torch.int32"),
        (torch.tensor([0, 1], dtype=torch.int32), "rows.long()"),
        (torch.tensor([[0, 1]]), "rows are torch.int64 (1, 2)"),
        (torch.tensor([0, 6]), "rows from 0 to 6 of 6 images"),
        (torch.tensor([-1]), "rows from -1 to -1"),
        (torch.zeros(0, dtype=torch.int64), "rows are empty"),
    ],
)
def test_rows_that_do_not_exist_are_refused(rows, words):
    with pytest.raises(InputError) as caught:
        Compose(every_op())(pictures(), rows=rows)
    assert words in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "cuda"}, "backend is 'cuda'"),
        ({"ignore_index": 1.5}, "ignore_index is 1.5"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"stream": -1}, "stream is -1"),
    ],
)
def test_options_of_compose_are_checked(options, words):
    with pytest.raises(InputError, match=words):
        Compose([RandomHorizontalFlip()], **options)


def test_parameters_of_another_batch_are_refused():
    compose = Compose([RandomHorizontalFlip()])
    params = compose.draw(6, (30, 34), 3, "cpu")
    for images in (pictures(5), pictures(6, (34, 30)), pictures(channels=1)):
        with pytest.raises(InputError, match="parameters for images of shape"):
            compose.apply(images, params)
    with pytest.raises(InputError, match="0 images"):
        compose.draw(0, (30, 34), 3, "cpu")
    with pytest.raises(InputError, match="size is"):
        compose.draw(6, (30, 0), 3, "cpu")


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        (torch.zeros(6, 4), "boxes are (6, 4)"),
        (torch.zeros(6, 1, 5), "boxes are (6, 1, 5)"),
        (torch.zeros(6, 1, 4, dtype=torch.int64), "boxes of dtype torch.int64"),
        (torch.zeros(5, 1, 4), "boxes of 5 images with parameters for 6"),
        ([[0, 0, 1, 1]], "boxes are list"),
    ],
)
def test_boxes_that_do_not_belong_are_refused(boxes, words):
    compose = Compose([RandomHorizontalFlip()])
    with pytest.raises(InputError) as caught:
        compose.boxes(boxes, compose.draw(6, (30, 34), 3, "cpu"))
    assert words in str(caught.value)


@pytest.mark.parametrize("what", ["masks", "rows", "params"])
def test_another_device_is_an_error_and_never_a_move(what):
    images, elsewhere = pictures(), torch.device("meta")
    compose = Compose([RandomHorizontalFlip()])
    params = compose.draw(6, (30, 34), 3, "cpu")
    given = {"images": images, "params": None}
    if what == "params":
        given["params"] = Params(params.table.to(elsewhere), params.program)
    else:
        tensor = labels() if what == "masks" else torch.arange(6)
        given[what] = tensor.to(elsewhere)
    with pytest.raises(InputError, match="on meta and images on cpu") as caught:
        compose.apply(**given)
    assert "cpu" in caught.value.fix


FLIP = [RandomHorizontalFlip()]
STATE = {"seed": 0, "epoch": 0, "step": 0, "stream": 0}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Compose(RandomHorizontalFlip()), "Compose([RandomHorizontalFlip(p=0.5)])"),
        (lambda: Compose(None), "the ops are None"),
        (lambda: Compose("flip"), "the ops are 'flip'"),
        (lambda: Compose(FLIP).apply(pictures(), 5), "params are 5"),
        (lambda: Compose(FLIP).boxes(torch.zeros(6, 1, 4), None), "params are None"),
        (lambda: Compose(FLIP).keypoints(torch.zeros(6, 1, 2), None), "params are None"),
        (lambda: Compose(FLIP).draw(2.5, (8, 8), 3, "cpu"), "2.5 images"),
        (lambda: Compose(FLIP).draw(True, (8, 8), 3, "cpu"), "True images"),
        (lambda: Compose(FLIP).draw(2, (8, 8), None, "cpu"), "None channels"),
        (lambda: Compose(FLIP).draw(2, None, 3, "cpu"), "size is None"),
        (lambda: Compose(FLIP).draw(2, (8,), 3, "cpu"), "size is (8,)"),
        (lambda: Compose(FLIP).draw(2, (8, 8), 3, "gpu"), "device is 'gpu'"),
        (lambda: Compose(FLIP).draw(2, (8, 8), 3, "meta"), "device is 'meta': it holds no numbers"),
        (lambda: Compose(FLIP).draw(2, (8, 8), 3, []), "device is []"),
        (lambda: Compose(FLIP).draw(2, (8, 8), 3, "cuda:99"), "device is 'cuda:99'"),
        (lambda: Compose(FLIP).load_state_dict(None), "is a NoneType"),
        (lambda: Compose(FLIP).load_state_dict({}), "without epoch, seed, step, stream"),
        (lambda: Compose(FLIP).load_state_dict(STATE | {"step": "x"}), "step is 'x'"),
        (lambda: Compose(FLIP).load_state_dict(STATE | {"epoch": 1.5}), "epoch is 1.5"),
        (
            lambda: Compose(FLIP).apply(pictures()[0], rows=torch.tensor([0])),
            "rows with one image",
        ),
    ],
)
def test_what_cannot_be_used_is_said_in_three_parts(call, words):
    with pytest.raises(InputError) as caught:
        call()
    assert words in str(caught.value)
    assert caught.value.allowed
    assert caught.value.fix


# -- inference mode and devices ------------------------------------------------------------------


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_compose_works_on_both_sides_of_inference_mode(built, first):
    philox._constants.cache_clear()
    draw.constant.cache_clear()
    reference._per_channel.cache_clear()
    images, masks, rows = pictures().float() / 255, labels(), torch.arange(6)
    expected = Compose(every_op(), seed=3)
    with torch.inference_mode(built):
        compose = Compose(every_op(), seed=3)
    philox._constants.cache_clear()
    for inside in (first, not first, first):
        with torch.inference_mode(inside):
            made, moved = compose(images, masks, rows=rows)
        wanted, labelled = expected(images, masks, rows=rows)
        assert torch.equal(made, wanted)
        assert torch.equal(moved, labelled)
    with torch.inference_mode(first), pytest.raises(InputError, match="outside 0 to 1"):
        compose(pictures().float())
    compose.seek(2)
    with torch.inference_mode():
        compose.seek(1, 5)
        compose.load_state_dict(compose.state_dict())
    assert compose.state_dict() == {"seed": 3, "epoch": 1, "step": 5, "stream": 0}


def test_nothing_that_is_kept_belongs_to_inference_mode():
    for cached in (philox._constants, draw.constant, reference._per_channel):
        cached.cache_clear()
    with torch.inference_mode():
        compose = Compose(every_op())
        compose(pictures().float() / 255)
        kept = [
            compose._position.on(torch.device("cpu")),
            *(plan.tape for plan in compose._plans.values()),
            *(flag.bits for flag in compose._flags.values()),
            *philox._constants(torch.device("cpu")),
            draw.constant((1.0,), torch.device("cpu")),
            reference._per_channel((0.5,), torch.device("cpu"), torch.float32),
        ]
    assert not any(tensor.is_inference() for tensor in kept)


def test_counters_are_kept_per_device_and_the_last_one_is_the_state():
    # Plain tensors stand for the counters of two GPUs: a captured graph goes on counting in them.
    position = Position(7, stream=2)
    here, there = torch.device("cpu"), torch.device("cuda:7")
    first, second = position.on(here), philox.make_counter(0)
    position._counters[there] = second
    philox.advance(first)
    position._last = there
    second.copy_(first)
    philox.advance(second)
    assert position.read() == {"seed": 7, "epoch": 0, "step": 2, "stream": 2}
    assert position.on(here) is first
    assert first.tolist() == [7, 0, 2, 2], "the state follows to the device that is used"
    position.write({"seed": 7, "epoch": 4, "step": 1, "stream": 2})
    assert first.tolist() == second.tolist() == [7, 4, 1, 2]
    assert there in position


@gpu
def test_a_captured_graph_keeps_its_counter_after_a_draw_elsewhere():
    compose = Compose([RandomHorizontalFlip()])
    counter = compose._position.on(torch.device("cuda:0"))
    compose.draw(2, (8, 8), 3, "cpu")
    compose.draw(2, (8, 8), 3, "cuda")
    assert compose._position.on(torch.device("cuda:0")) is counter
    assert compose.state_dict()["step"] == 2


@gpu
@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_rows_that_do_not_exist_are_found_on_the_gpu_after_the_first_call(backend):
    images = pictures().cuda()
    compose = Compose([RandomRotation(15)], backend=backend)
    compose(images, rows=torch.tensor([0, 5], device="cuda"))
    made = compose(images, rows=torch.tensor([0, 6], device="cuda"))
    assert made[1].isnan().all()
    with pytest.raises(InputError, match="rows that the images do not have"):
        compose.check()


# -- the backend ---------------------------------------------------------------------------------


def test_the_backend_is_chosen_with_a_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    automatic, chosen = (
        Compose([RandomHorizontalFlip()]),
        Compose([RandomHorizontalFlip()], backend="torch"),
    )
    assert automatic.backend_reason == ""
    automatic(pictures())
    chosen(pictures())
    assert automatic.backend_reason == "torch: the device is a CPU"
    assert chosen.backend_reason == "torch: it was asked for"
    with pytest.raises(InputError, match="the device is a CPU") as caught:
        Compose([RandomHorizontalFlip()], backend="fused")(pictures())
    assert 'backend="auto"' in caught.value.fix


def test_the_order_is_checked_at_construction():
    with pytest.raises(InputError, match="colour on normalised values"):
        Compose([Normalize(MEAN, STD), ColorJitter(0.2)])


def test_what_is_printed_can_be_read():
    text = repr(Compose([RandomHorizontalFlip(0.25), Resize(4)]))
    assert text == "Compose([RandomHorizontalFlip(p=0.25), Resize(size=(4, 4))])"


@gpu
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_captured_graph_draws_anew_at_each_replay(backend):
    images = pictures(8).cuda()
    compose = Compose(every_op(), seed=2, backend=backend)
    expected = [compose(images).clone() for _ in range(4)]
    compose.seek(0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        compose(images)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compose(images)
    compose.seek(0)
    for batch in expected:
        graph.replay()
        torch.testing.assert_close(result, batch, atol=1e-5, rtol=0)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        images.add_(0)  # torch warns of a graph that captured nothing
        with pytest.raises(InputError, match="capture"):
            compose(images[..., :-1])


@gpu
def test_faults_on_the_gpu_are_raised_at_once_first_and_without_waiting_later():
    compose = Compose([RandomHorizontalFlip()])
    with pytest.raises(InputError, match="outside 0 to 1"):
        compose(pictures().cuda().float())
    good, bad = (
        pictures().cuda().float() / 255,
        torch.full((2, 3, 30, 34), float("nan"), device="cuda"),
    )
    compose(bad)
    with pytest.raises(InputError, match="NaN"):
        compose.check()
    compose(bad)

    def go_on():
        for _ in range(100):
            compose(good)
            torch.cuda.synchronize()

    with pytest.raises(InputError, match="NaN"):
        go_on()


@gpu
def test_the_cpu_and_the_gpu_draw_the_same():
    compose = Compose(every_op(), seed=5)
    here = compose.draw(6, (30, 34), 3, "cpu").table
    compose.seek(0)
    there = compose.draw(6, (30, 34), 3, "cuda").table
    torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=1e-5)
