"""Files of other programs: what a file is by its first bytes, and what to type for it.

Enters: the path of a file that is no store and no HDF5 file, or no table. Leaves: its kind in words with a command that
reads or converts it, or None if the bytes do not tell. Costs: one read of 16 kB.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from stoker.display import command
from stoker.ownership import free_name
from stoker.strict_json import parse_json

_HEAD_BYTES = 16 << 10
_TAR_MARK = slice(257, 262)
TAR, JSON_LINES = "a tar archive", "lines of JSON"
LIBSVM = "in the format of LIBSVM"
_HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4", ".mat", ".h5ad", ".cdf")
_OF_TORCH = (".pt", ".pth", ".ckpt")
_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}


class Foreign(NamedTuple):
    """What a file is, in words that follow "is", and what to type for it."""

    what: str
    fix: str
    convert: str = ""  # the part of `fix` that makes a text of it


def identify_file(path: Path) -> Foreign | None:
    """Return the kind of a file that is not HDF5, and what to type; None if it may be a damaged HDF5 file."""
    head = _read_head(path)
    return name_kind(path) or (_other(path, head) if head else None)


def name_kind(path: Path) -> Foreign | None:
    """Return the kind of a file by its first bytes, and what to type; None for a table of text."""
    head = _read_head(path)
    return _archive(path, head) or _binary(path, head) or text_kind(path, head)


def unused_beside(path: Path, suffix: str) -> str:
    """Return a path beside a file, with another suffix, that no other file has: what is typed must replace none."""
    made = path.with_suffix(suffix)
    return str(free_name(made) if made.exists() else made)


def _read_head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def _archive(path: Path, head: bytes) -> Foreign | None:
    """Recognise archives and compressed files."""
    unpack = command("tar", "--extract", "--file", path)
    if head[_TAR_MARK] == b"ustar":
        return Foreign(TAR, unpack)
    for mark, opener in _OPENERS.items():
        if head.startswith(mark):
            with suppress(OSError, EOFError, lzma.LZMAError, zlib.error), opener(path) as inside:
                if inside.read(512)[_TAR_MARK] == b"ustar":
                    return Foreign(TAR, unpack)
    if head.startswith(b"\x1f\x8b"):
        return Foreign("compressed by gzip", command("gzip", "--decompress", "--keep", path))
    if head.startswith(b"\xfd7zXZ\x00"):
        return Foreign("compressed by xz", command("xz", "--decompress", "--keep", path))
    if head.startswith(b"7z\xbc\xaf"):
        return Foreign("a 7z archive", command("7z", "x", path))
    if head.startswith(b"PK\x03\x04"):
        names: list[str] = []
        with suppress(zipfile.BadZipFile, OSError):
            names = zipfile.ZipFile(path).namelist()
        if path.suffix == ".xlsx" or any(name.startswith("xl/") for name in names):
            return _by_pandas("an Excel workbook", path, "read_excel")
        if any(name.endswith("/data.pkl") for name in names) or path.suffix in _OF_TORCH:
            return _pickled(path)
        return Foreign("a zip archive", command("unzip", path))
    return None


def _binary(path: Path, head: bytes) -> Foreign | None:
    """Recognise binary files, and XML."""
    # Marks of letters only may begin the names of a table's columns, such as "BMI,age"; text holds no zero byte.
    is_text = b"\0" not in head
    is_bitmap = head.startswith((b"GIF8", b"BM")) and not is_text
    is_picture = head.startswith((b"\xff\xd8\xff", b"\x89PNG")) or head[8:12] == b"WEBP"
    if is_picture or is_bitmap:
        return Foreign("a picture", command("stoker", "pack", "images", path.parent, "OUT"))
    if head.startswith(b"RIFF") and head[8:12] == b"WAVE":
        code = (
            f"import scipy.io.wavfile, numpy; numpy.save({unused_beside(path, '.npy')!r}, "
            f"scipy.io.wavfile.read({str(path)!r})[1])"
        )
        return Foreign("a sound", command("python3", "-c", code))
    if head.startswith(b"CDF") and not is_text:
        copy = path.with_name(f"{path.stem}-4{path.suffix}")
        return Foreign("netCDF of version 3", command("nccopy", "-k", "nc4", path, copy))
    if head.startswith(b"GRIB") and not is_text:
        return Foreign(
            "GRIB", command("grib_to_netcdf", "-k", "4", "-o", unused_beside(path, ".nc"), path)
        )
    if head.startswith(b"MATLAB 5.0") or (path.suffix.lower() == ".mat" and _is_matlab_4(head)):
        code = (
            f"import scipy.io, numpy; d = scipy.io.loadmat({str(path)!r}); "
            f"numpy.savez({unused_beside(path, '.npz')!r}, **{{n: v for n, v in d.items() if n[0] != '_'}})"
        )
        return Foreign("a MATLAB file of before 7.3", command("python3", "-c", code))
    if head.startswith(b"ORC") and not is_text:
        return Foreign("an ORC file", _by_arrow(path, "import pyarrow.orc as o", "o.read_table"))
    if head.startswith(b"Obj\x01"):
        code = (
            f"import polars; polars.read_avro({str(path)!r})"
            f".write_parquet({unused_beside(path, '.parquet')!r})"
        )
        return Foreign("an Avro file", command("python3", "-c", code))
    if head.startswith(b"\xd0\xcf\x11\xe0"):
        return _by_pandas("an Excel workbook", path, "read_excel")
    if head.startswith(b"SQLite format 3\0"):
        return Foreign(
            "an SQLite database",
            f"{command('sqlite3', '-csv', '-header', path, 'SELECT * FROM NAME')} > rows.csv",
        )
    if head.startswith(b"<?xml"):
        return _by_pandas("XML", path, "read_xml")
    if head.startswith(b"\x80"):
        return _pickled(path)
    return None


def _is_matlab_4(head: bytes) -> bool:
    """Check the header of the first matrix: type, rows, columns, whether complex, bytes of its name."""
    if len(head) < 20:
        return False
    return any(
        0 <= kind < 5000
        and kind % 10 <= 2
        and rows >= 0
        and columns >= 0
        and complex_ in (0, 1)
        and 0 < name < 256
        for kind, rows, columns, complex_, name in (
            struct.unpack_from(f"{order}5i", head) for order in "<>"
        )
    )


def _other(path: Path, head: bytes) -> Foreign | None:
    """Tell text, which may be a table, from unknown bytes; None if name or content point to HDF5."""
    if path.suffix.lower() in _HDF5_SUFFIXES or b"\x89HDF" in head:
        return None
    if b"\x00" not in head or head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return Foreign("a text", command("stoker", "pack", "table", path, "OUT"))
    return Foreign(f"of an unknown kind (it begins with {head[:8]!r})", command("file", path))


def _pickled(path: Path) -> Foreign:
    load = "torch.load" if path.suffix in _OF_TORCH else "your own code"
    return Foreign(
        "an archive or a pickle",
        f"Loader(data, batch_size), with data read by {load}: arrays or tensors in a dict",
    )


def text_kind(path: Path, head: bytes) -> Foreign | None:
    """Recognise texts that are no tables of cells: JSON, and LIBSVM's `place:number` pairs."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"{"):
        with suppress(ValueError):
            if isinstance(parse_json(start.split(b"\n", 1)[0]), dict):
                made = unused_beside(path, ".csv")
                code = f"import pandas; pandas.read_json({str(path)!r}, lines=True).to_csv({made!r}, index=False)"
                packs = command("stoker", "pack", "table", path, "OUT")
                return Foreign(JSON_LINES, packs, command("python3", "-c", code))
    if start[:1] in (b"{", b"[") and start[1:].lstrip()[:1] in (b"{", b'"', b"["):
        return _by_pandas("JSON", path, "read_json")
    lines = [line.split(b"#")[0].split() for line in start.splitlines()[:50]]
    cells = [line[1:] for line in lines if len(line) > 1]
    if cells and all(_is_placed(cell) for line in cells for cell in line[:20]):
        code = (
            f"import numpy, sklearn.datasets; x, y = sklearn.datasets.load_svmlight_file({str(path)!r}); "
            f"numpy.savez({unused_beside(path, '.npz')!r}, features=x.toarray(), targets=y)"
        )
        return Foreign(LIBSVM, command("python3", "-c", code))
    return None


def _is_placed(cell: bytes) -> bool:
    place, colon, value = cell.partition(b":")
    with suppress(ValueError):
        float(value)
        return bool(colon) and (place.isdigit() or place == b"qid")
    return False


def _by_arrow(path: Path, module: str, read: str) -> str:
    made = unused_beside(path, ".parquet")
    code = f"{module}, pyarrow.parquet as p; p.write_table({read}({str(path)!r}), {made!r})"
    return f"{command('python3', '-c', code)}; {command('stoker', 'pack', 'table', made, 'OUT')}"


def _by_pandas(what: str, path: Path, read: str) -> Foreign:
    made = unused_beside(path, ".csv")
    code = f"import pandas; pandas.{read}({str(path)!r}).to_csv({made!r}, index=False)"
    convert = command("python3", "-c", code)
    return Foreign(what, f"{convert}; {command('stoker', 'pack', 'table', made, 'OUT')}", convert)
