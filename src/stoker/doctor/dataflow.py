"""Whether a result of the model reaches an update: read from the script's source, which is not run.

Enters: the lines through which a script calls its model, and those through which it calls `backward`. Leaves: a `Use`.
Costs milliseconds per file. Pure, but for the function that reads files.

The names that hold the result are followed through the statements of a function in their order: what is computed from
them, the lists that they are appended to, what is returned to the caller. The body of a loop is read twice, because a
result may be used in the next round. Reading stops at a call through which the script was seen to call `backward`: if
it gets such a name, the result reaches an update.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Reaches = Literal["update", "nothing", "object", "unknown"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))  # the second from Python 3.11 on

_EVALUATION = re.compile(
    r"(?:^|_)(?:val|valid\w*|eval\w*|test\w*|acc|accurac\w*|metrics?|scores?|dev|held\w*|hold_?out|monitor\w*|errors?"
    r"|psnr|ssim|m?iou|dice|f1|auc|bleu|rouge|perplexity|ppl|r2|rmse|mae)(?:$|_)",
    re.I,
)
_KEEPING = frozenset((
    "append", "appendleft", "extend", "insert", "add", "push", "put", "put_nowait", "store", "remember", "cache",
    "update", "setdefault", "enqueue",
))  # fmt: skip
"""Methods after which an object holds what it was given."""
_TELLING = re.compile(
    r"print|pprint|write\w*|w?log\w*|info|debug|warning|error|report\w*|record\w*|track\w*|track|show|plot|scatter|bar"
    r"|add_(?:scalar|image|figure|histogram|text)s?|set_(?:postfix|description)\w*|imshow|dump|save\w*|to_csv|echo|step",
    re.I,
)
"""Functions that are told a value and whose own result is not used; `step` is a scheduler's."""


@dataclass(frozen=True)
class Place:
    """A line of the user's code on the stack."""

    file: str
    line: int
    function: str  # name of its function; "<module>" outside of functions


@dataclass(frozen=True)
class Calls:
    """The user's lines through which a model was called, from the call outwards."""

    places: tuple[Place, ...]
    is_whole: bool  # whether they lead to the script itself; otherwise a library calls the last one


@dataclass(frozen=True)
class Use:
    """What becomes of a result."""

    # "update" if a backward pass gets it or what is computed from it; "nothing" if it is only told to people or lost;
    # "object" if objects or functions that were not read keep it; "unknown" if the source could not be read
    reaches: Reaches
    # file:line where it ends: of the call, or of the outermost call whose function returns the result
    where: str = ""
    without_gradient: bool = (
        False  # whether it is computed under `torch.no_grad` or `inference_mode`
    )
    evaluates: bool = False  # whether names at these lines say that it is an evaluation

    @property
    def is_other(self) -> bool:
        """Whether the source shows no way to an update."""
        return self.reaches in ("nothing", "object")


def find_use(calls: Calls, updates: Iterable[Place], read: Callable[[str], str | None]) -> Use:
    """Return what becomes of the result of a call; `read` returns the source of a file, or None."""
    try:
        return _follow(calls, updates, read)
    except RecursionError:  # expressions that a program wrote
        return Use("unknown", f"{calls.places[0].file}:{calls.places[0].line}")


def _follow(calls: Calls, updates: Iterable[Place], read: Callable[[str], str | None]) -> Use:
    trees: dict[str, ast.Module | None] = {}
    lines: dict[str, set[int]] = {}
    for place in updates:
        lines.setdefault(place.file, set()).add(place.line)
    use = Use("nothing")
    for place in calls.places:
        use = replace(use, where=f"{place.file}:{place.line}")
        if place.file not in trees:
            trees[place.file] = _parsed(read(place.file))
        tree = trees[place.file]
        source = _statement_at(tree.body, place.line) if tree is not None else None
        if tree is None or source is None:
            return replace(use, reaches="unknown")
        use = replace(
            use,
            without_gradient=use.without_gradient or _is_without_gradient(tree, place.line),
            evaluates=use.evaluates or _says_evaluation(place.function, source),
        )
        flow = _Flow(source, lines.get(place.file, set()))
        flow.follow(tree, _scope_at(tree, place.line))
        if flow.updates:
            return replace(use, reaches="update")
        if flow.is_kept:
            use = replace(use, reaches="object")
        if not flow.is_returned:
            return use
    # It is returned to a library, such as a training step to Lightning, or at the end of what was read.
    return use if calls.is_whole else replace(use, reaches="update")


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


def _name_of(function: ast.expr) -> str:
    """Return the last name of what is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _path_of(node: ast.expr) -> str:
    """Return a name such as "self.buffer", without indices; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        path = _path_of(node.value)
        return f"{path}.{node.attr}" if path else ""
    return _path_of(node.value) if isinstance(node, (ast.Subscript, ast.Starred)) else ""


# -- following names ---------------------------------------------------------------------------------


