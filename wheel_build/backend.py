"""The build backend: setuptools, then a list of dependencies into the wheel, and a wheel without clocks.

Enters: the checkout, `SOURCE_DATE_EPOCH` where it is set. Leaves: a wheel whose bytes depend on the files' content
alone: sorted, with one date, the same modes, and `sboms/sbom.cdx.json` in its `dist-info`. Costs: a second.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
import zipfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  every other hook is setuptools' own

from wheel_build.sbom import sbom_text

ROOT = Path(__file__).resolve().parent.parent
_FIRST_DATE = 315532800  # 1980-01-01: a zip file knows no earlier one


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, object] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel as setuptools does, then add the list and take out what differs between builds."""
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    settle(Path(wheel_directory, name), sbom_text(ROOT))
    return name


def settle(wheel: Path, sbom: str) -> None:
    """Rewrite a wheel with the list of dependencies, sorted, with one date and the same modes."""
    with zipfile.ZipFile(wheel) as file:
        contents = {name: file.read(name) for name in file.namelist() if not name.endswith("/")}
    (record,) = [name for name in contents if name.endswith(".dist-info/RECORD")]
    info = record.removesuffix("RECORD")
    contents[f"{info}sboms/sbom.cdx.json"] = sbom.encode()
    del contents[record]
    lines = [
        f"{_quoted(name)},sha256={_digest(data)},{len(data)}"
        for name, data in sorted(contents.items())
    ]
    date = time.gmtime(max(_FIRST_DATE, int(os.environ.get("SOURCE_DATE_EPOCH", _FIRST_DATE))))[:6]
    temporary = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w") as file:
        # The record comes last, as the specification of wheels recommends.
        listed = "".join(f"{line}\n" for line in [*lines, f"{_quoted(record)},,"]).encode()
        for name, data in [*sorted(contents.items()), (record, listed)]:
            entry = zipfile.ZipInfo(name, date)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            file.writestr(entry, data, compresslevel=9)
    temporary.replace(wheel)


def _quoted(name: str) -> str:
    return f'"{name}"' if "," in name else name


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
