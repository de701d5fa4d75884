"""`benchmarks/augment.py`: honest timing, peers that are missing, the table, the options."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

# As for the scripts themselves; behind everything else, so that nothing is hidden by their names.
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import augment as script
import augment_compare as bench
import augment_peers as peers
from augment_compare import (
    KORNIA,
    LIMIT,
    OURS_FUSED,
    OURS_GRAPH,
    OURS_TORCH,
    Row,
    Timing,
    cells,
    verdict,
)
from augment_peers import UnavailableError, Work

CPU = torch.device("cpu")
SMALL = Work(2, (12, 16), CPU)


def missing(monkeypatch, *packages: str) -> None:
    """Make packages look as if they were not installed."""
    plain = peers.importlib.import_module

    def no_module(name, package=None):  # somebody may keep it: modules import this function by name
        if name.split(".")[0] in packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
        return plain(name, package)

    monkeypatch.setattr(peers.importlib, "import_module", no_module)


# -- the work ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16])
def test_inputs_are_images_and_the_same_every_time(dtype):
    work = replace(SMALL, input_dtype=dtype, mask=True)
    first, second = work.make_inputs(2), work.make_inputs(2)
    assert not torch.equal(first[0].images, first[1].images), "batches differ from each other"
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.images, b.images)
        assert a.images.dtype == dtype
        assert a.images.float().max() <= (255 if dtype == torch.uint8 else 1)
        assert a.masks.dtype == torch.int64
        assert int(a.masks.max()) < peers.NUM_CLASSES
    assert SMALL.make_inputs(1)[0].masks is None


CASES = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize(
    "name", ["kornia", "torchvision_batch", "torchvision_samples", "stoker_torch"]
)
@pytest.mark.parametrize(("contrast", "mask"), CASES)
@pytest.mark.parametrize(
    ("given_type", "wanted"), [(torch.float32, torch.float32), (torch.uint8, torch.float16)]
)
def test_every_peer_does_the_work_that_is_timed(name, contrast, mask, given_type, wanted):
    work = Work(3, (20, 24), CPU, given_type, wanted, contrast, mask)
    try:
        augment = getattr(peers, name)(work)
    except UnavailableError as error:
        pytest.skip(str(error))
    inputs = work.make_inputs(1)[0]
    made = augment(inputs.images, inputs.masks)
    images, masks = made if mask else (made, None)
    assert images.shape == (3, 3, 20, 24)
    assert images.dtype == wanted
    # ImageNet's normalisation of [0, 1]: black is about -2, white about 2.6.
    assert -2.2 < images.min() < -1.5
    assert 1.0 < images.max() < 2.7
    again = augment(inputs.images, inputs.masks)
    assert not torch.equal(images, again[0] if mask else again), "every call draws anew"
    if masks is not None:
        assert masks.shape == (3, 20, 24)
        assert masks.dtype == torch.int64
        assert not torch.equal(masks, inputs.masks)
        assert set(masks.unique().tolist()) <= set(range(peers.NUM_CLASSES)) | {255}


def test_the_limit_reads_and_writes_everything_once():
    work = replace(SMALL, mask=True)
    inputs = work.make_inputs(1)[0]
    assert torch.equal(peers.copy_limit(work)(inputs.images, inputs.masks), inputs.images)


def test_missing_and_broken_peers_give_their_reason(monkeypatch):
    missing(monkeypatch, "kornia", "torchvision")
    for build, words in (
        (peers.kornia, "kornia is not installed"),
        (peers.torchvision_batch, "torchvision is not installed"),
        (peers.torchvision_samples, "torchvision is not installed"),
        (peers.stoker_fused, "the device is a CPU"),
    ):
        with pytest.raises(UnavailableError, match=words):
            build(SMALL)
    with pytest.raises(UnavailableError, match="the device is a CPU"):
        peers.dali(SMALL, [])

    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist\nand more")

    monkeypatch.setattr(peers.importlib, "import_module", broken)
    with pytest.raises(
        UnavailableError, match="cannot be imported: operator torchvision::nms"
    ) as got:
        peers.torchvision_batch(SMALL)
    assert "\n" not in str(got.value)


def test_dali_is_looked_for_on_a_gpu_only(monkeypatch):
    missing(monkeypatch, "nvidia")
    with pytest.raises(UnavailableError, match="nvidia-dali is not installed"):
        peers.dali(replace(SMALL, device=torch.device("cuda")), [])


# -- timing --------------------------------------------------------------------------------------


def test_timing_is_a_median_in_milliseconds_with_its_spread():
    timing = Timing.of([0.004, 0.001, 0.002])
    assert timing == Timing(2.0, 1.5, 3)
    assert Timing.of([0.5]).spread == 0


def test_calls_are_timed_in_turns_and_take_what_they_take(monkeypatch):
    order, now = [], 0.0
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now))

    def nap(name, seconds):
        def call():
            nonlocal now
            order.append(name)
            now += seconds

        return call

    timings = bench.time_calls({"short": nap("s", 0.002), "long": nap("l", 0.03)}, CPU, 3)
    assert timings["short"] == Timing(pytest.approx(2.0), pytest.approx(0.0), 3)
    assert timings["long"] == Timing(pytest.approx(30.0), pytest.approx(0.0), 3)
    turns = re.sub(r"(.)\1+", r"\1", "".join(order))
    assert turns.endswith("slslsl"), "a noisy moment hits both"
    assert order.count("s") > order.count("l"), "short calls are repeated within a measurement"


@given(st.integers(1, 300), st.integers(2, 700))
def test_inputs_do_not_fit_into_a_gpus_cache(batch, side):
    work = Work(batch, (side, side), torch.device("cuda"), torch.uint8)
    count = bench.num_buffers(work)
    assert 2 <= count <= 64
    total = count * batch * 3 * side * side
    assert total >= bench.SPREAD_BYTES or count == 64
    assert bench.num_buffers(replace(work, device=CPU)) == 2


def test_eager_calls_take_the_inputs_in_turn():
    seen = []
    inputs = SMALL.make_inputs(3)
    call = bench.eager(lambda images, _: seen.append(images), inputs)
    for _ in range(4):
        call()
    assert [next(i for i, x in enumerate(inputs) if x.images is y) for y in seen] == [0, 1, 2, 0]


def test_workers_are_timed_in_whole_bursts():
    seconds = peers.loader_seconds(SMALL, 1, 2, peers.stoker_torch)
    assert len(seconds) == 2
    assert all(0 < each < 10 for each in seconds)


def test_too_little_shared_memory_is_said_before_a_bus_error(monkeypatch):
    monkeypatch.setattr(peers.os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
    with pytest.raises(UnavailableError, match=r"/dev/shm has 4\.00 KiB free and 4 workers need"):
        peers.loader_seconds(Work(8, (64, 64), CPU), 4, 1, peers.stoker_torch)


# -- tables --------------------------------------------------------------------------------------


def made(*rows: Row) -> bench.Comparison:
    return bench.Comparison("flip", SMALL, rows)


def test_ratios_and_rates():
    kornia = Row(KORNIA, "peer", Timing(4.0, 0.1, 3))
    ours = Row(OURS_FUSED, "ours", Timing(0.1, 0.1, 3))
    limit = Row(LIMIT, "limit", Timing(0.05, 0.1, 3))
    absent = Row("DALI", "peer", None, "nvidia-dali is not installed")
    table = made(kornia, ours, absent, limit)
    assert table.times_faster_than(KORNIA, ours) == pytest.approx(40)
    assert table.times_the_limit(ours) == pytest.approx(2)
    assert table.images_per_second(ours) == pytest.approx(20_000)
    assert cells(table, ours) == ["0.1", "10 %", "20,000", "40", "2"]
    assert cells(table, absent) == ["n/a"] * 5
    assert table.times_faster_than("nobody", ours) is None
    assert "40.0 times as fast as Kornia, 2.0 times the copy limit" in verdict([table])


def test_what_was_not_measured_is_null_and_never_zero():
    absent = Row(KORNIA, "peer", None, "kornia is not installed")
    ours = Row(OURS_TORCH, "ours", Timing(1.0, 0.0, 1))
    document = json.loads(json.dumps(made(absent, ours).to_json()))
    first, second = document["rows"]
    assert first["reason"] == "kornia is not installed"
    for key in ("ms", "spread", "images_per_second", "times_faster_than_kornia", "times_the_limit"):
        assert first[key] is None
    assert second["times_faster_than_kornia"] is None
    assert second["ms"] == 1.0
    assert second["spread"] is None
    twice = made(Row(OURS_TORCH, "ours", Timing(1.0, 0.0, 2))).to_json()
    assert twice["rows"][0]["spread"] == 0.0
    assert cells(made(absent, ours), ours)[1] == "n/a", "one measurement has no spread"
    assert "Nothing of ours" in verdict([made(absent)])


def test_three_pieces_of_work():
    found = bench.cases(SMALL)
    assert [(work.contrast, work.mask) for _, work in found] == [
        (False, False), (True, False), (True, True),
    ]  # fmt: skip
    assert len({title for title, _ in found}) == 3


def test_a_comparison_on_this_machine(monkeypatch):
    missing(monkeypatch, "torchvision")
    table = bench.compare("x", SMALL, workers=(1,), repeats=2)
    names = [row.name for row in table.rows]
    assert names[:2] == [
        "CPU, 1 worker: torchvision v2",
        "CPU, 1 worker: stoker torch (stand-in)",
    ]
    by = {row.name: row for row in table.rows}
    assert by[names[0]].timing is None
    assert by[names[0]].reason == "torchvision is not installed"
    for name in (names[1], OURS_TORCH, LIMIT):
        assert by[name].timing is not None
        assert by[name].timing.median_ms > 0
    assert by[OURS_FUSED].reason == by[OURS_GRAPH].reason == "the device is a CPU"
    assert by[names[1]].timing.repeats == 2


def test_a_peer_that_fails_is_a_row_and_ours_is_an_error(monkeypatch):
    def fails(_work):
        def augment(_images, _masks):
            raise RuntimeError("no kernel\nlong story")

        return augment

    kinds = dict(bench._BUILDERS)
    monkeypatch.setattr(bench, "_BUILDERS", kinds | {KORNIA: ("peer", fails)})
    (row,) = bench.compare("x", SMALL, repeats=1, ways=(KORNIA,)).rows
    assert row.timing is None
    assert row.reason == "it failed: RuntimeError: no kernel"
    monkeypatch.setattr(bench, "_BUILDERS", kinds | {OURS_TORCH: ("ours", fails)})
    with pytest.raises(RuntimeError, match="no kernel"):
        bench.compare("x", SMALL, repeats=1, ways=(OURS_TORCH,))


# -- the part `workers` --------------------------------------------------------------------------

QUICK = (
    "--batch",
    "2",
    "--size",
    "12x16",
    "--repeats",
    "1",
    "--workers",
    "none",
    "--device",
    "cpu",
)


@pytest.fixture
def run(monkeypatch, capsys):
    """Return what runs the script's part and returns what it printed."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # it is put back
    monkeypatch.setattr(script, "publish", lambda *_: pytest.fail("a chosen size is not published"))

    def run_script(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["augment.py", "--part", "workers", *options])
        script.main()
        return capsys.readouterr().out

    return run_script


