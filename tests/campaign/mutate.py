"""Changes random lines of the package, one at a time, and counts how many the tests notice.

    python tests/campaign/mutate.py --count 20 --seed 1 --slots 8

Enters: a checkout and a seed. Leaves: a JSON file with one entry per changed line: what it was, what it became, and
which test failed. The file is written after every line, and the same command goes on where it was stopped.

Every slot has a copy of the checkout in a folder of its own. For every change the tests that import the changed
module run first, then those that name its room, each until the first failure; at the end all other tests run for
the changes that are left (`--stages 1` and `2` stop before).
A failure counts when the same test fails again by itself with the change and passes
without it; a test that does not is noted as unreliable and left out.

Lines whose change no test can notice, because nothing that the package promises depends on it, are named in
`EQUIVALENT` with the reason; they are listed and not counted.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOMS = ("loader", "store", "train")
LEFT_BEHIND = (".git", ".venv", ".gpu-deps", ".gpu-data", ".gpu-wheels", "__pycache__", "site", "data", "out",
               "shared", "stoker-demo", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis")  # fmt: skip
EQUIVALENT: dict[str, str] = {
    "train/graphs/graphed_step.py: CHECKED_REPLAYS = 3 -> CHECKED_REPLAYS = 4": "one more comparison",
    "loader/epochs.py: _LEAST_FOR_THREAD = 1 << 14 -> _LEAST_FOR_THREAD = 2 << 14": "when a thread permutes",
    "loader/epochs.py: return [Visit(*row) for row in zip(*(column.tolist() for column in columns), strict=True)] -> "
    "return [Visit(*row) for row in zip(*(column.tolist() for column in columns), strict=False)]": "equal lengths",
    "loader/scattered.py: for column, layout in zip(self.columns, self._layouts, strict=True): -> "
    "for column, layout in zip(self.columns, self._layouts, strict=False):": "equal lengths",
    "store/quality.py: @dataclass(frozen=True) -> @dataclass(frozen=False)": "nothing changes a finding",
    "store/memory.py: super().__init__(_NOWHERE, None, wanted, 1 << 20) -> "
    "super().__init__(_NOWHERE, None, wanted, 1 << 21)": "arrays in memory have no sums of blocks",
    "loader/straight.py: buffer = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) -> "
    "buffer = mmap.mmap(-1, max(num_bytes, 2), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)": "a page is the least",
}
"""The name of a change (`Mutant.name`) to the reason why no test can notice it."""

_COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
             ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
_REPLACED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
             ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed line."""

    file: str
    line: int
    kind: str
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.before.strip()} -> {self.after.strip()}"


# -- what can be changed ---------------------------------------------------------------------------


def mutants_of(path: Path, file: str) -> dict[int, list[Mutant]]:
    """Return by line every change of a module."""
    source = path.read_text("utf-8")
    lines = source.splitlines()
    found: dict[int, list[Mutant]] = {}
    for node, kind, text in _changes(ast.parse(source)):
        if node.lineno == node.end_lineno:
            line = lines[node.lineno - 1].encode()
            after = line[: node.col_offset] + text.encode() + line[node.end_col_offset :]
            made = Mutant(file, node.lineno, kind, line.decode(), after.decode())
            found.setdefault(node.lineno, []).append(made)
    return found


def is_sound(path: Path, mutant: Mutant) -> bool:
    """Say whether a changed module compiles and is another one."""
    lines = path.read_text("utf-8").splitlines()
    before = ast.dump(ast.parse("\n".join(lines)))
    lines[mutant.line - 1] = mutant.after
    try:
        return ast.dump(ast.parse("\n".join(lines))) != before
    except SyntaxError:
        return False


def _changes(tree: ast.Module):
    """Yield a node, the kind of change, and the text that takes the node's place."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        todo += _parts(node)
        yield from _of_expression(node)
        yield from _of_statement(node)


def _parts(node: ast.AST) -> list[ast.AST]:
    """Return the children that are run: no hints, no documentation, no texts, nothing for type checkers."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
        return []
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return list(node.orelse)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [*node.body, *node.args.defaults, *filter(None, node.args.kw_defaults)]
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value else []
    return list(ast.iter_child_nodes(node))


def _of_expression(node: ast.AST):
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        other = ast.Compare(
            node.left, [_COMPARED[type(node.ops[0])](), *node.ops[1:]], node.comparators
        )
        yield node, "comparison", ast.unparse(other)
    elif isinstance(node, ast.BinOp) and type(node.op) in _REPLACED:
        other = ast.BinOp(node.left, _REPLACED[type(node.op)](), node.right)
        yield node, "arithmetic", f"({ast.unparse(other)})"
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, "and/or", f"({ast.unparse(ast.BoolOp(swapped, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, "not", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield node, "if/else", f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, "constant", str(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node, "constant", repr(node.value + 1)


