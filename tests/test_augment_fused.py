"""The fused backend without a GPU: what it chooses, what it says, and that its kernels compile.

What the kernels compute is compared with the torch backend in `tests/parity/test_fused_kernels.py`:
on a GPU directly, here in Triton's interpreter. The interpreter knows no types, so the kernels are
also compiled for a GPU that is not there; the compiler comes with triton and needs none.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.augment import fused, philox
from stoker.augment.definition import Program
from stoker.augment.geometry import (
    AlternatingFlip,
    RandomCrop,
    RandomHorizontalFlip,
    RandomRotation,
)
from stoker.augment.ops import (
    ColorJitter,
    GaussianBlur,
    Normalize,
    RandomBrightness,
    RandomErasing,
    ToDtype,
    encode_tape,
    make_program,
)
from stoker.augment.stages import Function
from stoker.errors import InputError
from warm_stoker import shared

PARITY = Path(__file__).parent / "parity"
KERNELS = [
    str(PARITY / f"test_{name}.py") for name in ("fused_kernels", "lstm_kernels", "sizing_kernel")
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    fused.importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
IMAGENET = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@needs_triton
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU here")
@pytest.mark.parametrize(
    ("selected", "at_least"),
    [("not slow", 80), pytest.param("slow", 50, marks=pytest.mark.slow)],
    ids=["each value once", "the other combinations"],
)
def test_the_kernels_agree_with_the_reference_in_the_interpreter(selected, at_least):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", selected, *KERNELS],
        env={**kept, "TRITON_INTERPRET": "1", **({"OVERFLOW": "1"} if selected == "slow" else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= at_least


# -- compiled for a GPU that is not here -------------------------------------------------------------

NAMES = {
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}


class Compiled:
    """Stands in for `_Launch.__call__`: compiles for `arch` what would have been launched."""

    def __init__(self, arch):
        self.arch = arch
        self.ptx = {}
        self.tiles = {}

    def compile(self, launch, *tensors):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        kernel, types, constants, hints = launch._kernel, {}, {}, {}
        for index, (parameter, value) in enumerate(
            zip(kernel.params, (*tensors, *launch._fixed), strict=True)
        ):
            if parameter.name == "WAIT":
                value = True  # as on a GPU
            if parameter.is_constexpr or value is None or self._is_one(parameter, value):
                types[parameter.name], constants[(index,)] = "constexpr", value
                continue
            pointer = isinstance(value, torch.Tensor)
            types[parameter.name] = f"*{NAMES[value.dtype]}" if pointer else self._width(value)
            if pointer or (value % 16 == 0 and not parameter.do_not_specialize):
                hints[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, types, constants, hints)
        target = GPUTarget("cuda", self.arch, 32)
        made = triton.compile(source, target=target, options=launch._options)
        self.ptx[kernel.fn.__name__] = made.asm["ptx"]
        self.tiles[kernel.fn.__name__] = made.asm["ttgir"]

    @staticmethod
    def _is_one(parameter, value):
        return isinstance(value, int) and value == 1 and not parameter.do_not_specialize

    @staticmethod
    def _width(value):
        return "i32" if -(2**31) <= value < 2**31 else "i64"


@pytest.fixture
def compiled(monkeypatch, tmp_path, request):
    """Compiles instead of launching, into a cache of its own."""
    triton = pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("the interpreter does not compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # A digest of triton's files, hundreds of MB: it tells versions apart in a cache that outlives a test.
    if hasattr(triton.runtime.cache, "triton_key"):
        monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: "here")
    made = Compiled(getattr(request, "param", 90))

    def compile_instead(launch, *tensors):
        made.compile(launch, *tensors)

    monkeypatch.setattr(fused._Launch, "__call__", compile_instead)
    return made


def run(
    ops, *, channels=3, size=(512, 512), dtype=torch.uint8, masks=None, rows=False, faults=False
):
    program = make_program(ops, size, channels)
    fused.FusedBackend().apply(
        torch.empty((4, channels, *size), dtype=dtype),
        None if masks is None else torch.empty((4, *size), dtype=masks),
        torch.zeros(4, dtype=torch.int64) if rows else None,
        torch.empty(4, 16),
        program,
        torch.zeros(1, dtype=torch.int32) if faults else None,
    )


USUAL = [RandomHorizontalFlip(), RandomRotation(15), RandomBrightness(0.2), IMAGENET]


@pytest.mark.parametrize("compiled", [pytest.param(80, marks=pytest.mark.slow), 90], indirect=True)
def test_everything_compiles(compiled):
    jitter = [ColorJitter(0.2, 0.2, 0.1, 0.1), GaussianBlur(3), RandomErasing()]
    ops = [*USUAL[:2], *jitter, IMAGENET, ToDtype(torch.float16, channels_last=True)]
    run(ops, masks=torch.int64, rows=True)
    assert set(compiled.ptx) == {"sum_gray", "augment", "blur"}


@pytest.mark.slow  # 8 s of CPU; its numbers are compared in the interpreter
def test_contrast_compiles_as_one_pass_that_waits(compiled):
    run([*USUAL[:2], ColorJitter(0.2, 0.2), IMAGENET], size=(224, 224))
    assert set(compiled.ptx) == {"augment_held"}
    assert re.search(r"(ld|atom)\.global\.gpu\.acquire", compiled.ptx["augment_held"])
    assert not re.search(r"\b(mul|add|sub)\.f32", compiled.ptx["augment_held"])
    assert ".local" not in compiled.ptx["augment_held"]


@pytest.mark.parametrize(
    "dtype",
    [
        *(pytest.param(half, marks=pytest.mark.slow) for half in (torch.float16, torch.bfloat16)),
        torch.float32,
    ],
)
def test_float_images_with_the_fault_check_compile(compiled, dtype):
    run([*USUAL, ToDtype(dtype)], dtype=dtype, rows=True, faults=True)
    assert "atom" in compiled.ptx["augment"] or "red." in compiled.ptx["augment"]
    if dtype == torch.float32:
        # The look at values is a maximum of bit patterns, as unsigned numbers too.
        assert re.search(r"\bmax\.u32", compiled.ptx["augment"])


def test_bytes_by_rows_note_a_row_that_does_not_exist_and_look_at_no_value(compiled):
    run(USUAL, rows=True, masks=torch.uint8, faults=True)
    assert re.search(r"\b(atom|red)\.", compiled.ptx["augment"])
    assert not re.search(r"\bmax\.u32", compiled.ptx["augment"])
    assert "convert_layout" not in compiled.tiles["augment"]


@pytest.mark.slow
def test_gray_images_large_blurs_and_crops_compile(compiled):
    run([RandomCrop(100), RandomBrightness(0.2), GaussianBlur(9)], channels=1, size=(120, 130))
    assert set(compiled.ptx) == {"augment", "blur"}


@pytest.mark.slow  # 5 s of CPU; what is drawn is compared in the interpreter
def test_drawing_compiles(compiled):
    tape = encode_tape(USUAL, (32, 32))
    fused.FusedBackend().draw(tape, philox.make_counter(0), 32)
    plain = compiled.ptx["draw"]
    tape = encode_tape([AlternatingFlip(), Function(lambda images, _u: images)], (32, 32))
    ids, staged = torch.arange(32), torch.empty(32, 1, 8)
    fused.FusedBackend().draw(tape, philox.make_counter(0), 32, ids=ids, staged=staged)
    assert compiled.ptx["draw"].count("st.global") > plain.count("st.global")


def test_reflected_crops_compile(compiled):
    run(
        [RandomHorizontalFlip(), RandomCrop(32, 4, "reflect"), IMAGENET],
        size=(32, 32),
        masks=torch.int64,
    )
    assert set(compiled.ptx) == {"augment"}


def test_coordinates_are_not_contracted_and_pixels_change_no_layout(compiled):
    run(USUAL, rows=True, masks=torch.uint8)
    assert not re.search(r"\b(atom|red)\.", compiled.ptx["augment"])  # no fault is looked for
    # Without --fmad=false ptxas would contract mul + add; the kernel's own fma stays.
    assert re.search(r"fma\.rn\.f32", compiled.ptx["augment"])
    assert not re.search(r"\b(mul|add|sub)\.f32", compiled.ptx["augment"])
    # A change of layout in the loop is a trip through shared memory with two barriers.
    assert "convert_layout" not in compiled.tiles["augment"]


def test_unmoved_pixels_are_read_and_written_in_wide_words(compiled):
    run([RandomBrightness(0.2), IMAGENET, ToDtype(torch.float16)])
    assert re.search(r"ld\.global[.\w:]*\.(v2\.b32|b32)", compiled.ptx["augment"])
    assert re.search(r"st\.global[.\w:]*\.v2\.b32", compiled.ptx["augment"])


# -- choosing ----------------------------------------------------------------------------------------


@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    batch=st.integers(1, 5000),
    geometry=st.booleans(),
    most_tiles=st.sampled_from([0, 1, 512]),
)
def test_tiles_cover_the_image_and_are_few_enough(height, width, batch, geometry, most_tiles):
    program = Program(
        **{
            **make_program([], (8, 8), 3).__dict__,
            "out_size": (height, width),
            "geometry": geometry,
        }
    )
    config = fused.choose_config(program, batch, most_tiles=most_tiles)
    across, down = config.grid((height, width))
    assert (across - 1) * config.block_x < width <= across * config.block_x
    assert (down - 1) * config.block_y < height <= down * config.block_y
    for step, block in ((config.step_y, config.block_y), (config.step_x, config.block_x)):
        assert step & (step - 1) == 0
        assert block % step == 0
    assert config.step_y * config.step_x == (128 if geometry else 512)
    assert not most_tiles or across * down <= most_tiles


@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    geometry=st.booleans(),
    multiprocessors=st.integers(1, 200),
)
def test_programs_that_wait_for_each_other_fit_on_the_gpu_together(
    height, width, geometry, multiprocessors
):
    program = Program(
        **{
            **make_program([], (8, 8), 3).__dict__,
            "out_size": (height, width),
            "geometry": geometry,
        }
    )
    config = fused.choose_held(program, multiprocessors)
    few = -(-height * width // fused.HELD_PIXELS) <= multiprocessors
    if config is None:
        assert not few or min(height, width) < 32  # strips are cut into more tiles
        return
    across, down = config.grid((height, width))
    assert across * down <= 2 * multiprocessors
    assert config.block_y * config.block_x == fused.HELD_PIXELS
    for step, block in ((config.step_y, config.block_y), (config.step_x, config.block_x)):
        assert block % step == 0


class FakeStream:
    def __init__(self, number, waits):
        self.cuda_stream, self.waits = number, waits

    def wait_stream(self, other):
        self.waits.append((self.cuda_stream, other.cuda_stream))


def test_launches_that_wait_take_turns_where_many_streams_have_them(monkeypatch):
    waits, current = [], []
    streams = [FakeStream(number, waits) for number in range(fused.MOST_WAITING + 2)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: current[-1] is streams[-1]
    )
    turns, device = fused.Turns(), torch.device("cuda", 0)

    def launch(stream):
        current.append(stream)
        with turns.take(device):
            pass

    *few, another, capturing = streams
    for stream in (*few, *few, capturing):
        launch(stream)
    assert waits == []
    for stream in (another, another, few[0], another):
        launch(stream)
    first, last = few[0].cuda_stream, few[-1].cuda_stream
    number = another.cuda_stream
    assert waits == [(number, last), (first, number), (number, first)]


def test_a_blur_is_not_held():
    blurred = make_program([ColorJitter(0.2, 0.2), GaussianBlur(3)], (64, 64), 3)
    assert fused.choose_held(blurred, 132) is None


def test_small_images_get_small_tiles_and_large_ones_large():
    small, large = make_program(USUAL, (32, 32), 3), make_program(USUAL, (512, 512), 3)
    assert fused.choose_config(small, 256).grid((32, 32)) == (2, 4)
    config = fused.choose_config(large, 32)
    assert (config.block_y, config.block_x) == (16, 32)  # the fastest on an H200 over all dtypes


# -- saying ------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="asks what is said without the interpreter")
def test_a_cpu_is_refused_in_words():
    assert fused.available("cpu") == "the device is a CPU"
    assert fused.available(torch.device("meta")) == "the device is meta, not CUDA"


@needs_triton
def test_the_interpreter_is_taken_only_if_triton_knew_in_time(monkeypatch):
    fused._kernels()  # before the variable: else this whole process would interpret from here on
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    expected = None if INTERPRETED else "triton was imported before TRITON_INTERPRET was set"
    assert fused.available("cpu") == expected


def test_nothing_needs_triton_until_it_is_used(tmp_path):
    (tmp_path / "check.py").write_text(
        "import os, sys\n"
        "for name in [one for one in sys.modules if one.startswith('stoker.augment')]:\n"
        "    del sys.modules[name]\n"
        "import stoker.augment\nfrom stoker.augment import fused\n"
        "assert fused.available('cpu') == 'the device is a CPU', fused.available('cpu')\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "assert fused.available('cpu') == 'triton is not installed', fused.available('cpu')"
    )
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = shared().run([], None, plain, script=tmp_path / "check.py", blocked=["triton"])
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_a_gpu_is_taken_and_named():
    assert fused.available("cuda") is None
    assert re.fullmatch(r"Triton \d+\.\d+\.\d+ on .+", fused.describe("cuda"))


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "out"), [(torch.float64, torch.float32), (torch.uint8, torch.float64)]
)
def test_float64_is_refused_with_the_way_out(dtype, out):
    program = make_program([RandomRotation(5), ToDtype(out)], (8, 8), 3)
    images, table = torch.zeros(1, 3, 8, 8, dtype=dtype), torch.zeros(1, 16)
    with pytest.raises(InputError, match='backend="torch"'):
        fused.FusedBackend().apply(images, None, None, table, program, None)


@needs_triton
def test_plans_are_kept_for_the_same_shapes_and_not_without_end(monkeypatch):
    launched = []
    monkeypatch.setattr(fused._Launch, "__call__", lambda launch, *tensors: launched.append(launch))
    backend, table = fused.FusedBackend(), torch.zeros(1, 16)
    program = make_program([RandomRotation(5)], (8, 8), 3)
    for _ in range(2):
        backend.apply(torch.zeros(1, 3, 8, 8), None, None, table, program, None)
    assert launched[0] is launched[1]
    for size in range(8, 8 + 2 * fused._KEPT_PLANS):
        program = make_program([RandomRotation(5)], (size, size), 3)
        backend.apply(torch.zeros(1, 3, size, size), None, None, table, program, None)
    assert len(backend._plans) <= fused._KEPT_PLANS
