"""A campaign: stores with mutated bytes must give the right data or a named error, never wrong data.

Run by `make campaign`; STOKER_FUZZ_N sets the number of mutated inputs.
"""

from __future__ import annotations

import os
import shutil
import time

import h5py
import numpy as np
import pytest

from stoker.errors import StokerError
from stoker.store.reader import open_store
from store_makers import simple_shard, write_store

COUNT = int(os.environ.get("STOKER_FUZZ_N", "40000"))


def read_everything(path) -> dict[str, bytes]:
    out = {}
    with open_store(path) as store:
        n = store.num_samples
        for name, info in store.fields.items():
            if info.kind == "dense":
                out[name] = store.read_rows(name, 0, n).tobytes()
            elif info.kind == "ragged":
                values, offsets = store.read_ragged(name, 0, n)
                out[name] = values.tobytes() + offsets.tobytes()
            else:
                for shard in range(len(store.shards)):
                    for part in ("rows", "time", "gap", "ends"):
                        out[f"{name}/{part}/{shard}"] = store.read_series(
                            name, part, shard
                        ).tobytes()
    return out


def mutate(data: bytes, rng: np.random.Generator, hot: list[int]) -> bytes:
    """Flip, overwrite, cut, insert, repeat; half of the time near the file's own structures."""
    raw = bytearray(data)
    at = (
        int(rng.choice(hot)) + int(rng.integers(0, 512))
        if rng.random() < 0.5
        else int(rng.integers(0, len(raw)))
    )
    at = min(at, len(raw) - 1)
    kind = rng.integers(0, 6)
    if kind == 0:
        raw[at] ^= 1 << int(rng.integers(0, 8))
    elif kind == 1:
        width = int(rng.integers(1, 64))
        raw[at : at + width] = rng.bytes(min(width, len(raw) - at))
    elif kind == 2:
        del raw[at:]
    elif kind == 3:
        del raw[at : at + int(rng.integers(1, 4096))]
    elif kind == 4:
        raw[at:at] = rng.bytes(int(rng.integers(1, 4096)))
    else:
        number = (0, 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1)[int(rng.integers(0, 6))]
        raw[at : at + 8] = number.to_bytes(8, "little")[: len(raw) - at]
    return bytes(raw)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_mutated_shards_never_give_wrong_data(tmp_path):
    rng = np.random.default_rng(20261115)
    base = tmp_path / "base"
    write_store(base, [simple_shard(rng, 40), simple_shard(rng, 30)]).close()
    truth = read_everything(base)
    files = {file.name: file.read_bytes() for file in base.iterdir()}
    hot = {name: [0, 96, 512, 2048, max(0, len(data) - 4096)] for name, data in files.items()}
    work = tmp_path / "work"
    shutil.copytree(base, work)
    outcome = {"right": 0, "refused": 0}
    slowest = 0.0
    for number in range(COUNT):
        name = str(rng.choice(sorted(files)))
        mutated = mutate(files[name], rng, hot[name])
        (work / name).write_bytes(mutated)
        began = time.perf_counter()
        try:
            got = read_everything(work)
        except StokerError:
            outcome["refused"] += 1
        else:
            assert got == truth, f"input {number}: wrong data accepted"
            outcome["right"] += 1
        slowest = max(slowest, time.perf_counter() - began)
        (work / name).write_bytes(files[name])
    print(f"\n{COUNT} mutated stores: {outcome}, slowest {slowest * 1e3:.0f} ms")
    assert slowest < 20
    assert outcome["refused"] > COUNT // 4


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_mutated_plain_files_end_in_data_or_a_named_error(tmp_path):
    """Plain HDF5 has no checksums, so wrong values cannot be seen; crashes, hangs and leaks can."""
    rng = np.random.default_rng(7)
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["features"] = rng.normal(size=(50, 8))
        file.create_dataset(
            "gzip", data=rng.normal(size=(50, 8)), chunks=(8, 4), compression="gzip", shuffle=True
        )
        file.create_dataset("group/big", data=np.arange(50).astype(">i4"))
    data = path.read_bytes()
    outcome = {"read": 0, "refused": 0, "crashed inside HDF5": 0, "escaped": 0}
    slowest = 0.0
    for _ in range(COUNT // 2):
        path.write_bytes(mutate(data, rng, [0, 96, 512, 800, 1024, 2048, 4096]))
        began = time.perf_counter()
        # In a child: the HDF5 library itself crashes on some damaged files, and that is not ours.
        child = os.fork()
        if child == 0:
            os._exit(_try_reading(path))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcome[
            {0: "read", 3: "refused"}.get(code, "crashed inside HDF5" if code < 0 else "escaped")
        ] += 1
        slowest = max(slowest, time.perf_counter() - began)
    print(f"\n{COUNT // 2} mutated plain files: {outcome}, slowest {slowest * 1e3:.0f} ms")
    assert slowest < 20
    assert outcome["escaped"] == 0
    assert outcome["crashed inside HDF5"] < COUNT // 200


def _try_reading(path) -> int:
    try:
        read_everything(path)
    except StokerError:
        return 3
    except BaseException:  # noqa: BLE001  anything else is what the test looks for
        return 1
    return 0
