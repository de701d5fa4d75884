"""Whether a result of the model reaches an update: read from the script's source, which is not run.

Enters: the lines through which a script calls its model, and those through which it calls `backward`. Leaves: a `Use`.
Costs milliseconds per file. Pure, but for the function that reads files.

The names that hold the result are followed through the statements of a function in their order: what is computed from
them, the lists that they are appended to, what is returned to the caller, what a parameter keeps. The body of a loop is
read twice, because a result may be used in the next round. Reading stops at a call through which the script was seen to
call `backward`: if it gets such a name, or runs only under a condition that depends on one, the result reaches an
update. What goes out of sight is said to do so, and never taken for lost.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Reaches = Literal["update", "nothing", "object", "unknown"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Path = tuple[str, ...]
"""A name and the attributes and constant indices after it: ("self", ".log", "['loss']"); () of anything else."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))  # the second from Python 3.11 on
_EVALUATION = re.compile(
    r"(?:^|_)(?:val|valid\w*|eval\w*|test\w*|acc|accurac\w*|metrics?|scores?|dev|held\w*|hold_?out|monitor\w*|errors?"
    r"|psnr|ssim|m?iou|dice|f1|auc|bleu|rouge|perplexity|ppl|r2|rmse|mae)(?:$|_)",
    re.I,
)
_KEEPING = frozenset((
    "append", "appendleft", "extend", "insert", "add", "push", "put", "put_nowait", "store", "remember", "cache",
    "update", "setdefault", "enqueue", "record", "observe", "step",
))  # fmt: skip
"""Methods after which an object holds what it was given, though their result is used; `step` is a game's."""
_TELLING = re.compile(
    r"print|pprint|write|w?log\w*|info|debug|warning|error|plot|scatter|imshow|dump|save\w*|to_csv|echo"
    r"|add_(?:scalar|image|figure|histogram|text)s?|set_(?:postfix|description)\w*",
    re.I,
)
"""Functions that show or write a value."""
_HARMLESS = frozenset(dir(builtins))


@dataclass(frozen=True)
class Place:
    """A line of the user's code on the stack."""

    file: str
    line: int
    function: str  # name of its function; "<module>" outside of functions


Places = tuple[Place, ...]
"""Lines of the user's code on a stack, from the innermost outwards."""


@dataclass(frozen=True)
class Calls:
    """The user's lines through which a model was called, from the call outwards."""

    places: Places
    is_whole: bool  # whether they lead to the script itself; otherwise a library calls the last one


@dataclass(frozen=True)
class Use:
    """What becomes of a result."""

    # "update" if a backward pass gets it or what is computed from it; "nothing" if it is only told to people or lost;
    # "object" if objects or functions that were not read keep it; "unknown" if the source could not be read
    reaches: Reaches
    # file:line where it ends: of the call, or of the outermost call whose function hands the result on
    where: str = ""
    # whether the source says that it is computed under `torch.no_grad` or `inference_mode`
    without_gradient: bool = False
    evaluates: bool = False  # whether names at these lines say that it is an evaluation

    @property
    def is_other(self) -> bool:
        """Whether the source shows no way to an update."""
        return self.reaches in ("nothing", "object")


def find_use(calls: Calls, updates: Sequence[Places], read: Callable[[str], str | None]) -> Use:
    """Return what becomes of the result of a call; `read` returns the source of a file, or None.

    `updates` are the lines on the stacks of backward passes.
    """
    try:
        return _follow(calls, updates, read)
    except RecursionError:  # expressions that a program wrote
        return Use("unknown", f"{calls.places[0].file}:{calls.places[0].line}")


def _follow(calls: Calls, updates: Sequence[Places], read: Callable[[str], str | None]) -> Use:
    use = Use("nothing")
    inner: _Flow | None = None
    for number, place in enumerate(calls.places):
        use = replace(use, where=f"{place.file}:{place.line}")
        tree = _parsed(read(place.file))
        source = _statement_at(tree.body, place.line) if tree is not None else None
        if tree is None or source is None:
            return replace(use, reaches="unknown")
        use = replace(
            use,
            without_gradient=use.without_gradient or _is_without_gradient(tree, place.line),
            evaluates=use.evaluates or _says_evaluation(place.function, source),
        )
        lines = _Lines.of(updates, place, calls.places[number + 1 :])
        flow = _Flow(tree, _scope_at(tree, place.line), source, lines)
        flow.run(inner)
        if flow.updates:
            return replace(use, reaches="update")
        if flow.is_kept:
            use = replace(use, reaches="object")
        if not flow.goes_on:
            return use
        inner = flow
    # It goes to a library, such as a training step's loss to Lightning, or on beyond the lines that were noted.
    return use if calls.is_whole else replace(use, reaches="update")


