"""The folder beside the target where a store is made, kept after a kill and gone after success.

Enters: the target path and the provenance of the store to be made. Leaves: the finished folder
under the target's name, swapped in whole. Costs: the store's size on the same disk while it is
being made.

`OUT.partial/` holds `job.json` (what is being made), `lock`, `scratch/` (the source's own files),
`journals/`, and one folder per stage. Built parts are kept for the next try, later stages are not.
A second packer on the same target is refused by the lock; a job with another provenance throws the
leftovers away and says so.
"""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import IO, Self

from stoker.errors import InputError, StoreError
from stoker.packing.cluster import end_leftovers
from stoker.sources.fingerprint import difference
from stoker.store.manifest import MANIFEST_NAME, Manifest, Provenance
from stoker.store.remote_fetch import as_url, shown
from stoker.store.writer import fsync, write_text_atomically
from stoker.units import format_bytes


class Workshop:
    """A context manager around one pack job.

    Attributes:
        resumed: Whether leftovers of the same job were found.
        note: What was done with other leftovers; "" when there were none.
    """

    def __init__(self, target: Path, provenance: Provenance) -> None:
        self.target = target
        self.folder = target.with_name(target.name + ".partial")
        self._provenance = provenance
        self._lock: IO[str] | None = None
        self.resumed = False
        self.note = ""

    scratch = property(lambda self: self._made("scratch"), doc="The source's own files.")
    journals = property(lambda self: self._made("journals"), doc="The workers' notes.")

    def stage(self, name: str) -> Path:
        """Return the folder of one stage's shards."""
        return self._made(name)

    def _made(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise StoreError(
                f"cannot write beside {self.target}: {error.strerror}.",
                "a folder with write permission",
                f"ls -ld {self.target.parent}",
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise StoreError(
                f"another process is packing {self.target} right now.",
                "one packer per store",
                "wait, or choose another OUT",
            ) from None
        end_leftovers(self.folder / "journals")
        self._sort_leftovers()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._lock is not None
        self._lock.close()

    def _sort_leftovers(self) -> None:
        job = self.folder / "job.json"
        if job.exists():
            try:
                old = Provenance.model_validate_json(job.read_text())
                reason = difference(old, self._provenance)
            except (ValueError, OSError):
                reason = "its job file cannot be read"
            if not reason:
                self.resumed = True
                for child in self.folder.iterdir():
                    if child.name.startswith(("repaired", "kept", "replaced")):
                        shutil.rmtree(child)
                return
            self.note = f"dropped the leftovers of an earlier pack: {reason}"
        for child in self.folder.iterdir():
            if child.name != "lock":
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        write_text_atomically(job, self._provenance.model_dump_json())

    def commit(self, stage: Path, manifest: Manifest, extra_files: dict[str, str]) -> None:
        """Put the finished stage in the target's place. The manifest is written last."""
        for child in stage.iterdir():
            if child.suffix != ".h5":
                child.unlink()
        for name, text in extra_files.items():
            write_text_atomically(stage / name, text)
        write_text_atomically(stage / MANIFEST_NAME, manifest.to_text())
        old = self.folder / "replaced"
        if self.target.exists():
            self.target.replace(old)
        stage.replace(self.target)
        fsync(self.target.parent)
        shutil.rmtree(self.folder)


def check_target(target: Path) -> None:
    """Refuse to replace anything that is not a store of ours, and what is no place on a disk."""
    if (url := as_url(target)) is not None:
        raise InputError(
            f"OUT is {shown(url)}, and stores are packed onto a disk.",
            "a folder of this machine, or of a disk that it mounts",
            "pack into a folder, copy it to the server, and read it there by its URL (docs/remote.md)",
        )
    if target.is_file():
        raise InputError(
            f"{target} is a file.", "a new folder name, or an existing store", "choose another OUT"
        )
    if target.is_dir() and any(target.iterdir()) and not (target / MANIFEST_NAME).exists():
        raise InputError(
            f"{target} is a folder with other things in it.",
            "a new folder name, or an existing store",
            "choose another OUT",
        )


def check_disk(target: Path, needed_bytes: int) -> None:
    """Refuse to begin what cannot end."""
    existing = target.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if needed_bytes > free:
        raise StoreError(
            f"packing {target} needs about {format_bytes(needed_bytes)}; its disk has {format_bytes(free)} free.",
            "enough free space",
            f"df -h {existing}",
        )
