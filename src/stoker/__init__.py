"""stoker keeps a GPU fed. The public names; importing does no work and loads no torch."""

from __future__ import annotations

__version__ = "0.1.0"