class _Flow:
    """Follows the value of one statement through its function, and through functions that share its names."""

    def __init__(self, source: ast.stmt | None, update_lines: set[int]) -> None:
        self._source = source
        self._update_lines = update_lines
        self._names: set[str] = set()  # names that hold the value now
        self._ever: set[str] = set()  # names that have held it
        self.updates = False  # whether a backward pass gets it
        self.is_returned = False
        self.is_kept = False  # whether an object that other code may read keeps it

    def follow(self, tree: ast.Module, scope: ast.Module | Function) -> None:
        """Read the function, then the others of the file that call `backward` and share names with it."""
        self._block(scope.body)
        for node in ast.walk(tree):
            if not isinstance(node, _FUNCTIONS) or node is scope or self.updates:
                continue
            inside = scope is tree or (node in ast.walk(scope))
            shared = {name for name in self._ever if "." in name or inside} - _bound_in(node)
            if shared and self._has_update(node):
                other = _Flow(None, self._update_lines)
                other._names = shared
                other._block(node.body)
                self.updates |= other.updates

    def _has_update(self, node: ast.AST) -> bool:
        return any(self._is_update(one) for one in ast.walk(node) if isinstance(one, ast.Call))

    def _is_update(self, call: ast.Call) -> bool:
        name = _name_of(call.func)
        if "backward" in name or name == "grad":
            return True
        return any(_spans(call, line) for line in self._update_lines)

    def _block(self, statements: Iterable[ast.stmt]) -> None:
        for node in statements:
            if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                self._statement(node)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self._store(node.target, self._holds(node.iter, node))
            self._twice(node.body)
            self._block(node.orelse)
        elif isinstance(node, ast.While):
            self._holds(node.test, node)
            self._twice(node.body)
            self._block(node.orelse)
        elif isinstance(node, (ast.If, ast.Match)):
            self._holds(_heads(node)[0], node)
            before, after = set(self._names), set[str]()
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

    def _twice(self, body: Sequence[ast.stmt]) -> None:
        """Read the body of a loop, which may not run at all, and once more with the names of its first round."""
        before = set(self._names)
        for _ in range(2):
            self._block(body)
            self._names |= before

    def _simple(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, node)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value, node)
        elif isinstance(node, ast.AugAssign):
            if self._holds(node.value, node):
                self._store(node.target, held=True)
        elif isinstance(node, ast.Return):
            self.is_returned |= node.value is not None and self._holds(node.value, node)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._store(target, held=False)
        else:
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.expr):
                    self._holds(part, node)

    def _assign(self, target: ast.expr, value: ast.expr, node: ast.stmt) -> None:
        pairs = (ast.Tuple, ast.List)
        if (
            isinstance(target, pairs)
            and isinstance(value, pairs)
            and len(target.elts) == len(value.elts)
            and not any(isinstance(one, ast.Starred) for one in (*target.elts, *value.elts))
        ):
            held = [self._holds(one, node) for one in value.elts]
            for one, holds in zip(target.elts, held, strict=True):
                self._store(one, holds)
        else:
            self._store(target, self._holds(value, node))

    def _store(self, target: ast.expr, held: bool) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self._store(one, held)
            return
        path = _path_of(target)
        if held:
            self._keep(path)
        elif path and not isinstance(target, ast.Subscript):
            self._names.discard(path)

    def _keep(self, path: str) -> None:
        """Note that an object holds the value; one that is not a plain name may be read anywhere."""
        self.is_kept |= "." in path or not path
        if path:
            self._names.add(path)
            self._ever.add(path)

    def _holds(self, node: ast.expr, statement: ast.stmt) -> bool:
        """Return whether an expression holds the value, and note what its calls do with it."""
        begins = statement is self._source
        found = begins or self._names_it(node)
        is_dropped = _drops(statement)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                self._call(inner, begins, is_dropped and inner is node)
            elif isinstance(inner, ast.NamedExpr) and (begins or self._names_it(inner.value)):
                self._store(inner.target, held=True)
            elif isinstance(inner, (ast.Yield, ast.YieldFrom)):
                self.is_returned |= begins or self._names_it(inner)
        return found

    def _names_it(self, node: ast.AST) -> bool:
        return bool(self._names) and any(
            isinstance(one, (ast.Name, ast.Attribute))
            and not isinstance(one.ctx, ast.Store)
            and _path_of(one) in self._names
            for one in ast.walk(node)
        )

    def _call(self, call: ast.Call, begins: bool, is_dropped: bool) -> None:
        given = begins or any(
            self._names_it(part) for part in (*call.args, *(one.value for one in call.keywords))
        )
        if (given or self._names_it(call.func)) and self._is_update(call):
            self.updates = True
        if not given:
            return
        name = _name_of(call.func)
        owner = _path_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if name in _KEEPING or (owner and name.endswith("_")):
            self._keep(owner)
        elif is_dropped and not _TELLING.fullmatch(name):
            self.is_kept = True  # the call is made for what it does


def _drops(statement: ast.stmt) -> bool:
    """Return whether a statement drops what its expression returns."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(one, ast.Name) and one.id == "_" for one in statement.targets)
    return isinstance(statement, ast.Expr)


def _bound_in(node: Function) -> set[str]:
    """Return the names that are a function's own: its parameters, and what it assigns to."""
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += filter(None, (arguments.vararg, arguments.kwarg))
    stored = {
        one.id
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    shared = {
        name
        for one in ast.walk(node)
        if isinstance(one, (ast.Global, ast.Nonlocal))
        for name in one.names
    }
    return ({one.arg for one in named} | stored) - shared