def test_the_part_begins_as_documented(run, monkeypatch):
    missing(monkeypatch, "kornia", "torchvision")
    text = run(*QUICK)
    lines = text.splitlines()
    assert lines[0] == "GPU Augmentation Benchmark:"
    assert lines[1].strip() == "Batch size: 2"
    assert lines[2].strip() == "Image size: 12x16"
    assert text.count("stoker torch ") >= 3
    assert text.count("kornia is not installed") == 3


def test_the_part_prints_json(run, monkeypatch):
    missing(monkeypatch, "kornia", "torchvision")
    document = json.loads(run(*QUICK, "--input", "uint8", "--output", "float16", "--json"))
    assert document["facts"]["Batch size"] == "2"
    assert len(document["cases"]) == 3
    work = document["cases"][2]["work"]
    assert (work["input_dtype"], work["output_dtype"]) == ("uint8", "float16")
    assert work["mask"]
    assert work["contrast"]


@pytest.mark.parametrize(
    "options",
    [
        ["--batch", "0"],
        ["--size", "1x1"],
        ["--size", "big"],
        ["--repeats", "0"],
        ["--workers", "4,x"],
        ["--workers", "0,4"],
        ["--device", "tpu"],
        ["--input", "int64"],
        ["--output", "uint8"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_named(run, capsys, options):
    with pytest.raises(SystemExit) as ended:
        run(*options)
    assert ended.value.code == 2
    assert f"argument {options[0]}: invalid" in capsys.readouterr().err
