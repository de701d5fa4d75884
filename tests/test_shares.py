"""How `make test` shares its files: every name is a file's, and every test has one share."""

from __future__ import annotations

from pathlib import Path

import shares

FILES = {path.stem.removeprefix("test_") for path in Path(__file__).parent.rglob("test_*.py")}


def test_the_named_files_exist_and_stand_in_one_share():
    together = [name for names in shares.TOGETHER.values() for name in names]
    assert {*together} <= FILES
    assert len(together) == len({*together})
    assert not {*together} & {*shares.LONG_FIRST}
    assert {*shares.LONG_FIRST} <= FILES | {*shares.TOGETHER}
    assert not {*shares.TOGETHER} & FILES


def test_long_shares_come_first_and_their_files_stand_together():
    paths = ["tests/test_bad_machine.py", "tests/test_addresses.py", "tests/test_advice.py",
             "tests/test_export.py", "tests/parity/test_fused_kernels.py"]  # fmt: skip
    # "advice" stands before "bad_machine" in its share.
    assert shares.shares_of(paths) == [[[2], [0]], [[3]], [[1]], [[4]]]