def _of_statement(node: ast.AST):
    if isinstance(node, ast.Return) and node.value is not None:
        if ast.unparse(node.value) != "None":
            yield node, "return", "return None"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield node, "call left out", "pass"
    elif isinstance(node, ast.AugAssign):
        yield node, "update left out", "pass"
    elif isinstance(node, ast.Break):
        yield node, "break", "continue"
    elif isinstance(node, ast.Continue):
        yield node, "continue", "break"
    elif isinstance(node, ast.If | ast.While) and ast.unparse(node.test) != "TYPE_CHECKING":
        yield node.test, "condition", f"not ({ast.unparse(node.test)})"


def draw(root: Path, count: int, seed: int, rooms: tuple[str, ...] = ROOMS) -> list[Mutant]:
    """Return changes of that many different lines, every line as likely as any other."""
    package = root / "src/stoker"
    lines = []
    for room in rooms:
        for path in sorted((package / room).rglob("*.py")):
            found = mutants_of(path, path.relative_to(package).as_posix())
            lines += [found[number] for number in sorted(found)]
    chance = random.Random(seed)
    chance.shuffle(lines)
    drawn = (chance.choice(changes) for changes in lines)
    sound = (mutant for mutant in drawn if is_sound(package / mutant.file, mutant))
    return list(itertools.islice(sound, count))


# -- which tests, in which order -------------------------------------------------------------------


def stages(tests: Path, file: str) -> tuple[list[str], list[str], list[str]]:
    """Return the test files for a change of `file`: that import it, that name its room, all others."""
    room, module = file.partition("/")[0], file.removesuffix(".py").replace("/", ".")
    module = f"stoker.{module.removesuffix('.__init__')}"
    package, _, last = module.rpartition(".")
    direct = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{last}\b")
    near = re.compile(rf"\bstoker\.{room}\b|from stoker import [^\n]*\b{room}\b")
    found: tuple[list[str], list[str], list[str]] = ([], [], [])
    for path in sorted(tests.rglob("test_*.py")):
        if path.parent.name == "campaign":
            continue
        text = path.read_text("utf-8")
        named = path.stem.removeprefix("test_") in (Path(file).stem, room)
        number = 0 if named or direct.search(text) else 1 if near.search(text) else 2
        found[number].append(path.relative_to(tests.parent).as_posix())
    return found


# -- running ---------------------------------------------------------------------------------------


PLUGIN = """
import os

def note(report):
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["STOKER_MUTATE_REPORT"], "a") as file:
            file.write(report.nodeid + "\\n")

pytest_runtest_logreport = pytest_collectreport = note
"""
"""For pytest: writes the names of what failed, whole, as its own summary does not."""