@dataclass(frozen=True)
class _Lines:
    """Lines of a file that call `backward`."""

    here: frozenset[int]  # in this function, when it is called from these lines
    of_function: frozenset[int]  # in this function, wherever it is called
    of_file: frozenset[int]

    @classmethod
    def of(cls, updates: Sequence[Places], place: Place, callers: Places) -> _Lines:
        """Return the lines of the file of `place`, whose function `callers` called."""
        here, of_function, of_file = set(), set(), set()
        for stack in updates:
            for number, one in enumerate(stack):
                if one.file != place.file:
                    continue
                of_file.add(one.line)
                if one.function == place.function:
                    of_function.add(one.line)
                    if stack[number + 1 :][: len(callers)] == callers:
                        here.add(one.line)
        return cls(frozenset(here), frozenset(of_function), frozenset(of_file))

    def of_others(self) -> _Lines:
        """Return the lines as they are for the other functions of the file, which anything may call."""
        return _Lines(self.of_file, self.of_file, self.of_file)


@functools.lru_cache(maxsize=32)
def _parsed(source: str | None) -> ast.Module | None:
    try:
        return None if source is None else ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


# -- places in the source ----------------------------------------------------------------------------


def _spans(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _bodies(node: ast.AST) -> Iterable[list[ast.stmt]]:
    """Yield the blocks of statements inside a statement."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def _statement_at(body: Iterable[ast.stmt], line: int) -> ast.stmt | None:
    """Return the innermost statement at a line; a compound one if the line is in its head."""
    for node in body:
        if _spans(node, line):
            inner = (_statement_at(block, line) for block in _bodies(node))
            return next((one for one in inner if one is not None), node)
    return None


def _scope_at(tree: ast.Module, line: int) -> ast.Module | Function:
    """Return the innermost function around a line, or the module."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS) and _spans(node, line) and node.body[0].lineno <= line
    ]
    return max(around, key=lambda node: node.lineno, default=tree)


def _is_without_gradient(tree: ast.Module, line: int) -> bool:
    """Return whether a `with` or a decorator around a line turns gradients off."""
    heads: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.With, ast.AsyncWith)) and _spans(node, line):
            heads += [item.context_expr for item in node.items]
        elif isinstance(node, _FUNCTIONS) and _spans(node, line):
            heads += node.decorator_list
    return any(_turns_gradients_off(head) for head in heads)


def _turns_gradients_off(head: ast.expr) -> bool:
    function, given = (head.func, head.args) if isinstance(head, ast.Call) else (head, [])
    name = _name_of(function)
    if name == "set_grad_enabled":
        return bool(given) and isinstance(given[0], ast.Constant) and not given[0].value
    return name in ("no_grad", "inference_mode")


def _says_evaluation(function: str, source: ast.stmt) -> bool:
    heads = [source] if not any(True for _ in _bodies(source)) else _heads(source)
    names = [function]
    for node in (inner for head in heads for inner in ast.walk(head)):
        if isinstance(node, ast.Name):
            names.append(node.id)
        elif isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.append(node.value)
    return any(_EVALUATION.search(name) for name in names)


def _heads(node: ast.stmt) -> list[ast.expr]:
    """Return the expressions of a compound statement that are not in its blocks."""
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return [node.iter]
    if isinstance(node, (ast.While, ast.If)):
        return [node.test]
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [item.context_expr for item in node.items]
    return [node.subject] if isinstance(node, ast.Match) else []


