"""Two causes at once: the second is named, though the first hides it; and waits of a GPU's host are divided."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from stoker.doctor.findings import Consultation
from stoker.doctor.measurements import (
    DeviceCopy,
    Hdf5Facts,
    HostCall,
    KernelFacts,
    LoaderFacts,
    LoaderWork,
    MachineFacts,
    Measurements,
    MemoryFacts,
    OperatorFacts,
)
from stoker.doctor.probe import clocks, fetching, loading, places, recorder, sampling
from stoker.doctor.rules import diagnose, find_later, why_unjudged
from stoker.measure.readings import Spread

TWO_CORES = MachineFacts(cores=2, physical_cores=2)
H200 = MachineFacts(
    cores=4, physical_cores=4, device="cuda", device_name="NVIDIA H200", pinned_bytes_per_second=5.3e10
)  # fmt: skip


def at(seconds: float, count: int = 50) -> Spread:
    return Spread(seconds, seconds * 0.98, seconds * 1.02, count)


def script(step: float, wait: float, loader: LoaderFacts | None, **more: object) -> Measurements:
    plain = {
        "machine": TWO_CORES,
        "steps": 60,
        "seconds": 60 * step,
        "samples_per_step": 32.0,
        "step_seconds": at(step),
        "wait_seconds": at(wait) if loader else None,
        "compute_seconds": at(step - wait),
        "loader": loader,
    }
    return Measurements("python train.py", **{**plain, **more})  # type: ignore[arg-type]


def loader(workers: int, load: float, work: LoaderWork, **more: object) -> LoaderFacts:
    return LoaderFacts(
        workers=workers, batch_size=32, work=work, alone_seconds=at(load), batch_bytes=8320,
        persistent_workers=True, where="train.py:66", dataset_where="train.py:50", **more,
    )  # fmt: skip


def names(measured: Measurements) -> tuple[list[str], list[str]]:
    found = diagnose(measured)
    return [one.name for one in found], [one.name for one in find_later(measured, found)]


# -- two causes, as they were measured on two cores ------------------------------------------------


def one_worker_and_fetches() -> Measurements:
    """Measured on a host with an H200: the worker is faster than a step that fetches 12,800 values, and no faster."""
    return script(
        0.03014, 0.00139,
        loader(1, 0.0131, LoaderWork(other=0.0128), worker_cpu_shares=(0.43,), main_cpu_share=0.80),
        syncs=(HostCall("train.py:62", "float", 12800.0, 0.02101),),
    )  # fmt: skip


def gzip_and_gc() -> Measurements:
    """Measured here: collecting garbage takes 90 % of a step, and hides that the workers decompress."""
    work = LoaderWork(read=0.0120, collate=0.0010, other=0.0042)
    data = Hdf5Facts("img.h5:/x", (512, 4096), (1, 4096), "gzip", 524288.0, 524288.0, 0.0116, 32.0)
    return script(
        0.16897, 0.0,
        loader(2, 0.01727, work, worker_cpu_shares=(0.05, 0.05), main_cpu_share=0.95),
        compute_seconds=at(0.15507), host_calls=(HostCall("train.py:71", "gc.collect", 1.0, 0.15133),),
        backward_seconds=at(0.0004), optimizer_seconds=at(0.0003), hdf5=(data,),
    )  # fmt: skip


def augment_and_fetches() -> Measurements:
    work = LoaderWork(transform=0.0203, collate=0.0010, other=0.0002)
    return script(
        0.0290, 0.0009,
        loader(2, 0.0215, work, worker_cpu_shares=(0.40, 0.40), main_cpu_share=0.85),
        syncs=(HostCall("train.py:70", "float", 12800.0, 0.0262),),
    )  # fmt: skip


def disk_and_save() -> Measurements:
    """Measured here: two workers that wait for a disk, and a checkpoint in every step."""
    return script(
        0.03497, 0.01897,
        loader(2, 0.0690, LoaderWork(read=0.0680, collate=0.0010), blocked_share=0.95,
               worker_cpu_shares=(0.03, 0.03), main_cpu_share=0.30),
        compute_seconds=at(0.01556), host_calls=(HostCall("train.py:74", "torch.save", 1.0, 0.0085),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "first", "second"),
    [
        (one_worker_and_fetches(), "sync-every-step", "starved-by-loader"),
        (gzip_and_gc(), "gc-each-step", "hdf5-compressed"),
        (augment_and_fetches(), "sync-every-step", "augment-on-cpu"),
        (disk_and_save(), "disk-bound", "saves-too-often"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_second_cause_is_named_behind_the_first(measured, first, second):
    found, later = names(measured)
    assert found[0] == first
    assert [*found, *later][1] == second


def test_costs_that_hide_each_other_are_both_named():
    """Loading beside a step that fetches takes as long as the step: neither remedy alone is worth a tenth."""
    slow = loader(1, 0.029, LoaderWork(other=0.029), worker_cpu_shares=(0.95,), main_cpu_share=0.8)
    fetches = HostCall("train.py:62", "float", 12800.0, 0.018)
    measured = script(0.030, 0.0032, slow, syncs=(fetches,))
    found, later = names(measured)
    assert (found, later) == (["sync-every-step"], ["starved-by-loader"])
    (first,) = diagnose(measured)
    assert first.gain.low == 1.0
    assert "may bring nothing" in first.evidence[-1]
    assert why_unjudged(measured, [first]) == ""
    assert names(replace(measured, syncs=())) == ([], []), (
        "with one of them there is nothing to name"
    )


def test_workers_that_keep_up_with_the_shorter_step_too_are_no_second_cause():
    measured = one_worker_and_fetches()
    quick = loader(1, 0.004, LoaderWork(other=0.004), worker_cpu_shares=(0.1,), main_cpu_share=0.8)
    assert names(replace(measured, loader=quick)) == (["sync-every-step"], [])


def test_what_is_behind_a_finding_without_a_gain_is_told_of_the_next():
    measured = replace(
        one_worker_and_fetches(),
        memory=MemoryFacts(host_bytes_per_step=240_000, host_bytes=1 << 29),
    )
    found, later = names(measured)
    assert found == ["memory-creep", "sync-every-step"]
    assert later == ["starved-by-loader"]


def test_speed_that_cannot_be_judged_is_told_beside_memory_that_grows():
    """Measured on cores that other programs had: no gain of workers can be promised, and none is."""
    busy = loader(0, 0.0206, LoaderWork(other=0.0204), queued_share=0.52, main_cpu_share=0.45)
    measured = script(
        0.02697, 0.02107, busy, memory=MemoryFacts(host_bytes_per_step=270_000, host_bytes=1 << 29)
    )
    found = diagnose(measured)
    assert [one.name for one in found] == ["memory-creep"]
    unjudged = why_unjudged(measured, found)
    assert "other work keeps the cores busy" in unjudged
    told = Consultation(measured, tuple(found), unjudged=unjudged)
    assert told.behind == (f"cannot judge its speed: {unjudged}",)
    assert told.verdict.startswith("memory-creep")


@pytest.mark.parametrize(
    ("persistent", "gain"), [(True, 2.0 / 0.68), (False, (2.0 + 200 / 64) / 0.68)]
)
def test_workers_that_are_not_needed_are_not_restarted_either(persistent, gain):
    quick = replace(
        loader(8, 0.0004, LoaderWork(other=0.0004), main_cpu_share=0.5, worker_cpu_shares=(0.05,) * 8),
        persistent_workers=persistent, epoch_starts=1, epoch_start_seconds=0.2, steps_per_epoch=64,
    )  # fmt: skip
    (found,) = diagnose(script(0.0020, 0.0012, quick))
    assert found.title == "samples are cheaper to make than to get from workers"
    # 0.4 ms of loading and 0.8 of computing, with warm caches: 0.4 and 0.65 of them.
    assert found.gain.likely == pytest.approx(gain)


# -- what the host waits for on a GPU --------------------------------------------------------------


def on_h200(step: float, kernels: KernelFacts, **more: object) -> Measurements:
    pins = LoaderFacts(
        workers=0, batch_size=32, work=LoaderWork(other=1.5e-4), alone_seconds=at(1.8e-4), pin_memory=True
    )  # fmt: skip
    plain = {"machine": H200, "kernels": kernels, "operators": OperatorFacts(28, 8.6e-6)}
    return script(step, 1.9e-4, pins, **{**plain, **more})


def test_fetches_are_not_taken_for_launches():
    """Measured on an H200 (gpu_values): launch-bound was named with × 10.9, because it took the fetches' time too."""
    kernels = KernelFacts(21.0, 1.65e-6, 0.0138)
    fetches = HostCall("train.py:63", "float", 128.0, 0.00111)
    found = {one.name: one for one in diagnose(on_h200(0.00252, kernels, syncs=(fetches,)))}
    assert found["launch-bound"].gain.likely < 2.0
    assert found["sync-every-step"].gain.likely == pytest.approx(1.78, rel=0.1), "as measured"


