"""Raw files to a finished store: parallel, resumable, gated. `pack()` is the whole of it."""

from stoker.packing.driver import PackOptions, PackResult, pack

__all__ = ["PackOptions", "PackResult", "pack"]
