"""Shared fixtures: real data when it is beside the checkout, a GPU when there is one."""

from __future__ import annotations

import fcntl
import functools
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal import charmap

import forked_packers
import kept_commands
import warm_stoker
from forked_workers import (
    pytest_addoption,  # noqa: F401  a hook
    pytest_runtestloop,  # noqa: F401  a hook
    write_bytecode_ahead,
)

# Tests start hundreds of processes; told to keep no bytecode, each of them would compile stoker again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts this in the background has SIGINT ignored, also in the processes that tests
    # start and interrupt; `nohup` has SIGHUP.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile(
    "house",
    deadline=None,
    max_examples=10,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize=True,  # the same examples at every run of `make test`; the campaign draws new ones
)
settings.register_profile(
    "campaign", settings.get_profile("house"), max_examples=400, derandomize=False
)
settings.load_profile("house")
gc.disable()  # until all is collected: what is imported and collected stays
kept_commands.keep()
warm_stoker.do_not_wait_for_the_disk()

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """What was learned on a GPU is kept between runs; not between tests that use this."""
    cache = tmp_path / "cache"
    cache.mkdir()  # torch keeps compiled kernels there, and warns where it is missing
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch, own_cache):
    """A device that captures steps: a GPU, or the CPU with graphs of paper."""
    if request.param == "cpu":
        from paper_graphs import use_paper_graphs  # imports torch

        use_paper_graphs(monkeypatch)
    return request.param


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data, or a skip: it is never committed and never needed."""
    folder = Path(os.environ.get("STOKER_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data not found at {folder}; set STOKER_DATA to its place")
    return folder


def few_that_hold_every_value(cases: list[dict[str, int]]) -> list[int]:
    """Return the numbers of some cases, few of them, in which each parameter takes each of its values."""
    missing = {pair for case in cases for pair in case.items()}
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(missing & set(cases[number].items())))
        missing -= set(cases[best].items())
        chosen.append(best)
    return chosen


def thin(items: list[pytest.Item]) -> None:
    """Leave the combinations that repeat every value of `thinned` tests to the campaign."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thinned") and not item.get_closest_marker("gpu"):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in groups.values():
        values = [{name: id(each) for name, each in item.callspec.params.items()} for item in group]
        kept = set(few_that_hold_every_value(values))
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


NO_GPU = "no CUDA device on this machine"
CAMPAIGN = "a campaign: `make campaign`"
_left_out: Counter[str] = Counter()


def leave_out(config: pytest.Config, items: list[pytest.Item], marker: str, reason: str) -> None:
    """Take the tests with a marker away; the summary says how many and why.

    Each of thousands of skipped tests would cost two messages between a worker and its controller.
    """
    gone = [item for item in items if item.get_closest_marker(marker)]
    if gone:
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
        config.hook.pytest_deselected(items=gone)
        _left_out[reason] += len(gone)


@pytest.hookimpl(tryfirst=True)  # `-m` selects by the markers that are added here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave `gpu` tests out where no CUDA device answers, and `slow` ones unless they are asked for."""
    thin(items)
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.random)
    if "slow" not in (config.option.markexpr or ""):
        leave_out(config, items, "slow", CAMPAIGN)
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            leave_out(config, items, "gpu", NO_GPU)


def pytest_configure(config: pytest.Config) -> None:
    """Start the process that runs the commands of all workers, where there are any."""
    # At exit Python collects what is not frozen; nanobind would report all of triton as leaked, after the summary.
    config.add_cleanup(gc.unfreeze)
    if config.option.workers or "PYTEST_XDIST_WORKER" in os.environ:
        # Several workers share the cores: threads of torch's that wait for each other cost more than they
        # give, also in the processes that tests start.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.option.workers:
        write_bytecode_ahead(config, REPOSITORY / "tests")
        # Whether there is a GPU is asked without starting CUDA, which no fork could use then.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        serving = warm_stoker.for_all_workers()
        serving.__enter__()
        config.add_cleanup(lambda: serving.__exit__(None, None, None))


def pytest_terminal_summary(terminalreporter: object) -> None:
    for reason, count in _left_out.items():
        terminalreporter.write_line(f"left out {count:,}: {reason}")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Keep megabytes out of the names of tests: they travel between the processes many times."""
    is_long = isinstance(val, str | bytes) and len(val) > 200
    return f"{argname} of {len(val)}" if is_long else None


_frozen = {"blocks": 0, "tests": 0}


def freeze() -> None:
    """Keep what is there to stay out of the collector's way: tests collect hundreds of times, 0.3 s each."""
    gc.collect()
    gc.freeze()
    _frozen["blocks"] = sys.getallocatedblocks()


def pytest_collection_finish(session: pytest.Session) -> None:
    forked_packers.fork_packers()
    warm_stoker.grow_few_trees()
    if "torch" in sys.modules:
        warm_stoker.keep_no_stacks()
    if session.config.option.workers:
        charmap.intervals_from_codec("utf-8")  # else every worker, 2 s where no cache is kept
    freeze()
    gc.enable()


def pytest_runtest_teardown() -> None:
    """Do the same for what tests keep: Lightning and transformers, and the parsed sources of the package."""
    _frozen["tests"] += 1
    # To count the blocks is to walk through all pools of memory, 0.6 ms.
    if _frozen["tests"] % 30 == 0 and sys.getallocatedblocks() > _frozen["blocks"] + 200_000:
        freeze()


@pytest.fixture(scope="session")
def once(request, tmp_path_factory):
    """`once(name, make)` is `make(folder)`, which one worker runs; the others get a copy of what it returned."""
    root = tmp_path_factory.getbasetemp()
    if request.config.option.workers or "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the workers' folders stand beside each other in it

    def made(name: str, make):
        kept = root / f"{name}.pickle"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file, and with the process
            if not kept.exists():
                folder = root / name
                folder.mkdir()
                kept.write_bytes(pickle.dumps(make(folder)))
        return pickle.loads(kept.read_bytes())

    return made


@pytest.fixture(scope="session")
def seen(once):
    """What the doctor's probe saw of every script of `doctor_scripts.py`, which run once."""
    from doctor_scripts import watched

    return once("watched", watched)


@pytest.fixture
def logged():
    """The records that are logged from here on, at INFO and above.

    pytest's own `caplog` is left out (`-p no:logging`): it hangs handlers into the 45 loggers of torch and takes them
    out again three times a test, 12 s of CPU for the suite.
    """
    records: list[logging.LogRecord] = []
    handler, root = logging.Handler(logging.INFO), logging.getLogger()
    handler.emit = records.append
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield records
    root.setLevel(before)
    root.removeHandler(handler)


@pytest.fixture
def started_packers(monkeypatch):
    """Have a pack start Python for its workers, as it does outside of tests."""
    monkeypatch.setattr("stoker.packing.workers.subprocess", subprocess)


@pytest.fixture(scope="session")
def one_registry():
    """Have torch's ONNX exporter make its table of operators once a process: it makes it for every export, 0.7 s."""
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry
    with pytest.MonkeyPatch.context() as patch:
        once_made = staticmethod(functools.cache(registry.from_torchlib))
        patch.setattr(registry, "from_torchlib", once_made)
        yield


@pytest.fixture
def one_thread():
    """One thread of torch's: small models lose more by sharing than they gain."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
