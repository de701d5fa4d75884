"""The list of dependencies (SBOM) as CycloneDX 1.6: what the package asks for, and the versions it is tested with.

Enters: `pyproject.toml` and `constraints.txt`. Leaves: a text that depends on these two files alone.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

NOT_SHIPPED = ("dev", "docs", "bench", "all")
"""Extras for people who work on stoker itself, and the one that names the others."""


def pins(root: Path) -> dict[str, str]:
    """Return the versions that the tests run on, by normalised name."""
    text = (root / "constraints.txt").read_text("utf-8")
    return {normal(name): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)", text)}


def normal(name: str) -> str:
    """Return a package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(root: Path) -> dict[str, list[tuple[str, str]]]:
    """Return by dependency where it is asked for: "" or an extra, and how."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    asked = {"": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, list[tuple[str, str]]] = {}
    for extra, lines in asked.items():
        if extra not in NOT_SHIPPED:
            for line in lines:
                name = normal(re.match(r"[\w.-]+", line)[0])  # type: ignore[index]
                found.setdefault(name, []).append((extra, line))
    return found


def sbom(root: Path) -> dict[str, Any]:
    """Return the document."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    tested = pins(root)
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    components = []
    for name, places in sorted(requirements(root).items()):
        purl = f"pkg:pypi/{name}" + (f"@{tested[name]}" if name in tested else "")
        components.append(
            {
                "type": "library",
                "bom-ref": purl,
                "name": name,
                **({"version": tested[name]} if name in tested else {}),
                "purl": purl,
                "scope": "required" if any(extra == "" for extra, _ in places) else "optional",
                "properties": [
                    {"name": f"requirement{f'[{extra}]' * bool(extra)}", "value": line}
                    for extra, line in places
                ],
            }
        )
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "purl": own,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [one["bom-ref"] for one in components]}],
    }


def sbom_text(root: Path) -> str:
    """Return the document as text."""
    return json.dumps(sbom(root), indent=1) + "\n"