class Slot:
    """A copy of the checkout in which one change after the other is made and undone."""

    def __init__(self, root: Path, processes: int, seconds: float) -> None:
        self.processes, self.seconds = processes, seconds
        self.folder = Path(tempfile.mkdtemp(prefix="stoker-mutate-")) / "checkout"
        ignore = shutil.ignore_patterns(*LEFT_BEHIND)
        shutil.copytree(root, self.folder, ignore=ignore, symlinks=True)
        (self.folder.parent / "stoker_mutate_plugin.py").write_text(PLUGIN)
        self.report = self.folder.parent / "failed"
        others = filter(None, [os.environ.get("PYTHONPATH")])
        paths = [self.folder / "src", self.folder.parent, *others]
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
            "STOKER_MUTATE_REPORT": str(self.report),
        }

    def pytest(self, *words: str, alone: bool = False) -> tuple[int, list[str]]:
        """Run tests; return pytest's exit code (124: out of time) and what failed."""
        self.report.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "stoker_mutate_plugin",
        ]
        command += ["-m", "not whole_gpu", "--tb=no"]
        command += ["--timeout=60"] * bool(importlib.util.find_spec("pytest_timeout"))
        if not alone and self.processes > 1 and importlib.util.find_spec("xdist"):
            command += ["-n", str(self.processes), "--dist", "worksteal"]
        process = subprocess.Popen(
            [*command, *words], cwd=self.folder, env=self.environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=self.seconds)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # and what its tests have left behind
            process.wait()
        failed = self.report.read_text("utf-8").splitlines() if self.report.exists() else []
        return code, list(dict.fromkeys(failed))

    @contextlib.contextmanager
    def changed(self, mutant: Mutant):
        path = self.folder / "src/stoker" / mutant.file
        original = path.read_text("utf-8")
        lines = original.splitlines(keepends=True)
        assert lines[mutant.line - 1].rstrip("\n") == mutant.before
        lines[mutant.line - 1] = mutant.after + "\n"
        try:
            self._write(path, "".join(lines))
            yield
        finally:
            self._write(path, original)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        # Bytecode is known by size and second: a change of neither would not be seen.
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            stale.unlink()
        path.write_text(text, "utf-8")

    def close(self) -> None:
        shutil.rmtree(self.folder.parent, ignore_errors=True)

    def examine(self, mutant: Mutant, number: int, unreliable: set[str]) -> dict:
        """Run one stage; return how the change was met: `caught` by a test, `passed`, or `undecided`."""
        began = time.monotonic()

        def met(status: str, **facts: object) -> dict:
            seconds = round(time.monotonic() - began, 1)
            return {
                **asdict(mutant),
                "name": mutant.name,
                "status": status,
                "stage": number,
                **facts,
                "seconds": seconds,
            }

        left_out: list[str] = []
        files = stages(self.folder / "tests", mutant.file)[number]
        with self.changed(mutant):
            while files:
                skipped = [f"--deselect={name}" for name in {*unreliable, *left_out}]
                code, failed = self.pytest("-x", *skipped, *files)
                if code in (0, 5):  # all passed, or none was there
                    break
                if code == 124:
                    return met("undecided", reason=f"{self.seconds:.0f} s were not enough")
                if code == 2 and not failed:  # a KeyboardInterrupt that should not have come out
                    return met("caught", by="pytest itself, which was interrupted")
                if not failed:
                    return met("undecided", reason=f"pytest ended with {code}")
                if failed[0] in left_out:
                    return met("undecided", reason=f"{failed[0]} cannot be left out")
                if not self._doubted(mutant, failed[0]):
                    return met("caught", by=failed[0], unreliable=left_out)
                left_out.append(failed[0])
        return met("passed", unreliable=left_out)

    def _doubted(self, mutant: Mutant, test: str) -> bool:
        """Say whether a test fails for another reason than the change; called with the change made."""
        if self.pytest(test, alone=True)[0] == 0:
            return True
        path = self.folder / "src/stoker" / mutant.file
        text = path.read_text("utf-8")
        lines = text.splitlines(keepends=True)
        lines[mutant.line - 1] = mutant.before + "\n"
        try:
            self._write(path, "".join(lines))
            return self.pytest(test, alone=True)[0] != 0
        finally:
            self._write(path, text)


class Results:
    """The JSON file: what was asked for, and what came of every change so far."""

    def __init__(self, path: Path, asked: dict) -> None:
        self.path, self._lock = path, threading.Lock()
        self.facts = {**asked, "unreliable_before": None, "mutants": {}}
        if path.exists():
            kept = json.loads(path.read_text("utf-8"))
            if {name: kept.get(name) for name in asked} != asked:
                raise SystemExit(f"{path} is of another campaign; name another file with --out")
            self.facts = kept

    def add(self, number: int, entry: dict) -> None:
        with self._lock:
            self.facts["mutants"][str(number)] = entry
            self.save()

    def save(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.facts, indent=1), "utf-8")
        temporary.replace(self.path)


def run(root: Path, results: Results, mutants: list[Mutant], options: argparse.Namespace) -> None:
    """Examine what has no answer yet: the near tests of all changes, then the others for those that are left."""
    done = results.facts["mutants"]
    for number, mutant in enumerate(mutants):
        if str(number) not in done and mutant.name in EQUIVALENT:
            facts = {"status": "equivalent", "reason": EQUIVALENT[mutant.name]}
            results.add(number, {**asdict(mutant), "name": mutant.name, **facts})
    if results.facts["unreliable_before"] is None:
        results.facts["unreliable_before"] = [] if options.trust else _failing_now(root, options)
        results.save()
    for stage in range(options.stages):
        waiting = [
            number
            for number in range(len(mutants))
            if str(number) not in done
            or (done[str(number)]["status"], done[str(number)].get("stage"))
            == ("passed", stage - 1)
        ]
        if waiting:
            _run_stage(root, results, mutants, options, stage, waiting)
    for number in range(len(mutants)):
        if done[str(number)]["status"] == "passed":
            results.add(number, {**done[str(number)], "status": "survived"})