def test_fetches_behind_a_gpu_that_works_bring_its_time_at_most():
    """As the script is now: 5.4 ms of matrix products, then 512 values one by one."""
    kernels = KernelFacts(25.0, 216e-6, 0.51)
    fetches = HostCall("train.py:63", "float", 512.0, 0.0100)
    found = diagnose(on_h200(0.0105, kernels, syncs=(fetches,)))
    assert [one.name for one in found] == ["sync-every-step"]
    assert found[0].gain.likely == pytest.approx(1 / 0.51, rel=0.1)


def test_workers_make_no_step_shorter_than_its_kernels():
    """The host loads while the GPU computes: what the host does in between is less than the GPU's time."""
    slow = LoaderFacts(
        workers=0, batch_size=32, work=LoaderWork(other=0.014), alone_seconds=at(0.014)
    )
    kernels = KernelFacts(24.0, 333e-6, 0.5)
    measured = replace(
        on_h200(0.016, kernels), loader=slow, wait_seconds=at(0.014), compute_seconds=at(0.002),
        machine=replace(H200, cores=16, physical_cores=16),
    )  # fmt: skip
    (found,) = diagnose(measured)
    assert found.name == "no-workers"
    assert found.gain.high <= 2.0 * 1.16, "half of the step is the GPU's"
    assert found.gain.likely == pytest.approx(2.0, rel=0.01)


