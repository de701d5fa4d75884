"""The ladder down from out of memory, as pure decisions; and what is remembered of it."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InputError, StoreError
from stoker.store.remote_cache import user_cache_folder
from stoker.train.oom import (
    Circumstances,
    MemoryLevel,
    Remembered,
    cut,
    exhausted,
    forget_frames,
    is_oom,
    next_level,
    sign_model,
)

DOCUMENTED = MemoryLevel(batch_size=128, pass_size=128, chunk_share=0.75)


def descend(level):
    levels = []
    while (lower := next_level(level)) is not None:
        levels.append(lower)
        level = lower.level
        assert len(levels) < 100
    return levels, level


def test_the_documented_ladder():
    levels, last = descend(DOCUMENTED)
    assert [
        (r.kind, r.level.chunk_share, r.level.pass_size, r.level.is_checkpointed)
        for r in levels[:4]
    ] == [
        ("chunk share", 0.6, 128, False),
        ("batch", 0.6, 96, False),
        ("batch", 0.6, 64, False),
        ("activation checkpointing", 0.6, 64, True),
    ]
    assert [lower.level.pass_size for lower in levels[4:]] == [48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1]
    assert last == replace(DOCUMENTED, chunk_share=0.6, pass_size=1, is_checkpointed=True)


def test_every_reason_says_what_changes_and_keeps_the_effective_batch():
    levels, _ = descend(replace(DOCUMENTED, accumulation_steps=2))
    assert "75%" in levels[0].reason
    assert "60%" in levels[0].reason
    assert levels[1].reason == (
        "128 samples at once, now 96: a batch goes through as 96 + 32, "
        "4 passes per update keep the effective batch at 256"
    )
    assert "third more time" in levels[3].reason
    assert "24 + 24 + 24 + 24 + …" in levels[6].reason
    assert {lower.level.effective_batch for lower in levels} == {256}


@given(
    batch=st.integers(1, 3000),
    steps=st.integers(1, 8),
    share=st.none() | st.sampled_from([0.9, 0.75, 0.6, 0.3]),
    can=st.booleans(),
)
def test_the_ladder_ends_goes_down_only_and_loses_no_sample(batch, steps, share, can):
    start = MemoryLevel(batch, batch, steps, share, can_checkpoint=can)
    level = start
    while (lower := next_level(level)) is not None:
        below = lower.level
        assert below != level
        assert below.pass_size <= level.pass_size
        assert below.effective_batch == batch * steps
        assert below.num_passes == steps * -(-batch // below.pass_size)
        assert sum(cut(batch, below.pass_size)) == batch
        assert max(cut(batch, below.pass_size)) == below.pass_size
        level = below
    assert level.pass_size == 1
    assert level.is_checkpointed == can
    assert level.chunk_share == (None if share is None else min(share, 0.6))


def test_without_blocks_to_recompute_the_batch_goes_on_down():
    levels, last = descend(MemoryLevel(8, 8, can_checkpoint=False))
    assert [lower.level.pass_size for lower in levels] == [6, 4, 3, 2, 1]
    assert "no block can be recomputed" in str(exhausted(last))


@given(batch=st.integers(1, 300), share=st.none() | st.just(0.75), can=st.booleans())
def test_a_batch_that_cannot_be_cut_is_never_cut(batch, share, can):
    level, kinds = MemoryLevel(batch, batch, 1, share, can_checkpoint=can), []
    while (lower := next_level(level, can_cut=False)) is not None:
        level = lower.level
        kinds.append(lower.kind)
        assert level.pass_size == batch
    assert kinds == ["chunk share"] * (share is not None) + ["activation checkpointing"] * can
    error = exhausted(level, can_cut=False)
    assert (
        f"{batch} sample{'s' * (batch > 1)} at once, which cannot go through in parts"
        in error.given
    )
    assert "smaller batch" in error.fix


def test_at_the_bottom_the_error_says_what_is_left_to_change():
    error = exhausted(descend(DOCUMENTED)[1])
    assert isinstance(error, InputError)
    assert "1 sample at once" in error.given
    assert error.allowed
    assert "bf16" in error.fix


@given(st.integers(1, 500), st.integers(1, 500))
def test_a_batch_is_cut_into_full_passes_and_a_rest(num_samples, pass_size):
    sizes = cut(num_samples, pass_size)
    assert sum(sizes) == num_samples
    assert set(sizes[:-1]) <= {pass_size}
    assert 1 <= sizes[-1] <= pass_size


@pytest.mark.parametrize(("batch", "size", "steps"), [(8, 9, 1), (8, 0, 1), (8, 8, 0)])
def test_an_impossible_footing_is_refused(batch, size, steps):
    with pytest.raises(InputError, match="pass_size is"):
        MemoryLevel(batch, size, steps)


# -- is it? --------------------------------------------------------------------------------------


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA out of memory. Tried"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (caused(StoreError("chunk 3"), torch.OutOfMemoryError("x")), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("we ran out of memory of yesterday"), False),
        (ValueError("CUDA out of memory"), False),
        (MemoryError("Unable to allocate 3 GiB for an array"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_the_devices_memory_counts(error, expected):
    assert is_oom(error) is expected


def test_the_drivers_error_code_counts_whatever_its_words():
    error = torch.AcceleratorError("CUDA error: 2")
    assert not is_oom(error)
    error.error_code = 2
    assert is_oom(error)
    error.error_code = 700
    assert not is_oom(error)


def test_torchs_own_cpu_allocator_counts():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_oom(caught.value)


@pytest.mark.gpu
def test_a_real_gpu_out_of_memory_counts():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert is_oom(caught.value)


class Held:
    pass


def test_the_frames_of_an_error_do_not_keep_what_did_not_fit():
    seen = []

    def fail():
        held = Held()
        seen.append(weakref.ref(held))
        try:
            raise torch.OutOfMemoryError("inner")
        except torch.OutOfMemoryError as error:
            raise StoreError("outer") from error

    try:
        fail()
    except StoreError as error:
        kept = error
    gc.collect()
    assert seen[0]() is not None
    forget_frames(kept)
    gc.collect()
    assert seen[0]() is None
    assert is_oom(kept), "the error itself is still whole"


# -- remembered ----------------------------------------------------------------------------------

HERE = Circumstances("Net-1", "NVIDIA H200", 16)
LEARNED = replace(DOCUMENTED, chunk_share=0.6, pass_size=64)


def test_what_fitted_is_recalled_for_the_same_question_only(tmp_path):
    Remembered(tmp_path).remember(HERE, DOCUMENTED, LEARNED)
    again = Remembered(tmp_path)
    assert again.recall(HERE, DOCUMENTED) == LEARNED
    assert again.recall(replace(HERE, gpu="RTX 4070"), DOCUMENTED) is None
    assert again.recall(replace(HERE, free_gib=14), DOCUMENTED) is None
    assert again.recall(HERE, replace(DOCUMENTED, batch_size=256)) is None
    assert again.notes == []
    again.remember(HERE, DOCUMENTED, replace(LEARNED, pass_size=96))
    assert again.recall(HERE, DOCUMENTED).pass_size == 96
    again.forget(HERE)
    again.forget(HERE)
    assert again.recall(HERE, DOCUMENTED) is None


def test_what_fitted_where_batches_cannot_be_cut_is_recalled_too(tmp_path):
    memory, learned = (
        Remembered(tmp_path),
        replace(DOCUMENTED, chunk_share=0.6, is_checkpointed=True),
    )
    memory.remember(HERE, DOCUMENTED, learned)
    assert memory.recall(HERE, DOCUMENTED) == learned
    assert memory.notes == []


def stored(folder):
    (path,) = (folder / "memory").glob("*.json")
    return path


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: text.replace('"learned"', '"forgotten"'),
        lambda text: text.replace('"pass_size": 64', '"pass_size": 65'),
        lambda text: text.replace('"pass_size": 64', '"pass_size": "64"'),
        lambda text: text.replace('"pass_size": 64', '"pass_size": 6400'),
        lambda text: text.replace('"pass_size": 64', '"unknown": 64'),
    ],
)
def test_a_damaged_file_is_ignored_with_a_note(tmp_path, damage):
    memory = Remembered(tmp_path)
    memory.remember(HERE, DOCUMENTED, LEARNED)
    path = stored(tmp_path)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    assert memory.recall(HERE, DOCUMENTED) is None
    assert str(path) in memory.notes[0]
    memory.remember(HERE, DOCUMENTED, LEARNED)
    assert memory.recall(HERE, DOCUMENTED) == LEARNED


def test_a_file_that_is_not_text_is_ignored(tmp_path):
    memory = Remembered(tmp_path)
    memory.remember(HERE, DOCUMENTED, LEARNED)
    stored(tmp_path).write_bytes(b"\xff\xfe\0")
    assert memory.recall(HERE, DOCUMENTED) is None
    assert memory.notes


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    memory = Remembered(tmp_path / "file")
    memory.remember(HERE, DOCUMENTED, LEARNED)
    assert memory.recall(HERE, DOCUMENTED) is None
    memory.forget(HERE)
    assert "is not remembered" in memory.notes[0]


def test_the_file_says_for_what_it_was_learned(tmp_path):
    Remembered(tmp_path).remember(HERE, DOCUMENTED, LEARNED)
    found = json.loads(stored(tmp_path).read_text())
    assert found["circumstances"] == asdict(HERE)
    assert found["learned"]["pass_size"] == 64
    assert [path.name for path in (tmp_path / "memory").glob("*.json")] == [stored(tmp_path).name]


def test_the_users_cache_folder_is_respected(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "stoker"
    assert Remembered().folder == tmp_path / "stoker" / "memory"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert user_cache_folder() == Path.home() / ".cache" / "stoker"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_folder() == Path.home() / ".cache" / "stoker"


def test_free_memory_is_known_in_steps_of_two_gib():
    gib = 1 << 30
    made = [Circumstances.of("m", "g", free).free_gib for free in (0, 2 * gib - 1, 15 * gib + 7)]
    assert made == [0, 0, 14]


def test_a_model_is_signed_by_what_needs_memory():
    make = torch.nn.Linear
    assert sign_model(make(3, 4)) == sign_model(make(3, 4))
    different = {
        sign_model(make(3, 4)),
        sign_model(make(4, 3)),
        sign_model(make(3, 4, bias=False)),
        sign_model(make(3, 4).half()),
        sign_model(make(3, 4), "bf16"),
        sign_model(torch.nn.Sequential(make(3, 4))),
    }
    assert len(different) == 6
    assert sign_model(make(3, 4)).startswith("Linear-")
