"""Ranks: several processes that train one model, and small collectives between them.

Enters: the environment that torchrun sets. Leaves: `Ranks`, whose answers are the same on every rank. Costs: a
handshake at the start, and per call one small message through the host's network, never through the GPU. With
one rank every call returns at once.

Contract: methods marked "Collective" must be called by every rank, in the same order.
Success: `join` leaves the process group and stops the heartbeat.
An error on one rank inside `shared_fate`: every rank raises it, the others as `OtherRankError`.
A lost rank: the others name it and end with `RankLostError`, or their heartbeat ends them (`heartbeat.py`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import stoker
from stoker.errors import EXIT_OURS, InputError, OtherRankError, StokerError
from stoker.train.heartbeat import HEARTBEAT, Heartbeat

_T = TypeVar("_T")
_is_alone: ContextVar[bool] = ContextVar("stoker_alone", default=False)
_EXIT_NOTICE_SECONDS = 6.0
_MEETING_SECONDS = 0.02


class RankLostError(StokerError, RuntimeError):
    """Another process of the run has ended or does not respond; the last checkpoint stays."""

    exit_code = EXIT_OURS


@dataclass(frozen=True)
class Ranks:
    """This process's rank among those that train together.

    Attributes:
        rank: Number of this rank, 0 to `world_size` - 1.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this machine, which share its memory, disk and page cache.
        joined: Whether a process group exists; also with one rank, as under `torchrun --nproc-per-node 1`.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    joined: bool = False

    @classmethod
    def current(cls) -> Ranks:
        """Return the ranks of torch's process group; a single rank if there is no group."""
        if _is_alone.get() or not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        rank, size = distributed.get_rank(), distributed.get_world_size()
        return cls(rank, size, int(os.environ.get("LOCAL_WORLD_SIZE", size)), joined=True)

    @staticmethod
    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        """Context in which `current` returns a single rank: for measurements that may fail on one rank only."""
        token = _is_alone.set(True)
        try:
            yield
        finally:
            _is_alone.reset(token)

    @property
    def are_several(self) -> bool:
        """Whether there is more than one rank."""
        return self.world_size > 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks: nested tensors, numbers and text. Collective.

        With several ranks tensors are returned on the CPU.
        """
        if not self.are_several:
            return [value]
        written = io.BytesIO()
        torch.save(value, written)  # plain pickles lose the type of some tensors
        gathered: list[Any] = [None] * self.world_size
        distributed.all_gather_object(gathered, written.getvalue())
        # To the CPU: another rank's GPU may not exist here, or would need a CUDA context of its own.
        return [torch.load(io.BytesIO(each), "cpu", weights_only=True) for each in gathered]

    def all_of(self, flag: bool) -> bool:
        """Whether the flag is true on every rank. Collective."""
        return self.smallest(int(flag)) == 1

    def smallest(self, number: int) -> int:
        """Return the smallest of all ranks' numbers. Collective."""
        return (
            int(reduce_alike([number], distributed.ReduceOp.MIN)[0]) if self.are_several else number
        )

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """Return the largest of all ranks' numbers, one by one. Collective."""
        if not self.are_several:
            return numbers
        return tuple(int(n) for n in reduce_alike(list(numbers), distributed.ReduceOp.MAX))

    def total(self, *numbers: float) -> tuple[float, ...]:
        """Return the sums over all ranks, one by one, with the same bits on every rank. Collective."""
        if not self.are_several:
            return numbers
        return tuple(reduce_alike(list(numbers), distributed.ReduceOp.SUM))

    def first_does(self, act: Callable[[], _T]) -> _T | None:
        """Call a function on rank 0 only; return its result there, None elsewhere. Collective.

        Raises:
            OtherRankError: On the other ranks, if it failed on rank 0.
        """
        made: _T | None = None
        with self.shared_fate():
            if self.is_first:
                made = act()
        return made

    @contextlib.contextmanager
    def shared_fate(self) -> Iterator[None]:
        """Context in which a StokerError of one rank is raised on all ranks. Collective at its end.

        Without it, the other ranks would wait in a collective for the failed one. The first failed rank raises its
        own error. Other exceptions are not shared.
        """
        if not self.are_several:
            yield
            return
        own: StokerError | None = None
        try:
            yield
        except StokerError as error:
            own = error
        told = self.gather(None if own is None else (str(own), own.exit_code))
        failed = [rank for rank, words in enumerate(told) if words is not None]
        if not failed:
            return
        if own is not None and self.rank == failed[0]:
            raise own
        words, code = told[failed[0]]
        first, *rest = words.splitlines() or [""]
        theirs = OtherRankError(f"rank {failed[0]}: {first}", details=rest)
        theirs.exit_code = code
        raise theirs


