"""`prefetch` at its edges: an iteration that outlives `close()`, odd batches, numbers of numpy."""

from __future__ import annotations

import threading
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch

from stoker.errors import InputError
from stoker.loader.prefetch import prefetch
from test_prefetch import Stateful, both_ways, endless, failing, late, settled
from test_slabs import Store, Twice

# -- after close() -----------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("how", ["close", "context", "state"])
def test_an_iteration_that_was_closed_in_the_middle_is_an_error_and_no_short_epoch(how, background):
    wrapped, _ = late(Stateful(), background=background)
    held = iter(wrapped)
    assert [next(held).item() for _ in range(3)] == [0, 1, 2]
    state = wrapped.state_dict()
    if how == "close":
        wrapped.close()
    elif how == "context":
        with wrapped:
            pass
    else:
        wrapped.load_state_dict(state)
    for _ in range(2):  # and stays one
        with pytest.raises(InputError, match="closed after 3 batches of this iteration") as caught:
            next(held)
    assert caught.value.allowed
    assert "begin a new iteration" in caught.value.fix
    assert caught.value.__suppress_context__
    assert wrapped.state_dict() == state, "the refusal moves nothing"
    wrapped.load_state_dict(state)
    assert [batch.item() for batch in wrapped] == [3, 4, 5, 6, 7, 8, 9]
    assert settled()


@both_ways
def test_an_iteration_that_never_took_a_batch_is_closed_too(background):
    wrapped, _ = late(endless(), background=background)
    held = iter(wrapped)
    wrapped.close()
    with pytest.raises(InputError, match="closed after 0 batches"):
        next(held)


@both_ways
def test_an_iteration_that_had_ended_before_close_stays_ended(background):
    wrapped, _ = late([torch.zeros(1)] * 3, background=background)
    held = iter(wrapped)
    assert sum(1 for _ in held) == 3
    wrapped.close()
    with pytest.raises(StopIteration):
        next(held)


@both_ways
def test_one_that_had_taken_every_batch_is_at_its_end(background):
    asked = threading.Event()

    def three():
        for number in range(3):
            yield torch.tensor(number)
        asked.set()

    wrapped, _ = late(three(), background=background)
    held = iter(wrapped)
    assert [next(held).item() for _ in range(3)] == [0, 1, 2]
    assert asked.wait(60)  # the end is seen ahead of the consumer
    wrapped.close()
    with pytest.raises(StopIteration):
        next(held)


@both_ways
def test_one_that_had_failed_before_close_stays_ended(background):
    wrapped, _ = late(failing(2), background=background)
    held = iter(wrapped)
    assert [next(held).item() for _ in range(2)] == [0, 1]
    with pytest.raises(KeyError):
        next(held)
    wrapped.close()
    with pytest.raises(StopIteration):
        next(held)


def test_closing_the_iteration_itself_ends_it_as_a_generators_close_does():
    wrapped, _ = late(Stateful())
    held = iter(wrapped)
    next(held)
    state = wrapped.state_dict()
    held.close()
    with pytest.raises(StopIteration):
        next(held)
    assert wrapped.state_dict() == state == {"position": 1}, (
        "not that of the loader, which is ahead"
    )
    wrapped.close()


def test_a_consumer_that_waits_while_another_thread_closes_is_told():
    go_on = threading.Event()

    def slow():
        yield torch.zeros(1)
        go_on.wait(60)
        yield torch.zeros(1)

    wrapped, _ = late(slow())
    held, caught = iter(wrapped), []
    next(held)

    def consume():
        try:
            next(held)
        except (InputError, StopIteration) as error:
            caught.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    closer = threading.Thread(target=wrapped.close)
    closer.start()
    consumer.join(60)
    go_on.set()
    closer.join(60)
    assert [type(error) for error in caught] == [InputError]


def test_a_new_iteration_after_close_is_whole():
    wrapped, _ = late([torch.tensor(number) for number in range(5)])
    held = iter(wrapped)
    next(held)
    wrapped.close()
    assert [batch.item() for batch in wrapped] == [0, 1, 2, 3, 4]


# -- batches of classes of one's own -----------------------------------------------------------


@both_ways
def test_batches_of_ones_own_classes_are_not_written_to_and_keep_their_class(background):
    plain = namedtuple("plain", "x y")
    x = torch.arange(3)
    batches = [Store(x=x), Twice(x), plain(x, "a"), UserDict(x=x)]
    wrapped, engine = late(batches, background=background)
    received = list(wrapped)
    assert [type(batch) for batch in received] == [Store, Twice, plain, UserDict]
    for mine in (received[0]["x"], received[1].x, received[2].x, received[3]["x"]):
        assert engine.is_here(mine)
        assert torch.equal(mine, x)
    for theirs in (batches[0]["x"], batches[1].x, batches[2].x, batches[3]["x"]):
        assert theirs is x


# -- numbers -----------------------------------------------------------------------------------


def test_depth_takes_whole_numbers_of_numpy():
    wrapped = prefetch([1, 2], "cpu", depth=np.int64(4))
    assert (wrapped.depth, type(wrapped.depth)) == (4, int)


@pytest.mark.parametrize("depth", [True, 2.0, np.float32(2), np.int64(0), "2"])
def test_depth_takes_nothing_else(depth):
    with pytest.raises(InputError, match="depth is") as caught:
        prefetch([1, 2], "cpu", depth=depth)
    assert caught.value.fix == "depth=2"