def _run_stage(
    root: Path,
    results: Results,
    mutants: list[Mutant],
    options: argparse.Namespace,
    stage: int,
    waiting: list[int],
) -> None:
    num_slots = min(options.slots, len(waiting))
    processes = max(options.processes, options.slots * options.processes // num_slots)
    unreliable = set(results.facts["unreliable_before"])
    lock = threading.Lock()

    def work() -> None:
        slot = Slot(root, processes, options.seconds)
        try:
            while True:
                with lock:
                    if not waiting:
                        return
                    number = waiting.pop(0)
                entry = slot.examine(mutants[number], stage, unreliable)
                results.add(number, entry)
                print(
                    f"{entry['status']:10} {entry['seconds']:6.0f} s  {entry['name']}", flush=True
                )
                if entry.get("by"):
                    print(f"{'':10} {entry['by']}", flush=True)
        finally:
            slot.close()

    with ThreadPoolExecutor(num_slots) as slots:
        for job in [slots.submit(work) for _ in range(num_slots)]:
            job.result()


def _failing_now(root: Path, options: argparse.Namespace) -> list[str]:
    """Return the tests that fail without any change: they could say nothing about one."""
    print("all tests once without a change …", flush=True)
    slot = Slot(root, options.slots * options.processes, 4 * options.seconds)
    try:
        code, failed = slot.pytest()
        if code not in (0, 1):
            raise SystemExit(f"pytest ended with {code} without any change")
        for name in failed:
            print(f"left out: {name}", flush=True)
        return failed
    finally:
        slot.close()


def summary(entries: list[dict]) -> str:
    """Return the count per room, and every change that no test noticed by name."""
    lines = [
        f"{'room':10} {'lines':>6} {'caught':>7} {'survived':>9} {'equivalent':>11} {'undecided':>10}"
    ]
    rooms = [*sorted({entry["file"].partition("/")[0] for entry in entries}), ""]
    for room in rooms:
        own = [one for one in entries if not room or one["file"].startswith(f"{room}/")]
        count = {
            word: sum(one["status"] == word for one in own)
            for word in ("caught", "survived", "equivalent", "undecided")
        }
        numbers = f"{count['caught']:7} {count['survived']:9} {count['equivalent']:11} {count['undecided']:10}"
        lines.append(f"{room or 'all':10} {len(own):6} {numbers}")
    for entry in entries:
        if entry["status"] != "caught":
            lines.append(f"{entry['status']}: {entry['name']} (line {entry['line']})")
            if entry.get("reason"):
                lines.append(f"    {entry['reason']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Change random lines and count what the tests notice."
    )
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parents[2], help="the checkout"
    )
    parser.add_argument("--count", type=int, default=20, help="lines to change")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", default=",".join(ROOMS), help="folders of src/stoker")
    parser.add_argument(
        "--slots", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="changes at a time"
    )
    parser.add_argument(
        "--stages",
        type=int,
        choices=(1, 2, 3),
        default=3,
        help="1: the tests that import the changed module; 2: those that name its room; 3: all others",
    )
    parser.add_argument("--processes", type=int, default=2, help="pytest workers of a slot")
    parser.add_argument("--seconds", type=float, default=600, help="limit of one run of pytest")
    parser.add_argument("--out", type=Path, default=Path("mutation.json"))
    parser.add_argument(
        "--trust", action="store_true", help="take it that all tests pass without a change"
    )
    parser.add_argument("--list", action="store_true", help="show the changes and run nothing")
    options = parser.parse_args()
    root = options.root.resolve()
    os.environ["PYTHONPATH"] = _absolute(os.environ.get("PYTHONPATH", ""), root)
    rooms = tuple(options.rooms.split(","))
    with tempfile.TemporaryDirectory(prefix="stoker-mutate-") as folder:
        # A copy, so that edits of the checkout meanwhile do not matter.
        kept = Path(folder) / "checkout"
        shutil.copytree(root, kept, ignore=shutil.ignore_patterns(*LEFT_BEHIND), symlinks=True)
        _campaign(kept, rooms, options)


def _absolute(paths: str, root: Path) -> str:
    """Return PYTHONPATH for another working folder, without the checkout's own package."""
    given = [Path(one).absolute() for one in paths.split(os.pathsep) if one]
    return os.pathsep.join(str(one) for one in given if one != root / "src")


def _campaign(root: Path, rooms: tuple[str, ...], options: argparse.Namespace) -> None:
    mutants = draw(root, options.count, options.seed, rooms)
    if options.list:
        for number, mutant in enumerate(mutants):
            print(f"{number:3} {mutant.kind:15} line {mutant.line:4} {mutant.name}")
        return
    asked = {"seed": options.seed, "count": options.count, "rooms": list(rooms)}
    results = Results(options.out, {**asked, "drawn": [mutant.name for mutant in mutants]})
    run(root, results, mutants, options)
    entries = [results.facts["mutants"][str(number)] for number in range(len(mutants))]
    print(summary(entries))


if __name__ == "__main__":
    main()
