"""The API reference: public names with their signatures and docstrings, read from the source by griffe.

Enters: the files under `src/stoker`, as text; no module is imported, so nothing heavy is needed and nothing
machine-dependent gets in. Leaves: Markdown by path, one page per room. Costs about three seconds.

A name is public when `__all__` of the package or of one of its modules lists it, or when the docs or an
example use it. A re-exported name stands where it is defined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import griffe

from docs_build.markdown import table, to_markdown

_WIDE = 84
_LONGEST_VALUE = 400
_SHOWN_LABELS = ("property", "classmethod", "staticmethod")


@cache
def read_package(source: Path) -> griffe.Module:
    """Read the package `stoker` in the folder `source`, once: it takes seconds."""
    package = griffe.load(
        "stoker", search_paths=[source.parent], allow_inspection=False, resolve_aliases=True
    )
    assert isinstance(package, griffe.Module)
    return package


def _modules(package: griffe.Module) -> Iterator[griffe.Module]:
    """Yield every module by name, but the command line: its pages are those of the verbs."""
    yield package
    for name in sorted(package.modules):
        if package.modules[name].path != "stoker.cli" and not package.modules[name].is_alias:
            yield from _modules(package.modules[name])


def find_home(package: griffe.Module, module: str, name: str) -> griffe.Object | None:
    """Return what a name that can be imported from `module` stands for; None when it is not ours."""
    try:
        found = package[f"{module}.{name}".removeprefix("stoker.")]
        if found.is_module and name in found.members:
            # `resolve` of `stoker.config.resolve`: griffe keeps the module's name
            found = found[name]
        found = found.final_target if isinstance(found, griffe.Alias) else found
    except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None
    ours = found.path.startswith("stoker.") and not found.path.startswith("stoker.cli.")
    at_top = isinstance(found.parent, griffe.Module) and not isinstance(found, griffe.Module)
    return found if ours and at_top else None


def public_names(
    package: griffe.Module, texts: Iterable[str]
) -> dict[str, dict[str, griffe.Object]]:
    """Return what is public by the module that defines it, and by name.

    Args:
        package: As read.
        texts: Pages and examples; what they import from stoker, or name in full, is public.
    """
    wanted = [
        (module.path, str(name)) for module in _modules(package) for name in module.exports or ()
    ]
    for text in texts:
        for module, names in re.findall(r"^ *from (stoker[\w.]*) import ([\w, ]+)$", text, re.M):
            wanted += [(module, name.strip()) for name in names.split(",")]
        wanted += re.findall(r"\b(stoker(?:\.[a-z_]+)+)\.(\w+)", text)
    homes: dict[str, dict[str, griffe.Object]] = {}
    for module, name in wanted:
        home = find_home(package, module, name)
        if home is not None and not home.name.startswith("_"):
            homes.setdefault(home.module.path, {})[home.name] = home
    return {module: dict(sorted(homes[module].items())) for module in sorted(homes)}


def reference_pages(source: Path, texts: Iterable[str]) -> dict[str, str]:
    """Make the page of every room and the page that lists the names of `import stoker`."""
    package = read_package(source)
    public = public_names(package, texts)
    rooms = {name.split(".")[1] for name in public}
    pages = {f"api/{room}.md": _room(package, room, public) for room in sorted(rooms)}
    return {"api/index.md": _index(package, sorted(rooms))} | pages


def anchor(path: str) -> str:
    """Return the place of a name on its room's page."""
    return path.replace(".", "-").lower()


def _index(package: griffe.Module, rooms: list[str]) -> str:
    rows = []
    for name in map(str, package.exports or ()):
        home = find_home(package, "stoker", name)
        assert home is not None, f"stoker.__all__ lists {name}, which is nowhere defined"
        module = home.module.path
        link = f"{module.split('.')[1]}.md#{anchor(home.path)}"
        rows.append((f"[`{name}`]({link})", _first_sentence(home), f"`{module}`"))
    rooms_rows = [
        (f"[`stoker.{room}`]({room}.md)", _first_sentence(package.modules[room])) for room in rooms
    ]
    return "\n".join([
        "# API reference",
        "",
        "Read from the source when this site is built. Names that begin with an underscore, and modules that",
        "no page, no example and no `__all__` names, may change without notice.",
        "",
        "## `import stoker`",
        "",
        "Loading the package costs nothing: a name is imported when it is first used.",
        "",
        *table(("name", "what it is", "defined in"), rows),
        "",
        "## Rooms",
        "",
        *table(("room", "what it is for"), rooms_rows),
        "",
    ])  # fmt: skip