def test_a_pageable_copy_is_not_taken_for_launches():
    """A copy of 33 MB from pageable memory beside short kernels, without a DataLoader."""
    measured = replace(
        on_h200(0.0052, KernelFacts(24.0, 6e-6, 0.03)),
        loader=None, wait_seconds=None, compute_seconds=at(0.0052), samples_per_step=None,
        copies=(DeviceCopy("train.py:60", 33.5e6, 0.0041),),
    )  # fmt: skip
    found = diagnose(measured)
    assert found[0].name == "pageable-copies"
    assert found[0].gain.likely == pytest.approx(0.0052 / 0.0011, rel=0.1)
    assert found[0].patch.loader_arguments == {"pin_memory": True}


@pytest.mark.parametrize(("busy", "names"), [(0.95, []), (0.70, ["pageable-copies"])])
def test_a_copy_from_pinned_memory_that_blocks_is_told_if_the_gpu_idles(busy, names):
    copies = (DeviceCopy("train.py:70", 8192.0, 0.0104, pinned=True),)
    found = diagnose(on_h200(0.0120, KernelFacts(24.0, 446e-6, busy), copies=copies))
    assert [one.name for one in found] == names
    for one in found:
        assert "pinned already" in one.remedy
        assert one.patch.loader_arguments == {}


def test_a_batch_is_not_too_small_for_a_gpu_that_always_computes():
    """Measured on an H200 (healthy_class): a host that runs ahead of 10.8 ms of kernels with 32 samples."""
    kernels = KernelFacts(28.0, 384e-6, 1.0)
    measured = on_h200(
        0.010756, kernels, wait_seconds=at(3.7e-4), compute_seconds=at(0.00126), operators=OperatorFacts(33, 1.5e-4)
    )  # fmt: skip
    assert diagnose(measured) == []


def test_a_tiny_batch_on_a_gpu_is_too_small():
    """Measured on an H200 (tiny_batch_plain): nothing was found, because 24 operators took 43 µs each."""
    tiny = LoaderFacts(
        workers=0, batch_size=2, work=LoaderWork(collate=4e-5, other=3e-5), alone_seconds=at(9.5e-5),
        sample_seconds=at(4e-6), batch_bytes=520, pin_memory=False,
    )  # fmt: skip
    measured = script(
        0.001132, 1e-4, tiny, machine=H200, samples_per_step=2.0, kernels=KernelFacts(18.0, 1.32e-6, 0.021),
        operators=OperatorFacts(24, 5.3e-7), copies=(DeviceCopy("train.py:72", 520.0, 5.8e-5, 2.0),),
    )  # fmt: skip
    found = diagnose(measured)
    assert found[0].name == "batch-too-small"
    assert found[0].gain.likely == pytest.approx(27.4, rel=0.2), "as measured"


