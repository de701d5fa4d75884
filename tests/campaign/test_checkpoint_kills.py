"""kill -9 at 400 random moments of saving: what is left always loads, as new as it was said to be."""

from __future__ import annotations

import pytest

from test_checkpoint import kill_during_saves

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_kill_9_at_any_moment_of_a_save(tmp_path):
    kill_during_saves(tmp_path / "run", kills=400, seed=1)
