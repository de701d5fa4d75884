"""The API reference: public names with their signatures and docstrings, read from the source.

Enters: the files under `src/stoker`, as text; no module is imported, so nothing heavy is needed and nothing
machine-dependent gets in. Leaves: Markdown by path, one page per room. Costs about a second.

A name is public when `__all__` of the package or of one of its modules lists it, or when the docs or an
example use it. A re-exported name stands where it is defined.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from docs_build.docstrings import to_markdown

_WIDE = 84
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: Dotted.
        doc: Its docstring.
        definitions: Functions and classes by name.
        values: Constants and type aliases by name.
        imported: Names that come from another module of stoker: (module, name there).
        exported: What `__all__` lists.
    """

    name: str
    doc: str
    definitions: Mapping[str, Definition]
    values: Mapping[str, ast.Assign | ast.AnnAssign]
    imported: Mapping[str, tuple[str, str]]
    exported: tuple[str, ...]


def read_modules(source: Path) -> dict[str, Module]:
    """Read every module under `source`, the folder of the package `stoker`, but the command line."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not name.startswith("stoker.cli"):
            modules[name] = _read(name, ast.parse(path.read_text(encoding="utf-8")))
    return modules


def _read(name: str, tree: ast.Module) -> Module:
    definitions: dict[str, Definition] = {}
    values: dict[str, ast.Assign | ast.AnnAssign] = {}
    imported: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            values[node.target.id] = node
    for inner in ast.walk(tree):
        if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("stoker"):
            for alias in inner.names:
                imported[alias.asname or alias.name] = (inner.module or "", alias.name)
    exported: tuple[str, ...] = ()
    if "__all__" in values and (listed := values["__all__"].value) is not None:
        exported = tuple(ast.literal_eval(listed))
    return Module(name, ast.get_docstring(tree) or "", definitions, values, imported, exported)


def find_home(modules: Mapping[str, Module], module: str, name: str) -> tuple[str, str] | None:
    """Say where a name that can be imported from `module` is defined; None when it is not ours."""
    seen = set()
    while (module, name) not in seen and module in modules:
        seen.add((module, name))
        here = modules[module]
        if name in here.definitions or name in here.values:
            return module, name
        if name not in here.imported:
            return None
        module, name = here.imported[name]
    return None


def public_names(modules: Mapping[str, Module], texts: Iterable[str]) -> dict[str, list[str]]:
    """Return the public names by the module that defines them.

    Args:
        modules: All of them.
        texts: Pages and examples; what they import from stoker, or name in full, is public.
    """
    wanted = [(module.name, name) for module in modules.values() for name in module.exported]
    for text in texts:
        for module, names in re.findall(r"^ *from (stoker[\w.]*) import ([\w, ]+)$", text, re.M):
            wanted += [(module, name.strip()) for name in names.split(",")]
        wanted += re.findall(r"\b(stoker(?:\.[a-z_]+)+)\.(\w+)", text)
    homes: dict[str, set[str]] = {}
    for module, name in wanted:
        home = find_home(modules, module, name)
        if home is not None and not home[1].startswith("_"):
            homes.setdefault(home[0], set()).add(home[1])
    return {module: sorted(names) for module, names in sorted(homes.items())}


def reference_pages(source: Path, texts: Iterable[str]) -> dict[str, str]:
    """Make the page of every room and the page that lists the names of `import stoker`."""
    modules = read_modules(source)
    public = public_names(modules, texts)
    rooms: dict[str, list[str]] = {}
    for name in public:
        rooms.setdefault(name.split(".")[1], []).append(name)
    pages = {f"api/{room}.md": _room(room, names, modules, public) for room, names in rooms.items()}
    return {"api/index.md": _index(modules, rooms)} | pages


def anchor(module: str, name: str) -> str:
    """Return the place of a name on its room's page."""
    return f"{module}.{name}".replace(".", "-").lower()


