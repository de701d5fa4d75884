"""Where the MOL file of a spectrum is: in a folder, in a zip, or in one SDF.

Enters: the path and the metadata of MSP records. Leaves: an index made once, the places of one
part's structures (small, picklable), and a reader that opens them by position. Costs: the index
of 300,000 zip members takes 5 s and 230 MB for a moment; a worker never lists anything, and reads
one structure in 12 µs (`zipfile` takes 33 µs, and the whole directory in every worker).

Names are compared without case. LIB2NIST writes `id<ID>.mol`, which is preferred, or
`s<CAS>.mol`; `ID<ID>.MOL`, `<DB#>.mol` and `<InChIKey>.mol` occur as well. Inside an SDF the properties
InChIKey, InChI, SMILES, ID, CAS and DB# serve as names, then the title line, which may also be the name of
the compound. A record is looked up by its InChIKey, InChI, SMILES, id and name, in this order. If two files
have one name, the first wins: alphabetical in a folder, file order elsewhere. The caller must compare the
structure with the record.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zipfile
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from stoker.bounds import RECORD, open_zip
from stoker.display import command, look_for
from stoker.errors import SourceError, refuse_special
from stoker.store.fields import Array
from stoker.units import format_bytes

MolHome = Literal["folder", "zip", "sdf"]

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_SPARE_BYTES = 64  # of a member's extra field: read with the header, so that one read suffices
_SDF_END = b"\n$$$$"
_SDF_PROPERTY = re.compile(rb"^>[^<\n]*<([^>\n]*)>[^\n]*\n([^\n]*)", re.MULTILINE)
# LIB2NIST, NIST, MoNA and PubChem spellings of the properties that name a compound.
_SDF_WORDS = {
    "inchikey": "inchikey, inchi_key, inchi key, standard inchikey, pubchem_iupac_inchikey",
    "inchi": "inchi, standard inchi, pubchem_iupac_inchi",
    "smiles": "smiles, canonical_smiles, canonical smiles",
    "id": "id",
    "cas": "cas, casno, cas#, cas number",
    "db": "db#",
}
_SDF_NAMES = {word: noun for noun, words in _SDF_WORDS.items() for word in words.split(", ")}


@dataclass(frozen=True)
class MolPlaces:
    """Where the structures of some records are; one entry per record. Small and picklable."""

    path: Path  # the folder, zip or SDF
    home: MolHome  # which of them
    # file or member names in utf-8, each ended by a zero byte; empty where there is none
    names: bytes
    # `(n, 4)` int64: position, bytes, compression, checksum; position -1 where there is none. A folder has zeros
    # in place of the others.
    table: Array


NO_MOLS = MolPlaces(Path(), "folder", b"", np.empty((0, 4), dtype=np.int64))


class MolIndex:
    """Every structure of a folder, zip or SDF by its names.

    `in_place`: the records are read from this SDF, and the number of each is in its metadata.
    """

    def __init__(self, path: Path, in_place: bool = False) -> None:
        """Read the names in `path`."""
        self.path = path
        self._in_place = in_place
        self.home: MolHome = _home_of(path)
        self._rows: dict[str, int] = {}
        # One blob, not 300,000 strings: these would pin the 170 MB that `zipfile` used.
        names, ends = bytearray(), array("q", [0])
        table = array("q")  # 32 bytes per structure; a list of tuples takes 200
        for keys, name, place in _ENTRIES[self.home](path):
            row = len(ends) - 1
            names += os.fsencode(name) + b"\0"
            ends.append(len(names))
            table.extend(place)
            for key in keys:
                self._rows.setdefault(key.casefold(), row)
        self._names, self._name_ends = bytes(names), ends
        self._table: Array = np.array(table, dtype=np.int64).reshape(-1, 4)

    def __len__(self) -> int:
        return len(self._table)

    def find(self, meta: Mapping[str, Any]) -> int:
        """Return the row of the structure that belongs to a record, or -1."""
        if self._in_place:
            return int(meta.get("sdf_record") or -1)
        for key in _record_keys(meta, is_sdf=self.home == "sdf"):
            row = self._rows.get(key)
            if row is not None:
                return row
        return -1

    def places(self, rows: Array) -> MolPlaces:
        """Return where the structures of these rows are; -1 gives an empty entry."""
        ends = self._name_ends
        names = b"".join(
            self._names[ends[row] : ends[row + 1]] if row >= 0 else b"\0" for row in rows.tolist()
        )
        chosen = np.full((len(rows), 4), -1, dtype=np.int64)
        chosen[rows >= 0] = self._table[rows[rows >= 0]]
        return MolPlaces(self.path, self.home, names, chosen)


class MolReader:
    """Reads structures by place. A context manager; not for several threads."""

    def __init__(self, places: MolPlaces) -> None:
        self._places = places
        self._names = places.names.split(b"\0")
        self._file: int | None = None

    def __enter__(self) -> Self:
        if self._places.home != "folder":
            self._file = os.open(self._places.path, os.O_RDONLY)
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def name(self, record: int) -> str:
        """Return the file or record that the structure is from."""
        return os.fsdecode(self._names[record])

    def knows(self, record: int) -> bool:
        """Whether this record has a MOL file."""
        return record < len(self._places.table) and bool(self._places.table[record, 0] >= 0)

    def read(self, record: int) -> str:
        """Return the text of one structure."""
        name = os.fsdecode(self._names[record])
        try:
            if self._file is None:
                refuse_special(self._places.path / name, "the MOL file")
                content = (self._places.path / name).read_bytes()
            else:
                content = self._read_place(*self._places.table[record].tolist())
        except (OSError, zlib.error, struct.error, ValueError) as error:
            raise SourceError(f"the MOL file {name!r} cannot be read: {error}") from error
        try:
            return content.decode()
        except UnicodeDecodeError:  # names of the 1990s, in the title line
            return content.decode("latin-1")

    def _read_place(self, position: int, num_bytes: int, method: int, checksum: int) -> bytes:
        assert self._file is not None
        if self._places.home == "sdf":
            return os.pread(self._file, num_bytes, position)
        head = os.pread(self._file, _LOCAL_HEADER.size + 512 + _SPARE_BYTES + num_bytes, position)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(head)
        if magic != b"PK\x03\x04":
            raise ValueError("no zip member at its position; the archive changed")
        start = _LOCAL_HEADER.size + name_bytes + extra_bytes
        packed = head[start : start + num_bytes]
        if len(packed) < num_bytes:  # an unusually long name or extra field
            packed = os.pread(self._file, num_bytes, position + start)
        content = packed
        if method != zipfile.ZIP_STORED:
            inflater = zlib.decompressobj(-15)
            content = inflater.decompress(packed, RECORD.most)
            if inflater.unconsumed_tail:
                raise ValueError(f"it has more than {format_bytes(RECORD.most)}")
        if zlib.crc32(content) != checksum:
            raise ValueError("its checksum is wrong")
        return content


def _home_of(path: Path) -> MolHome:
    if path.is_dir():
        return "folder"
    if path.is_file() and zipfile.is_zipfile(path):
        return "zip"
    if path.is_file() and path.suffix.casefold() in {".sdf", ".sd"}:
        return "sdf"
    given = "is neither" if path.exists() else "does not exist as"
    raise SourceError(
        f"MOL files {str(path)!r} {given} a folder, a zip or an .sdf file.",
        "a folder of .mol files, a .zip of them, or one .sdf",
        look_for(path),
    )


def _digits(text: str) -> str:
    return text.replace("-", "").strip()


def _record_keys(meta: Mapping[str, Any], is_sdf: bool) -> Iterator[str]:
    """Yield the names that a record's MOL file may have, best first, without ending; for an SDF also properties."""
    inchikey = str(meta.get("inchikey") or "").strip().casefold()
    if is_sdf:
        for noun, text in (
            ("inchikey", inchikey),
            ("inchi", meta.get("inchi")),
            ("smiles", meta.get("smiles")),
        ):
            if text := str(text or "").strip().casefold():
                yield f"{noun}:{text}"
    if inchikey:
        yield inchikey
    if identifier := str(meta.get("id") or "").strip().casefold():
        yield f"id{identifier}"
    if cas := str(meta.get("cas") or "").strip().casefold():
        yield f"s{_digits(cas)}"
        yield f"s{cas}"
    if database := str(meta.get("db") or "").strip().casefold():
        yield database
    if is_sdf and (name := str(meta.get("name") or "").strip().casefold()):
        yield name


