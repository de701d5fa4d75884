"""A worker of a pack that was stopped is named, with what lets it go on; its result then comes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest

from stoker import stalls
from stoker.packing.workers import Workers


@dataclass(frozen=True)
class Item:
    index: int
    label: str


def stop_itself_once(item: Item, poison: object) -> int:
    os.kill(os.getpid(), signal.SIGSTOP)
    return item.index


@pytest.mark.timeout(60)
@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
def test_a_stopped_worker_is_named_once_and_goes_on(monkeypatch, then):
    told = []

    def tell(text: str) -> None:
        told.append(text)
        pid = int(text.partition("pid ")[2].partition(")")[0])
        # A worker that is killed is replaced by one that stops itself as well: that one goes on.
        os.kill(pid, then if len(told) == 1 else signal.SIGCONT)

    monkeypatch.setattr(stalls, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(stalls._watch, "_tell", tell)
    with Workers(1, isolated=True) as workers:
        assert list(workers.run(stop_itself_once, [Item(7, "part 7")])) == [(7, 7)]
    assert len(told) == (1 if then is signal.SIGCONT else 2)
    assert "part 7: it is stopped; `kill -CONT" in told[0]
