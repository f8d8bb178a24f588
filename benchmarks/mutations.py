"""Mutations of the product's code: places where one small change would alter what a module does, and a draw of them.

A mutation replaces a few bytes of one file. KINDS lists what is changed. Left alone is what no test can or should see:
docstrings and other texts (messages of errors among them), annotations, decorators, ``__all__``, logging, assertions,
``__repr__``, TYPE_CHECKING blocks, durations (no test gives a verdict by speed), and options of dataclasses.

A mutation is named by file, qualified name of its function, kind, and the text of its lines before and after, so that
it is found again in another commit whose line numbers differ.
"""

from __future__ import annotations

import ast
import bisect
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from benchmarks.house import PACKAGES

KINDS = {
    "compare": "a < b       -> a <= b, == -> !=, in -> not in",
    "arithmetic": "a + b       -> a - b, * -> +, // -> *, += -> -=",
    "boolean": "a and b     -> a or b",
    "not": "not a       -> a",
    "constant": "n           -> n + 1, 1 -> 0, True -> False",
    "condition": "if c        -> if not (c), also while and a if c else b",
    "return": "return x    -> return None",
    "default": "f(x=1)      -> f(x=0), in a definition",
    "minmax": "min(...)    -> max(...)",
    "call": "do(x)       -> pass, where the result is not used",
    "jump": "break       -> continue",
}
SWAPPED: Mapping[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "+"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
"""Operator -> pattern of its text, and the text that replaces it."""
DURATION = re.compile(r"(_s|_ms|_seconds|timeout)$", re.IGNORECASE)
DURATION_CALLS = {"sleep", "wait_for", "timeout", "timeout_at", "call_later"}
NO_EFFECT = {"strict", "frozen", "slots", "kw_only", "repr", "exist_ok", "missing_ok", "indent", "stacklevel", "daemon"}
"""Keyword arguments that guard against mistakes of a programmer, or shape a text."""
LOGS = re.compile(r"^(_?log|_?logger|logging|console|typer|warnings|print|echo)$", re.IGNORECASE)


class Mutation(msgspec.Struct, frozen=True, kw_only=True):
    """One change, as it is named in every commit. before, after: its lines, each without indentation.

    occurrence: which one it is of the same change to the same text in the same function.
    """

    file: str
    function: str
    kind: str
    before: str
    after: str
    occurrence: int = 0

    def __str__(self) -> str:
        return f"{self.file} {self.function} ({self.kind})"

    @property
    def diff(self) -> str:
        lines = [f"-{line}" for line in self.before.splitlines()] + [f"+{line}" for line in self.after.splitlines()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Point:
    """Where a mutation is made: bytes start to end of the file are replaced."""

    mutation: Mutation
    start: int
    end: int
    text: bytes
    line: int

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text + source[self.end :]


class _Finder(ast.NodeVisitor):
    """Collects the points of one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self._file, self._source = file, source
        self._starts = [0]
        for line in source.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._names: list[str] = []
        self._duration = False
        self._seen: Counter[Mutation] = Counter()
        self.points: list[Point] = []

    # -- places

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _add(self, kind: str, start: int, end: int, text: str) -> None:
        new = text.encode()
        first = self._source.rfind(b"\n", 0, start) + 1
        last = self._source.find(b"\n", end)
        lines = self._source[first : last if last >= 0 else len(self._source)]
        mutation = Mutation(
            file=self._file,
            function=".".join(self._names) or "<module>",
            kind=kind,
            before=_stripped(lines),
            after=_stripped(lines[: start - first] + new + lines[end - first :]),
        )
        number = self._seen[mutation]
        self._seen[mutation] += 1
        line = bisect.bisect(self._starts, start)
        self.points.append(Point(msgspec.structs.replace(mutation, occurrence=number), start, end, new, line))

    def _swap(self, kind: str, operator: ast.AST, start: int, end: int) -> None:
        """Replace the one operator that stands between bytes start and end."""
        pattern, text = SWAPPED[type(operator)]
        between = self._source[start:end]
        found = re.search(rf"(?<!\w){pattern}(?!\w)".encode(), between)
        if found and b"#" not in between:
            self._add(kind, start + found.start(), start + found.end(), text)

    # -- what is walked through

    def _named(self, name: str, nodes: Iterable[ast.AST]) -> None:
        self._names.append(name)
        self._each(nodes)
        self._names.pop()

    def _each(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _valued(self, name: str, node: ast.AST | None) -> None:
        """A value that has a name: one that is a duration keeps its numbers."""
        if node is not None and name not in NO_EFFECT:
            with self._within(DURATION.search(name)):
                self.visit(node)

    @contextmanager
    def _within(self, duration: object) -> Iterator[None]:
        """A place whose numbers are kept where ``duration`` is true, as they are in a place around it."""
        before, self._duration = self._duration, self._duration or bool(duration)
        yield
        self._duration = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__rich_repr__") or (node.returns and "TypeGuard" in ast.dump(node.returns)):
            return
        self._names.append(node.name)
        places = [*node.args.posonlyargs, *node.args.args]
        defaults = list(zip(places[len(places) - len(node.args.defaults) :], node.args.defaults, strict=True))
        defaults += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d is not None]
        for argument, default in defaults:
            if isinstance(default, ast.Constant) and not DURATION.search(argument.arg):
                self._constant("default", default)
        self._each(node.body)
        self._names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._named(node.name, node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._valued(_name_of(node.target), node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if _name_of(node.targets[0]) not in ("__all__", "__slots__"):
            self._valued(_name_of(node.targets[0]), node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        self._valued(node.arg or "", node.value)

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_match_case(self, node: ast.match_case) -> None:
        self._each((*filter(None, [node.guard]), *node.body))

    # -- what is changed

    def visit_If(self, node: ast.If) -> None:
        words = ast.dump(node.test)
        if "'TYPE_CHECKING'" in words or "'__name__'" in words:
            self._each(node.orelse)
        else:
            self._conditional(node)

    def visit_While(self, node: ast.While) -> None:
        if isinstance(node.test, ast.Constant):
            self._each(node.body)
        else:
            self._conditional(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._conditional(node)

    def _conditional(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if not isinstance(node.test, ast.UnaryOp):  # `not` is dropped elsewhere
            start, end = self._span(node.test)
            self._add("condition", start, end, f"not ({self._source[start:end].decode()})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            if not (isinstance(left, ast.Call) and _name_of(left.func) == "type"):
                self._swap("compare", operator, self._span(left)[1], self._span(right)[0])
        with self._within(any(DURATION.search(_name_of(side)) for side in sides)):
            self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in SWAPPED and not any(map(_is_text_or_list, (node.left, node.right))):
            self._swap("arithmetic", node.op, self._span(node.left)[1], self._span(node.right)[0])
        with self._within(any(DURATION.search(_name_of(side)) for side in (node.left, node.right))):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in SWAPPED and not _is_text_or_list(node.value):
            self._swap("arithmetic", node.op, self._span(node.target)[1], self._span(node.value)[0])
        self._valued(_name_of(node.target), node.value)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._swap("boolean", node.op, self._span(left)[1], self._span(right)[0])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, end = self._span(node)
            found = re.match(rb"not(\s+|(?=\())", self._source[start:end])
            if found:
                self._add("not", start, start + found.end(), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._constant("constant", node)

    def _constant(self, kind: str, node: ast.Constant) -> None:
        start, end = self._span(node)
        match node.value:
            case bool(value):
                self._add(kind, start, end, str(not value))
            case int(value) | float(value) if not self._duration:
                self._add(kind, start, end, repr(0 if value == 1 else value + 1))
            case _:
                pass  # texts and None stay

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and not node.value.value):
            self._add("return", *self._span(node.value), "None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(value, ast.Call) or _is_logging(value):
            return
        # What an exception is made of, __new__ keeps, too.
        for_exception = _name_of(value.func) == "__init__" and any(name.endswith("Error") for name in self._names)
        if not for_exception and _name_of(value.func) not in DURATION_CALLS:
            self._add("call", *self._span(node), "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_logging(node):
            return
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            start, end = self._span(node.func)
            self._add("minmax", start, end, "max" if node.func.id == "min" else "min")
        with self._within(_name_of(node.func) in DURATION_CALLS):
            self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._add("jump", *self._span(node), "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("jump", *self._span(node), "break")


def _stripped(lines: bytes) -> str:
    return "\n".join(line.strip() for line in lines.decode().split("\n"))


def _name_of(node: ast.AST) -> str:
    """The last part of a dotted name; empty for what has none."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _is_logging(node: ast.Call) -> bool:
    root = node.func
    while isinstance(root, ast.Attribute | ast.Call):
        if isinstance(root, ast.Attribute) and LOGS.match(root.attr):
            return True
        root = root.value if isinstance(root, ast.Attribute) else root.func
    return isinstance(root, ast.Name) and bool(LOGS.match(root.id))


def _is_text_or_list(node: ast.AST) -> bool:
    """Whether an operand is known to be no number."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp | ast.Dict)


def points(file: str, source: bytes) -> list[Point]:
    """Every mutation of a file. file: its path from the root of the tree, with slashes."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.points


def is_real(point: Point, source: bytes) -> bool:
    """Whether the mutated file compiles and is another program."""
    try:
        return ast.dump(ast.parse(point.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


# --- the draw -------------------------------------------------------------------------------------------------------


def product_files(root: Path, packages: Sequence[str] = PACKAGES) -> Iterator[str]:
    """Paths of the product's modules from the root, sorted."""
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root).as_posix()


def folder_of(file: str) -> str:
    """The folder of the second level that a module counts for: orchestrator/core, transport, ranker."""
    return "/".join(PurePosixPath(file).parent.parts[:2])


def shares(lines: Mapping[str, int], number: int) -> dict[str, int]:
    """How many mutations each folder gets: one, and the rest by its lines (highest averages).

    Raises ValueError when there are more folders than mutations.
    """
    if number < len(lines):
        raise ValueError(f"{number} mutations for {len(lines)} folders: ask for {len(lines)} or more")
    given = dict.fromkeys(sorted(lines), 1)
    for _ in range(number - len(lines)):
        given[max(given, key=lambda folder: lines[folder] / (given[folder] + 1))] += 1
    return given


def draw(root: Path, number: int, seed: int, packages: Sequence[str] = PACKAGES) -> list[Mutation]:
    """``number`` mutations of the tree at ``root``, at most one in a function; the same for the same seed and tree.

    Every folder draws by itself: a change of one leaves the mutations of the others as they were.
    """
    sources = {file: (root / file).read_bytes() for file in product_files(root, packages)}
    found = {file: some for file, source in sources.items() if (some := points(file, source))}
    lines: Counter[str] = Counter()
    for file in found:
        lines[folder_of(file)] += sources[file].count(b"\n")
    drawn: list[Mutation] = []
    for folder, count in shares(lines, number).items():
        chance = random.Random(f"{seed} {folder}")
        by_function: defaultdict[tuple[str, str], list[Point]] = defaultdict(list)
        for file, some in found.items():
            if folder_of(file) == folder:
                for point in some:
                    by_function[file, point.mutation.function].append(point)
        while count and by_function:
            where = chance.choices(list(by_function), [len({p.line for p in some}) for some in by_function.values()])[0]
            there = by_function.pop(where)
            kind = chance.choice(sorted({point.mutation.kind for point in there}))
            point = chance.choice([point for point in there if point.mutation.kind == kind])
            if is_real(point, sources[where[0]]):
                drawn.append(point.mutation)
                count -= 1
    return drawn


def locate(root: Path, mutation: Mutation, packages: Sequence[str] = PACKAGES) -> tuple[str, Point] | None:
    """Where a mutation is in another tree: in its file, else in the one file that it was moved to. None: nowhere."""

    def fitting(file: str) -> list[Point]:
        named = msgspec.structs.replace(mutation, file=file)
        return [point for point in points(file, (root / file).read_bytes()) if point.mutation == named]

    if (root / mutation.file).is_file() and (there := fitting(mutation.file)):
        return mutation.file, there[0]
    first_line = mutation.before.split("\n")[0].encode()
    moved = [
        (file, point)
        for file in product_files(root, packages)
        if first_line in (root / file).read_bytes()
        for point in fitting(file)
    ]
    return moved[0] if len(moved) == 1 else None