def _index(modules: Mapping[str, Module], rooms: Mapping[str, list[str]]) -> str:
    rows = []
    for name in modules["stoker"].exported:
        home = find_home(modules, "stoker", name)
        assert home is not None, f"stoker.__all__ lists {name}, which is nowhere defined"
        module, own = home
        link = f"{module.split('.')[1]}.md#{anchor(module, own)}"
        rows.append(f"| [`{name}`]({link}) | {_summary(modules[module], own)} | `{module}` |")
    rooms_rows = [
        f"| [`stoker.{room}`]({room}.md) | {_first_sentence(modules[f'stoker.{room}'].doc)} |"
        for room in sorted(rooms)
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
        "| name | what it is | defined in |",
        "|---|---|---|",
        *rows,
        "",
        "## Rooms",
        "",
        "| room | what it is for |",
        "|---|---|",
        *rooms_rows,
        "",
    ])  # fmt: skip


def _room(
    room: str,
    names: list[str],
    modules: Mapping[str, Module],
    public: Mapping[str, list[str]],
) -> str:
    package = modules[f"stoker.{room}"]
    lines = [f"# stoker.{room}", "", to_markdown(package.doc), ""]
    for name in names:
        module = modules[name]
        if name != package.name:
            lines += [f"## {name}", "", to_markdown(module.doc), ""]
        for own in public[name]:
            lines += _entry(module, own)
    return "\n".join(lines).rstrip() + "\n"


def _entry(module: Module, name: str) -> list[str]:
    heading = f"### {name} {{ #{anchor(module.name, name)} }}"
    node = module.definitions.get(name)
    if node is None:
        shown = ast.unparse(module.values[name])
        shown = shown if len(shown) <= 400 else f"{name} = ..."
        return [heading, "", "```python", shown, "```", ""]
    lines = [heading, "", "```python", _signature(node), "```", "", to_markdown(_doc(node)), ""]
    if isinstance(node, ast.ClassDef):
        for method in _methods(node):
            lines += [
                f"#### {name}.{method.name} {{ #{anchor(module.name, name)}-{method.name.lower()} }}",
                "",
            ]
            lines += ["```python", _signature(method), "```", "", to_markdown(_doc(method)), ""]
    return lines


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        inner
        for inner in node.body
        if isinstance(inner, _FUNCTIONS) and not inner.name.startswith("_") and _doc(inner)
    ]


def _doc(node: Definition) -> str:
    return ast.get_docstring(node) or ""


def _signature(node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        return _class_signature(node)
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    kept = [f"@{mark}" for mark in marks if mark in ("property", "classmethod", "staticmethod")]
    skip = 1 if node.args.args and node.args.args[0].arg in ("self", "cls") else 0
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return "\n".join([*kept, _call(node.name, _arguments(node.args)[skip:], returns)])


def _class_signature(node: ast.ClassDef) -> str:
    inits = [
        one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"
    ]
    if inits:
        return _call(f"class {node.name}", _arguments(inits[0].args)[1:], "")
    if any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
        return _call(f"class {node.name}", _fields(node), "")
    bases = [ast.unparse(base) for base in node.bases]
    return f"class {node.name}" + (f"({', '.join(bases)})" if bases else "")


def _fields(node: ast.ClassDef) -> list[str]:
    fields = [
        one
        for one in node.body
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and not one.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(one.annotation)
    ]
    return [ast.unparse(field) for field in fields]


def _arguments(arguments: ast.arguments) -> list[str]:
    """Write each argument with its type and default, and the bare `*` and `/` where they stand."""
    written = []
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for number, (one, default) in enumerate(zip(plain, defaults, strict=True), 1):
        written.append(_argument(one, default))
        if number == len(arguments.posonlyargs):
            written.append("/")
    if arguments.vararg:
        written.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        written.append("*")
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        written.append(_argument(one, default))
    if arguments.kwarg:
        written.append(f"**{_argument(arguments.kwarg, None)}")
    return written


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    typed = f"{one.arg}: {ast.unparse(one.annotation)}" if one.annotation else one.arg
    if default is None:
        return typed
    return (
        f"{typed} = {ast.unparse(default)}" if one.annotation else f"{typed}={ast.unparse(default)}"
    )


def _call(name: str, arguments: list[str], returns: str) -> str:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= _WIDE:
        return line
    return "\n".join([f"{name}(", *(f"    {one}," for one in arguments), f"){returns}"])


def _summary(module: Module, name: str) -> str:
    node = module.definitions.get(name)
    return _first_sentence(_doc(node)) if node is not None else ""


def _first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n", maxsplit=1)[0].split())
    return to_markdown(paragraph).replace("|", "\\|")
