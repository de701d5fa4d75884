"""Several processes that train one model: who this one is, and what all of them agree on.

Enters: what torchrun put into the environment. Leaves: `Ranks`, with small answers that are the same on
every rank. Costs: a handshake at the start, and per question one small message through the host's network,
never through the GPU. Alone, every question answers itself at once.

Every rank must ask the same questions in the same order. A rank that is lost is named by the others
(`heartbeat.py`), and everybody ends.
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
    """Another process of the run has ended or stands still; what was saved last stays."""

    exit_code = EXIT_OURS


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    Attributes:
        rank: Its number, 0 to `world_size` - 1.
        world_size: How many there are.
        local_rank: Its number on this machine.
        local_world_size: How many share this machine's memory, disk and page cache.
        joined: Whether a process group exists; also with one rank, as under `torchrun --nproc-per-node 1`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    joined: bool = False

    @classmethod
    def current(cls) -> Ranks:
        """Return those of torch's process group, if it has been made; else one alone."""
        if _is_alone.get() or not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        rank, size = distributed.get_rank(), distributed.get_world_size()
        local = int(os.environ.get("LOCAL_RANK", rank))
        return cls(rank, size, local, int(os.environ.get("LOCAL_WORLD_SIZE", size)), joined=True)

    @staticmethod
    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        """Let what is made in here work by itself, on every rank: for measurements that may fail on one."""
        token = _is_alone.set(True)
        try:
            yield
        finally:
            _is_alone.reset(token)

    @property
    def are_several(self) -> bool:
        """Whether there is anybody to agree with."""
        return self.world_size > 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks: tensors, numbers and text, in any nesting.

        Tensors come back on the CPU, where there are several ranks.
        """
        if not self.are_several:
            return [value]
        written = io.BytesIO()
        torch.save(value, written)  # plain pickles lose the type of some tensors
        gathered: list[Any] = [None] * self.world_size
        distributed.all_gather_object(gathered, written.getvalue())
        # On the CPU: another rank's GPU may not be there, and would cost a context where it is.
        return [torch.load(io.BytesIO(each), "cpu", weights_only=True) for each in gathered]

    def all_of(self, flag: bool) -> bool:
        """Whether it holds on every rank."""
        return self.smallest(int(flag)) == 1

    def smallest(self, number: int) -> int:
        """Return the smallest of all ranks' numbers."""
        return (
            int(reduce_alike([number], distributed.ReduceOp.MIN)[0]) if self.are_several else number
        )

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """Return the largest of all ranks' numbers, place by place."""
        if not self.are_several:
            return numbers
        return tuple(int(n) for n in reduce_alike(list(numbers), distributed.ReduceOp.MAX))

    def total(self, *numbers: float) -> tuple[float, ...]:
        """Return the sums over all ranks, place by place, with the same bits everywhere."""
        if not self.are_several:
            return numbers
        return tuple(reduce_alike(list(numbers), distributed.ReduceOp.SUM))

    def first_does(self, act: Callable[[], _T]) -> _T | None:
        """Let rank 0 do something; return what it returned there, None elsewhere.

        Raises:
            OtherRankError: On the other ranks, where it failed on rank 0.
        """
        made: _T | None = None
        with self.shared_fate():
            if self.is_first:
                made = act()
        return made

    @contextlib.contextmanager
    def shared_fate(self) -> Iterator[None]:
        """Make an error of one rank in here the end of all of them, told once.

        Nobody waits for a rank that will not come, and no rank goes on where another one cannot.
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
    """Return what each rank has saved; one value is of one rank alone."""
    return list(value) if isinstance(value, list | tuple) else [value]


def reduce_alike(numbers: list[float] | list[int], how: Any) -> list[float]:
    """Return numbers reduced over all ranks, the same bits everywhere; blocking."""
    values = torch.tensor(numbers, dtype=torch.float64)
    # A group made by others may have NCCL alone, which takes tensors on the GPU only.
    on_gpu = distributed.get_backend() == "nccl"
    values = values.to("cuda") if on_gpu else values
    distributed.all_reduce(values, op=how)
    # Sums of floats may depend on the way they took.
    distributed.broadcast(values, src=0)
    return [float(value) for value in values.tolist()]


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or something that speaks like it, has started this process."""
    return all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def num_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often the run was started again after a rank was lost."""
    return sum(int(environment.get(name, "0")) for name in (RESTARTS, "TORCHELASTIC_RESTART_COUNT"))


def launched_at() -> float:
    """When the process began that has started this one, in seconds since 1970; it outlives restarts."""
    return float(psutil.Process(os.getppid()).create_time())


RESTARTS = "STOKER_RESTARTS"
"""Set by `launch.py`, which restarts by itself."""


@contextlib.contextmanager
def join(
    device: str | torch.device | None, stall_seconds: int
) -> Iterator[tuple[Ranks, torch.device]]:
    """Lend this process's place among the ranks, and its device; alone where torchrun did not start it.

    Args:
        device: What was asked for; each rank takes the GPU of its local number by default.
        stall_seconds: How long nobody may move before everybody ends.

    Raises:
        InputError: There is no GPU for this rank, or ranks run different versions.
        RankLostError: Another rank was lost on the way.
    """
    from stoker.loader.loader import pick_device

    if not is_launched() or distributed.is_initialized():
        yield Ranks.current(), pick_device(device)
        return
    # Every optimizer imports it, and imported within a group it keeps that group for good: its threads then
    # live when the interpreter ends, and may abort it after all work is done.
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
        gc.collect()  # a model that is in a circle with its DDP would keep the group too
        with contextlib.suppress(RuntimeError):
            distributed.destroy_process_group()


def meet(store: Any, rank: int, world_size: int, seconds: float) -> Any:
    """Return a part of a store that belongs to this start alone, once all ranks have come.

    A launcher's store outlives the processes that it starts again, and what they left there (addresses,
    exit notices) would be taken for that of the new ones. Machines do not count restarts alike, so rank 0 names
    the start, and tells it to each process by the word that this one has brought: a name that nobody
    else can have left.

    Raises:
        RankLostError: A rank has not come.
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
                if theirs != told.get(other):  # it may have been left by one that is gone
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
    """Return which ranks are gone, each in a sentence.

    torchrun ends the others as soon as it sees one gone, which is too soon to say so: its SIGTERM waits
    until this process, which ends anyway, has spoken.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return HEARTBEAT.find_lost(_EXIT_NOTICE_SECONDS)


def check_alike(ranks: Ranks, facts: Mapping[str, Any]) -> None:
    """Raise when ranks do not agree about something that they must share.

    Raises:
        InputError: On every rank, with the ranks that differ from rank 0.
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
    """Return the GPU of this rank's local number; the CPU where that was asked for or there is none."""
    if torch.device(device or "cuda").type != "cuda" or not torch.cuda.is_available():
        from stoker.loader.loader import pick_device

        return pick_device(device)
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
