"""Python that is refused, by the part of the package that refuses it."""

from __future__ import annotations

from typing import Any

from advice_typing import Case


def namespace() -> dict[str, Any]:
    """Return the names that every piece of Python begins with."""
    import numpy as np
    import torch

    import stoker
    from stoker.loader.loader import Loader

    return {"np": np, "torch": torch, "stoker": stoker, "Loader": Loader}


PYTHON: dict[str, list[Case]] = {}
