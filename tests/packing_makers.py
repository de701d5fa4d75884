"""Sources that misbehave on purpose. Module level, so that worker processes can load them."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from stoker.errors import Refusal
from stoker.sources.contract import Part, PartContext, PartData, Preparation
from stoker.store.fields import Dense


@dataclass(frozen=True)
class NumbersSource:
    """`parts` parts of `rows` rows each; row r of part p holds p * 1000 + r.

    `trouble` maps a row number to what happens there: "hang" never returns to Python, "crash"
    is a segmentation fault, "slow" waits, "die-once" kills the process the first time only,
    "die" kills it outside any guarded row, "raise" raises.
    """

    file: Path
    parts: int = 3
    rows: int = 5
    trouble: tuple[tuple[int, str], ...] = ()
    row_limit_seconds: float | None = None
    option: str = "a"

    kind: ClassVar[str] = "numbers"
    version: ClassVar[int] = 1

    def files(self) -> Sequence[Path]:
        return [self.file]

    def options(self) -> Mapping[str, Any]:
        return {"option": self.option}

    def prepare(self, scratch: Path) -> Preparation:
        parts = [Part(n, f"part {n}", self.rows, n * 1000) for n in range(self.parts)]
        return Preparation(parts, 1000, notes=["looked at the numbers"])

    def build(self, part: Part, context: PartContext) -> PartData:
        with (self.file.parent / "built.log").open("a") as log:
            log.write(f"{part.index}\n")
        values, refused = [], []
        for row in range(self.rows):
            number = part.payload + row
            if row in context.poisoned:
                refused.append(Refusal(str(self.file), number, context.poisoned[row], "record"))
                continue
            context.guard(row)
            self._misbehave(dict(self.trouble).get(number, ""), context)
            values.append(float(number))
        context.guard(None)
        return PartData(
            {"features": Dense(np.array(values, "f4").reshape(-1, 1))}, refused, {"n": len(values)}
        )

    def _misbehave(self, what: str, context: PartContext) -> None:
        if what == "hang":
            ctypes.CDLL(None).sleep(600)
        elif what == "crash":
            ctypes.string_at(0)
        elif what == "raise":
            raise RuntimeError("this source is broken")
        elif what == "slow":
            time.sleep(1.5)
        elif what == "die":
            context.guard(None)
            os.kill(os.getpid(), 9)
        elif what == "die-once":
            mark = context.scratch / "died"
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), 9)

    def finish(self, extras: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return {"counts": [extra["n"] for extra in extras]}
