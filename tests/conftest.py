"""Shared fixtures: real data when it is beside the checkout, a GPU when there is one."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers share the cores: threads of torch's that wait for each other cost more than they
    # give, also in the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests start hundreds of processes; told to keep no bytecode, each of them would compile stoker again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts this in the background has SIGINT ignored, also in the processes that tests
    # start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("house")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data, or a skip: it is never committed and never needed."""
    folder = Path(os.environ.get("STOKER_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data not found at {folder}; set STOKER_DATA to its place")
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `gpu` tests with the reason where no CUDA device answers; `slow` unless asked for."""
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
    if "slow" not in (config.option.markexpr or ""):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="a campaign: run `make campaign`"))


def pytest_collection_finish() -> None:
    """Keep what is imported out of the collector's way: tests collect hundreds of times, 0.2 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread():
    """One thread of torch's: small models lose more by sharing than they gain."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