# -- what the probe itself costs a fetch -----------------------------------------------------------


def test_what_the_sampling_thread_takes_is_not_waiting_for_a_disk(monkeypatch):
    """A fetch that stands still while the sampling thread is awake was queued behind it, not behind a disk."""
    seen = SimpleNamespace(
        role="main", num_fetches=0, num_watched_fetches=0, short_fetches=False, fetches=[], loader_id=0,
        fetch_delay=0.0, held_delay=0.0,
    )  # fmt: skip
    monkeypatch.setattr(recorder, "get", lambda: seen)
    monkeypatch.setattr(recorder, "watching", True)
    monkeypatch.setattr(sampling, "begin", lambda: None)
    monkeypatch.setattr(clocks, "run_delay", lambda _: 0.0)
    awake = iter([1.0, 1.004])
    monkeypatch.setattr(sampling, "awake_seconds", lambda: next(awake))
    fetch = loading._timed_fetch(lambda fetcher, indices: time.sleep(0.02))
    fetch(SimpleNamespace(), [0])
    (row,) = seen.fetches
    assert row.delay == seen.held_delay == pytest.approx(0.004)
    assert row.seconds - row.cpu - row.delay > 0.01, "the rest of the sleep is waiting"


def test_seconds_awake_are_those_on_a_core_and_queued():
    done, told = threading.Event(), threading.Event()

    def work() -> None:
        while time.thread_time() < 0.02:
            pass
        told.set()
        done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    told.wait()
    try:
        assert clocks.awake_seconds(thread) > 0.01
    finally:
        clocks._schedstats.pop(thread.ident, None)
        done.set()
        thread.join()


# -- loops of fetches ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gap", "per_run", "whole"),
    [(2e-6, 1000, True), (2e-4, 400, True), (2e-4, 2, False), (5e-3, 400, False)],
    ids=["values", "values of rows", "a model between", "long gaps"],
)
def test_the_time_between_rows_of_values_belongs_to_their_loop(monkeypatch, gap, per_run, whole):
    """Each call takes 1 µs and follows the one before after 1 µs, but after `per_run` of them there is a gap."""
    seen = SimpleNamespace(
        kind="optimizer", training_thread=clocks.current_thread(), num_steps=5, sync=0.0, drawing=False, spans=[],
        site=lambda *_: site,
    )  # fmt: skip
    site = recorder.Site(sys._getframe(), "float")
    monkeypatch.setattr(recorder, "get", lambda: seen)
    now = 1.0
    for call in range(4 * per_run):
        now += gap if call and call % per_run == 0 else 1e-6
        fetching._add("sync", "float", None, now, now + 1e-6)
        now += 1e-6
    share = site.seconds / (now - 1.0)
    assert share > 0.95 if whole else share < 0.75


def test_generated_code_without_lines_is_no_place():
    code = SimpleNamespace(co_filename="/home/me/train.py")
    mine = SimpleNamespace(f_code=code, f_lineno=7, f_back=None)
    made = SimpleNamespace(f_code=SimpleNamespace(co_filename="<string>"), f_lineno=0, f_back=mine)
    assert places.place_of(made) == "/home/me/train.py:7"
    assert tuple(places.own_places(made)) == ("/home/me/train.py:7",)


def test_a_core_that_waits_for_the_gpu_is_free_once_it_waits_no_more():
    """Figures of an H200 with two cores: 12,800 calls of float() a step, and one worker behind them."""
    machine = MachineFacts(cores=2, device="cuda", device_name="NVIDIA H200")
    slow = loader(1, 0.0119, LoaderWork(other=0.0119), worker_cpu_shares=(0.1,), main_cpu_share=1.0)
    fetched = script(
        0.130,
        0.0014,
        slow,
        machine=machine,
        kernels=KernelFacts(30.0, 1.8e-4, 0.0054 / 0.130),
        syncs=(HostCall("train.py:62", "float", 12_800.0, 0.1267),),
    )
    assert names(fetched) == (["sync-every-step"], ["starved-by-loader"])
