"""The tool that changes random lines: every change is another program, and the tests nearest to it run first."""

from __future__ import annotations

import ast
from pathlib import Path

from campaign.mutate import draw, is_sound, mutants_of, stages

REPOSITORY = Path(__file__).resolve().parent.parent
CODE = '''\
"""A module: 1 + 1."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    LIMIT = 3


def f(a: int = 3, *, b: "x - y" = True) -> int:
    """Adds 1."""
    if a < b and not a:
        raise ValueError(f"{a + 1}")
    print(a)
    a += 1
    return a * 2 if a else 0
'''


def test_every_kind_of_change_is_made_and_texts_and_hints_are_left_alone(tmp_path):
    (tmp_path / "m.py").write_text(CODE)
    found = mutants_of(tmp_path / "m.py", "loader/m.py")
    assert {mutant.line for mutants in found.values() for mutant in mutants} == {7, 9, 11, 12, 13}
    kinds = {mutant.kind for mutants in found.values() for mutant in mutants}
    assert kinds == {
        "constant", "comparison", "and/or", "not", "condition", "call left out", "update left out",
        "return", "arithmetic", "if/else",
    }  # fmt: skip
    assert all(
        is_sound(tmp_path / "m.py", mutant) for mutants in found.values() for mutant in mutants
    )


def test_a_seed_draws_the_same_lines_and_all_of_them_compile():
    drawn = draw(REPOSITORY, 12, seed=5, rooms=("tune",))
    assert drawn == draw(REPOSITORY, 12, seed=5, rooms=("tune",))
    assert len({(mutant.file, mutant.line) for mutant in drawn}) == 12
    for mutant in drawn:
        lines = (REPOSITORY / "src/stoker" / mutant.file).read_text().splitlines()
        assert lines[mutant.line - 1] == mutant.before
        lines[mutant.line - 1] = mutant.after
        ast.parse("\n".join(lines))


def test_tests_that_import_the_module_come_first_and_none_is_forgotten():
    near, room, others = stages(REPOSITORY / "tests", "loader/order.py")
    assert "tests/test_order.py" in near
    assert "tests/test_lanes.py" in near + room
    assert "tests/test_msp.py" in others
    everything = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        if path.parent.name != "campaign"
    }
    assert sorted(near + room + others) == sorted(everything)
