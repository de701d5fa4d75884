"""Raw files to a finished store: parallel, resumable, gated. `pack()` is the whole of it."""

from stoker.packing.driver import PackOptions, PackResult, pack, pack_from

__all__ = ["PackOptions", "PackResult", "pack", "pack_from"]
