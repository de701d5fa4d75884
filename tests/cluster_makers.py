"""A source for tests that kill workers; a module of its own, so that a child imports nothing else."""

from __future__ import annotations

import os

from packing_makers import NumbersSource


class TracedSource(NumbersSource):
    """Leaves the process ids of the child and of its worker, so that a test can kill them."""

    def build(self, part, context):
        (self.file.parent / f"pids-{part.index}").write_text(f"{os.getpid()} {os.getppid()}")
        return super().build(part, context)