def as_ranks(value: Any) -> list[Any]:
    """Return the saved values of all ranks as a list. A run with one rank saves the value without a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def reduce_alike(numbers: list[float] | list[int], how: Any) -> list[float]:
    """Return numbers reduced over all ranks, with the same bits on every rank. Blocks."""
    values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    # A group that the user made may have NCCL only, which needs tensors on the GPU.
    on_gpu = distributed.get_backend() == "nccl"
    values = values.to("cuda") if on_gpu else values
    distributed.all_reduce(values, op=how)
    # The order of a sum, and so its last bits, may differ between ranks.
    distributed.broadcast(values, src=0)
    return [float(value) for value in values.tolist()]


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or a launcher with the same environment variables, has started this process."""
    return all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def num_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the run was restarted after a rank was lost."""
    return sum(int(environment.get(name, "0")) for name in (RESTARTS, "TORCHELASTIC_RESTART_COUNT"))


def launched_at() -> float:
    """Return when the launcher started, in seconds since 1970; the same value after a restart."""
    return float(psutil.Process(os.getppid()).create_time())


RESTARTS = "STOKER_RESTARTS"
"""Environment variable that `launch.py` sets: how often it has restarted the run."""


@contextlib.contextmanager
def join(
    device: str | torch.device | None, stall_seconds: int
) -> Iterator[tuple[Ranks, torch.device]]:
    """Context with this process's ranks and device; a single rank if torchrun did not start it.

    Args:
        device: The user's choice; by default each rank takes the GPU of its local number.
        stall_seconds: All ranks end after this long without progress.

    Raises:
        InputError: There is no GPU for this rank, or ranks run different versions.
        RankLostError: Another rank was lost.
    """
    from stoker.loader.slabs import usable_device

    if not is_launched() or distributed.is_initialized():
        yield Ranks.current(), usable_device(device)
        return
    # Every optimizer imports this module. If it is imported while a group exists, it keeps that group for ever. The
    # group's threads then still run when the interpreter shuts down, and may abort it after all work is done.
    importlib.import_module("torch._dynamo")
    place = _device_of_rank(device)
    timeout = timedelta(seconds=2 * stall_seconds)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
        store=meet(store, rank, world_size, 2 * stall_seconds),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=place if place.type == "cuda" else None,
    )
    ranks = Ranks.current()
    HEARTBEAT.set(
        Heartbeat(ranks.rank, ranks.world_size, stall_seconds) if ranks.are_several else None
    )
    try:
        check_alike(ranks, {"stoker": stoker.__version__, "torch": str(torch.__version__)})
        yield ranks, place
    except Exception as error:
        is_foreign = isinstance(error, RuntimeError) and not isinstance(error, StokerError)
        lost = _find_lost() if is_foreign and ranks.are_several else []
        HEARTBEAT.announce_exit(
            "; ".join(lost) or f"{type(error).__name__}: {error}".splitlines()[0]
        )
        if not lost:
            raise
        raise RankLostError(
            f"{'; '.join(lost)}. This is rank {ranks.rank}, which cannot go on alone.",
            "all ranks of a run, until it ends",
            "the same command with --resume; torchrun --max-restarts 3, or stoker train --gpus, do so",
        ) from error
    finally:
        HEARTBEAT.close()
        gc.collect()  # a reference cycle of a model and its DDP would keep the group alive
        with contextlib.suppress(RuntimeError):
            distributed.destroy_process_group()


def meet(store: Any, rank: int, world_size: int, seconds: float) -> Any:
    """Wait for all ranks; return a part of the store for this start of the run only.

    A launcher's store outlives the processes that it restarts. The keys that they left there (addresses, exit
    notices) would be read as those of the new processes. Machines count restarts differently, so rank 0
    chooses the name of this start. It answers each process under a key that the process itself has chosen, and
    that no earlier process can have left.

    Raises:
        RankLostError: A rank did not arrive in time.
    """
    hall = PrefixStore("stoker", store)
    word = f"{platform.node()}/{os.getpid()}/{time.time_ns()}"
    if rank != 0:
        hall.set(f"word/{rank}", word)
        try:
            turn = hall.get(f"turn/{word}").decode()
        except RuntimeError as error:
            raise _absent("rank 0", seconds) from error
        hall.set(f"here/{turn}/{rank}", "")
        return PrefixStore(f"stoker/{turn}", store)
    told: dict[int, bytes] = {}
    missing, until = list(range(1, world_size)), time.monotonic() + seconds
    while missing:
        for other in missing:
            if hall.check([f"word/{other}"]):
                theirs = hall.get(f"word/{other}")
                if theirs != told.get(other):  # an earlier process of this rank may have left it
                    hall.set(f"turn/{theirs.decode()}", word)
                    told[other] = theirs
        missing = [other for other in missing if not hall.check([f"here/{word}/{other}"])]
        if missing and time.monotonic() > until:
            raise _absent(f"rank {missing[0]}", seconds)
        time.sleep(_MEETING_SECONDS if missing else 0.0)
    return PrefixStore(f"stoker/{word}", store)


def _absent(who: str, seconds: float) -> RankLostError:
    return RankLostError(
        f"{who} has not come within {seconds:.0f} s.",
        "all ranks of a run, at its beginning",
        "look at the output of that rank and its machine",
    )


def _find_lost() -> list[str]:
    """Return a sentence for each lost rank.

    torchrun sends SIGTERM to the others as soon as it sees one gone, before they can report it. This process
    ends anyway, so it ignores the signal until it has reported.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return HEARTBEAT.find_lost(_EXIT_NOTICE_SECONDS)