def _room(
    package: griffe.Module, room: str, public: Mapping[str, Mapping[str, griffe.Object]]
) -> str:
    lines = [f"# stoker.{room}", "", to_markdown(_doc(package.modules[room])), ""]
    for path, names in public.items():
        if path.split(".")[1] != room:
            continue
        if path != f"stoker.{room}":
            module = package[path.removeprefix("stoker.")]
            lines += [f"## {path}", "", to_markdown(_doc(module)), ""]
        for thing in names.values():
            lines += _entry(thing)
    return "\n".join(lines).rstrip() + "\n"


def _entry(thing: griffe.Object) -> list[str]:
    heading = [f"### {thing.name} {{ #{anchor(thing.path)} }}", ""]
    if isinstance(thing, griffe.Attribute):
        shown = thing.source if len(thing.source) <= _LONGEST_VALUE else f"{thing.name} = ..."
        return [*heading, "```python", shown, "```", ""]
    lines = [*heading, "```python", _signature(thing), "```", "", to_markdown(_doc(thing)), ""]
    if isinstance(thing, griffe.Class):
        for name, member in thing.members.items():
            # griffe takes a property for an attribute with a label.
            is_method = member.is_function or "property" in member.labels
            if is_method and not name.startswith("_") and _doc(member):
                title = f"#### {thing.name}.{name} {{ #{anchor(member.path)} }}"
                lines += [title, "", "```python", _signature(member), "```", ""]
                lines += [to_markdown(_doc(member)), ""]
    return lines


def _doc(thing: griffe.Object | griffe.Alias) -> str:
    return thing.docstring.value if thing.docstring else ""


def _signature(thing: griffe.Object | griffe.Alias) -> str:
    """Write how a thing is called, on one line where it fits, else with a line for each argument."""
    lines = [f"@{label}" for label in _SHOWN_LABELS if label in thing.labels]
    head, returns, parameters = thing.name, "", griffe.Parameters()
    if isinstance(thing, griffe.Class):
        parameters = thing.parameters
        if "__init__" in thing.members:
            head = f"class {thing.name}"
        else:  # inherited: from what, then how it is called
            bases = ", ".join(map(str, thing.bases))
            lines.append(f"class {thing.name}" + (f"({bases})" if bases else ""))
            if not parameters:
                return "\n".join(lines)
    elif isinstance(thing, griffe.Function | griffe.Attribute):
        returns = f" -> {thing.annotation}" if thing.annotation else ""
        parameters = thing.parameters if isinstance(thing, griffe.Function) else parameters
    arguments = _arguments(parameters)
    line = f"{head}({', '.join(arguments)}){returns}"
    if len(line) > _WIDE:
        line = "\n".join([f"{head}(", *(f"    {one}," for one in arguments), f"){returns}"])
    return "\n".join([*lines, line])


def _arguments(parameters: griffe.Parameters) -> list[str]:
    """Write each argument with its type and default, and the bare `*` and `/` where they stand."""
    kinds = griffe.ParameterKind
    stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}
    written: list[str] = []
    before: griffe.ParameterKind | None = None
    for number, one in enumerate(parameters):
        if number == 0 and one.name in ("self", "cls"):
            continue
        if before is kinds.positional_only and one.kind is not before:
            written.append("/")
        if one.kind is kinds.keyword_only and before not in (one.kind, kinds.var_positional):
            written.append("*")
        equals = " = " if one.annotation else "="
        # griffe gives `*args` the default `()`.
        default = "" if one.default is None or one.kind in stars else f"{equals}{one.default}"
        annotation = f": {one.annotation}" if one.annotation else ""
        written.append(f"{stars.get(one.kind, '')}{one.name}{annotation}{default}")
        before = one.kind
    return written + ["/"] * (before is kinds.positional_only)


def _first_sentence(thing: griffe.Object) -> str:
    paragraph = " ".join(_doc(thing).split("\n\n", maxsplit=1)[0].split())
    return to_markdown(paragraph).replace("|", "\\|")