def _drops(statement: ast.stmt) -> bool:
    """Return whether a statement drops what its expression returns."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(one, ast.Name) and one.id == "_" for one in statement.targets)
    return isinstance(statement, ast.Expr)


# -- names -------------------------------------------------------------------------------------------


def _name_of(function: ast.expr) -> str:
    """Return the last name of what is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _path_of(node: ast.expr) -> Path:
    """Return the path of an expression; an index that is no constant stands for the whole."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        path = _path_of(node.value)
        if path and isinstance(node, ast.Attribute):
            return (*path, f".{node.attr}")
        if path and isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return (*path, _index(node.slice.value))
        return path
    return ()


def _index(value: object) -> str:
    return f"[{value!r}]"


def _reads(path: Path, held: Path) -> bool:
    """Return whether a path that is read is the held one, a part of it, or the whole around it."""
    for part, other in zip(path, held, strict=False):
        if part != other:
            return part.startswith(".") and other.startswith("[")  # such as values() of a dict
    return True


def _parameters_of(node: Function) -> list[str]:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [one.arg for one in (*named, arguments.vararg, arguments.kwarg) if one is not None]


@functools.lru_cache(maxsize=64)
def _bound_in(node: Function) -> set[str]:
    """Return the names that are a function's own: its parameters, and what it assigns to."""
    inside = list(ast.walk(node))
    stored = {
        one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    shared = {
        name for one in inside if isinstance(one, (ast.Global, ast.Nonlocal)) for name in one.names
    }
    return {*_parameters_of(node), *stored} - shared


@functools.lru_cache(maxsize=32)
def _imported_in(tree: ast.Module) -> set[str]:
    """Return the names that a file imports: modules, and functions of other files."""
    return {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


# -- following names ---------------------------------------------------------------------------------


class _Flow:
    """Follows the value of one statement through its function, and through functions that share its names."""

    def __init__(
        self,
        tree: ast.Module,
        scope: ast.Module | Function,
        source: ast.stmt | None,
        lines: _Lines,
    ) -> None:
        self._tree, self._scope, self._source, self._lines = tree, scope, source, lines
        # Parts of the statement's value that are followed; () is all of it.
        self._parts: set[Path] = {()}
        self._kept_there: set[Path] = set()  # what holds the value once the statement has run
        self._forgets = True  # whether a name that is assigned anew holds the value no more
        self._names: set[Path] = set()  # what holds the value now
        self._ever: set[Path] = set()  # what has held it
        self._containers: set[Path] = set()  # objects that hold it as a part
        self._unread: set[Path] = set()  # results of calls that got it, which nothing has read yet
        self._returned: set[Path] = set()  # parts of the returned value that hold it
        self.updates = False  # whether a backward pass gets it
        self.is_kept = False  # whether an object that other code may read keeps it

    def run(self, inner: _Flow | None) -> None:
        """Follow the value, which the function of `inner` left to its caller if it is not the model's own result."""
        if inner is not None:
            self._parts = inner._returned
            self._kept_there = self._names_of_caller(inner) | inner.shared
        self._block(self._scope.body)
        self._read_others()
        self.is_kept |= any(self._is_handed_on(path[0]) for path in self._containers)

    @property
    def goes_on(self) -> bool:
        """Whether the caller may get the value: returned, in a parameter, or in a variable that functions share."""
        kept = {path[0] for path in self._containers} & set(self._parameters())
        return bool(self._returned or self.shared or kept)

    @property
    def shared(self) -> set[Path]:
        """What holds the value and is not the function's own."""
        if isinstance(self._scope, ast.Module):
            return set()
        own = _bound_in(self._scope)
        return {path for path in self._ever if path[0] not in own}

    def _parameters(self) -> list[str]:
        return [] if isinstance(self._scope, ast.Module) else _parameters_of(self._scope)

    def _names_of_caller(self, inner: _Flow) -> set[Path]:
        """Return what holds the value once the function of `inner` was called, by what its parameters got."""
        names, found = inner._parameters(), set[Path]()
        called = "" if isinstance(inner._scope, ast.Module) else inner._scope.name
        for call in ast.walk(self._source) if self._source is not None else ():
            if not isinstance(call, ast.Call) or _name_of(call.func) != called:
                continue
            given = {one.arg: _path_of(one.value) for one in call.keywords if one.arg}
            positions = list(names)
            if isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"]):
                given[positions.pop(0)] = _path_of(call.func.value)
            given |= {
                name: _path_of(value) for name, value in zip(positions, call.args, strict=False)
            }
            found |= {(*given[name], *rest) for name, *rest in inner._containers if given.get(name)}
        return found

    def _read_others(self) -> None:
        """Read the other functions of the file that call `backward` and share names with this one."""
        outside = {path for path in self._ever if path[0] in ("self", "cls")} | self.shared
        for node in ast.walk(self._tree):
            if (
                not isinstance(node, (ast.Module, *_FUNCTIONS))
                or node is self._scope
                or self.updates
            ):
                continue
            inside = isinstance(self._scope, ast.Module) or node in ast.walk(self._scope)
            shared = set(self._ever if inside else outside)
            if not isinstance(node, ast.Module):
                own = _bound_in(node) - {"self", "cls"}
                shared = {path for path in shared if path[0] not in own}
            other = _Flow(self._tree, node, None, self._lines.of_others())
            if shared and other._has_update(node):
                other._names, other._forgets = shared, False
                other._block(node.body)
                self.updates |= other.updates

    def _is_handed_on(self, name: str) -> bool:
        """Return whether another object may hold this one: it is an argument of a function that was not read."""
        return any(
            isinstance(call, ast.Call)
            and self._asks_others(call)
            and not _TELLING.fullmatch(_name_of(call.func))
            and any(isinstance(part, ast.Name) and part.id == name for part in call.args)
            for call in ast.walk(self._tree)
        )

    def _has_update(self, node: ast.AST) -> bool:
        return any(self._is_update(one) for one in ast.walk(node) if isinstance(one, ast.Call))

    def _is_update(self, call: ast.Call) -> bool:
        if any(_spans(call, line) for line in self._lines.here):
            return True
        name = _name_of(call.func)
        known = any(_spans(call, line) for line in self._lines.of_function)
        return ("backward" in name or name == "grad") and not known

    # -- statements --

    def _block(self, statements: Iterable[ast.stmt]) -> None:
        for node in statements:
            if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                self._statement(node)
                if node is self._source:
                    for path in self._kept_there:
                        self._keep(path)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self._store(node.target, self._holds(node.iter, node))
            self._twice(node.body)
            self._block(node.orelse)
        elif isinstance(node, ast.While):
            self.is_kept |= bool(self._holds(node.test, node))  # it decides how long the loop runs
            self._twice(node.body)
            self._block(node.orelse)
        elif isinstance(node, (ast.If, ast.Match)):
            if self._holds(_heads(node)[0], node):
                self._decides(node)
            before, after = set(self._names), set[Path]()
            for block in (*_bodies(node), ()):
                self._names = set(before)
                self._block(block)
                after |= self._names
            self._names = after
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                held = self._holds(item.context_expr, node)
                if item.optional_vars is not None:
                    self._store(item.optional_vars, held)
            self._block(node.body)
        elif isinstance(node, _TRIES):
            for block in _bodies(node):
                self._block(block)
        else:
            self._simple(node)

    def _decides(self, node: ast.stmt) -> None:
        """Note that the value decides whether blocks run: an update in them needs it, and so may the rest of a loop."""
        for inner in (one for block in _bodies(node) for part in block for one in ast.walk(part)):
            self.updates |= isinstance(inner, ast.Call) and self._is_update(inner)
            self.is_kept |= isinstance(inner, (ast.Break, ast.Continue, ast.Return, ast.Raise))

    def _twice(self, body: Sequence[ast.stmt]) -> None:
        """Read the body of a loop, which may not run at all, and once more with the names of its first round."""
        before = set(self._names)
        for _ in range(2):
            self._block(body)
            self._names |= before

    def _simple(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            held = self._holds(node.value, node)
            for target in node.targets:
                self._store(target, held)
                if held and node is not self._source and self._asks_others(node.value):
                    self._unread.add(_path_of(target))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._store(node.target, self._holds(node.value, node))
        elif isinstance(node, ast.AugAssign):
            if self._holds(node.value, node):
                self._store(node.target, {()})
        elif isinstance(node, ast.Return):
            self._returned |= self._holds(node.value, node) if node.value is not None else set()
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._store(target, set())
        else:
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.expr):
                    self._holds(part, node)

    def _store(self, target: ast.expr, held: set[Path]) -> None:
        """Assign a value of which these parts are followed; () is all of it."""
        if isinstance(target, (ast.Tuple, ast.List)):
            has_star = any(isinstance(one, ast.Starred) for one in target.elts)
            for number, one in enumerate(target.elts):
                whole: set[Path] = {()} if () in held or (has_star and held) else set()
                parts = {part[1:] for part in held if part[:1] == (_index(number),)}
                self._store(one, whole or parts)
            return
        path = _path_of(target)
        is_whole = isinstance(target, (ast.Name, ast.Attribute)) or path != _path_of_whole(target)
        if path in self._unread:
            self.is_kept = True  # nobody reads the result: the call was made for what it does
            self._unread.discard(path)
        if path and is_whole and self._forgets:
            self._names = {one for one in self._names if one[: len(path)] != path}
        for part in held:
            if isinstance(target, ast.Name) and not part:
                self._names.add(path)
                self._ever.add(path)
            else:
                self._keep((*path, *part))

    def _keep(self, path: Path) -> None:
        """Note that an object holds the value; one that is not a plain name may be read anywhere."""
        self.is_kept |= not path or any(part.startswith(".") for part in path[1:])
        if path:
            self._names.add(path)
            self._ever.add(path)
            self._containers.add(path)

    # -- expressions --

    def _holds(self, node: ast.expr, statement: ast.stmt) -> set[Path]:
        """Return the parts of an expression that hold the value, () for all of it; note what its calls do with it."""
        begins = statement is self._source and bool(self._parts)
        is_dropped = _drops(statement)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                self._call(inner, begins, is_dropped and inner is node)
            elif isinstance(inner, ast.NamedExpr) and (begins or self._names_it(inner.value)):
                self._store(inner.target, {()})
            elif isinstance(inner, (ast.Yield, ast.YieldFrom)) and (
                begins or self._names_it(inner)
            ):
                self._returned.add(())
        if begins and isinstance(node, ast.Call):
            return set(self._parts)
        return self._parts_of(node, begins)

    def _parts_of(self, node: ast.expr, begins: bool) -> set[Path]:
        if isinstance(node, (ast.Tuple, ast.List)) and not any(
            isinstance(one, ast.Starred) for one in node.elts
        ):
            pairs = [(_index(number), one) for number, one in enumerate(node.elts)]
        elif isinstance(node, ast.Dict) and all(isinstance(one, ast.Constant) for one in node.keys):
            keys = [one.value for one in node.keys if isinstance(one, ast.Constant)]
            pairs = [(_index(key), one) for key, one in zip(keys, node.values, strict=True)]
        else:
            whole = begins or self._names_it(node)
            path = _path_of(node)
            inside = {one[len(path) :] for one in self._names if path and one[: len(path)] == path}
            # A name of which only parts hold the value hands these parts on.
            return (inside or {()}) if whole else set()
        if begins:
            # The model is called in one of them: it is not known in which, unless the others call nothing.
            calling = [
                pair for pair in pairs if any(isinstance(n, ast.Call) for n in ast.walk(pair[1]))
            ]
            return {(index, *part) for index, one in calling for part in self._parts_of(one, True)}
        return {(index, *part) for index, one in pairs for part in self._parts_of(one, False)}

    def _names_it(self, node: ast.AST) -> bool:
        """Return whether an expression reads what holds the value; what it reads is unread no more."""
        if not self._names:
            return False
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            path = _path_of(node)
            if path and not isinstance(node.ctx, ast.Store):
                index = isinstance(node, ast.Subscript) and self._names_it(node.slice)
                self._unread -= {one for one in self._unread if _reads(path, one)}
                return index or any(_reads(path, one) for one in self._names)
        return any(self._names_it(inner) for inner in ast.iter_child_nodes(node))

    def _asks_others(self, node: ast.expr) -> bool:
        """Return whether an expression is a call of something that is neither imported nor built in."""
        known = _imported_in(self._tree) | _HARMLESS
        return isinstance(node, ast.Call) and (_path_of(node.func) or ("?",))[0] not in known

    def _call(self, call: ast.Call, begins: bool, is_dropped: bool) -> None:
        given = begins or any(
            self._names_it(part) for part in (*call.args, *(one.value for one in call.keywords))
        )
        if (given or self._names_it(call.func)) and self._is_update(call):
            self.updates = True
        name = _name_of(call.func)
        if not given or _TELLING.fullmatch(name):
            return
        owner = _path_of(call.func.value) if isinstance(call.func, ast.Attribute) else ()
        is_module = owner[:1] and owner[0] in _imported_in(self._tree)
        if (name in _KEEPING or is_dropped or name.endswith("_")) and owner and not is_module:
            self._keep(owner)
        elif is_dropped or (name in _KEEPING and not is_module):
            self.is_kept = True  # the call is made for what it does


def _path_of_whole(target: ast.expr) -> Path:
    """Return the path of what an index belongs to; () of a target without an index."""
    return _path_of(target.value) if isinstance(target, ast.Subscript) else ()