def check_alike(ranks: Ranks, facts: Mapping[str, Any]) -> None:
    """Raise if ranks have different values of facts that must be the same. Collective.

    Raises:
        InputError: On every rank; it names the ranks that differ from rank 0.
    """
    gathered = ranks.gather((platform.node(), dict(facts)))
    for name, wanted in gathered[0][1].items():
        others = [
            f"{theirs.get(name)} on rank {rank} ({host})"
            for rank, (host, theirs) in enumerate(gathered)
            if theirs.get(name) != wanted
        ]
        if others:
            shown = ", ".join(others[:3]) + (
                f" and {len(others) - 3} more" if len(others) > 3 else ""
            )
            raise InputError(
                f"{name} is {wanted} on rank 0 ({gathered[0][0]}), but {shown}.",
                f"one {name} for all ranks",
                "make the machines alike: the same environment, the same config and the same data",
            )


def _device_of_rank(device: str | torch.device | None) -> torch.device:
    """Return the GPU of this rank's local number; the CPU if the user asked for it or there is no GPU."""
    if torch.device(device or "cuda").type != "cuda" or not torch.cuda.is_available():
        from stoker.loader.slabs import usable_device

        return usable_device(device)
    if device is not None and torch.device(device).index is not None:
        raise InputError(
            f"the device is {device}, and several processes share the work.",
            "cuda, of which every process takes one; or cpu",
            "leave --device out; CUDA_VISIBLE_DEVICES=1,2 chooses the GPUs",
        )
    local, present = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= present:
        raise InputError(
            f"process {local} of this machine has no GPU: there are {present}.",
            f"at most {present} processes here",
            f"--gpus {present}, torchrun --nproc-per-node {present}, or --device cpu",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