_Entry = tuple[tuple[str, ...], str, tuple[int, int, int, int]]


def _folder_entries(path: Path) -> Iterator[_Entry]:
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries if entry.name.casefold().endswith(".mol"))
    for name in names:
        yield (name[:-4],), name, (0, 0, 0, 0)


def _zip_entries(path: Path) -> Iterator[_Entry]:
    try:
        with open_zip(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError) as error:
        raise SourceError(
            f"the zip {str(path)!r} cannot be read: {error}", "", command("unzip", "-t", path)
        ) from error
    for member in members:
        name = member.filename
        if not name.casefold().endswith(".mol"):
            continue
        if member.flag_bits & 1 or member.compress_type not in {
            zipfile.ZIP_STORED,
            zipfile.ZIP_DEFLATED,
        }:
            raise SourceError(
                f"{name!r} in {str(path)!r} is encrypted or packed by a method we do not read.",
                "stored or deflated members",
                f"{command('unzip', path, '-d', 'mols')}, then --mol-dir mols",
            )
        place = (member.header_offset, member.compress_size, member.compress_type, member.CRC)
        yield (name.rpartition("/")[2][:-4],), name, place


def _sdf_entries(path: Path) -> Iterator[_Entry]:
    if not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start, number = 0, 0
        while start < len(content):
            end = content.find(_SDF_END, start)
            end = len(content) if end < 0 else end
            record = content[start:end]
            if record.strip():
                number += 1
                yield _sdf_keys(record), f"record {number}", (start, end - start, 0, 0)
            newline = content.find(b"\n", end + 1)
            start = len(content) if newline < 0 else newline + 1


def _sdf_keys(record: bytes) -> tuple[str, ...]:
    """Return the names of one SDF record: its properties first, then its title."""
    named: dict[str, str] = {}
    for label, value in _SDF_PROPERTY.findall(record):
        noun = _SDF_NAMES.get(label.decode("latin-1").strip().casefold())
        if noun and value.strip():
            named.setdefault(noun, value.decode("latin-1").strip())
    keys = [f"{noun}:{named[noun]}" for noun in ("inchikey", "inchi", "smiles") if noun in named]
    keys += [f"id{named['id']}"] if "id" in named else []
    keys += [f"s{_digits(named['cas'])}"] if "cas" in named else []
    keys += [named["db"]] if "db" in named else []
    title = record.partition(b"\n")[0].decode("utf-8", "replace").strip()
    return (*keys, title) if title else tuple(keys)


_ENTRIES = {"folder": _folder_entries, "zip": _zip_entries, "sdf": _sdf_entries}
