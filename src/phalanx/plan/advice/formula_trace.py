"""Formulas with their numbers, read off the planner while it computes: the lines of source that
ran, what each name in them was, and what came out. No formula is written twice.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

# Of these modules a name stands for a function, not for a number.
_MODULES_OF_FUNCTIONS = ("np", "math")
# What may stand in a line that is computed again from its printed numbers.
_CALLS_ALLOWED_IN_PRINTED_FORMULA = (
    "np.where",
    "np.maximum",
    "np.minimum",
    "np.ceil",
    "np.floor",
    "np.sqrt",
    "np.log",
)


@dataclass(frozen=True)
class FormulaLine:
    """A statement that ran: its source, the numbers of its names, and its result."""

    target: str
    expression: str
    inputs: dict[str, float]
    result: float | None
    words: dict[str, str] = field(default_factory=dict)
    """Local variables that are text: what a loop was at."""

    @property
    def expression_with_numbers(self) -> str:
        """The expression with a number in the place of each name that was one."""
        tree = ast.parse(self.expression, mode="eval")
        return ast.unparse(_NameToNumberTransformer(self.inputs).visit(tree))

    @property
    def is_arithmetic(self) -> bool:
        """True if the numbers of the line are all that its result comes from."""
        tree = ast.parse(self.expression_with_numbers, mode="eval")
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) not in _CALLS_ALLOWED_IN_PRINTED_FORMULA
            ):
                return False
            if isinstance(node, ast.Name) and node.id not in _MODULES_OF_FUNCTIONS:
                return False
            if isinstance(
                node, ast.Is | ast.IsNot | ast.Subscript | ast.Tuple | ast.List | ast.comprehension
            ):
                return False
        return True


@dataclass(frozen=True)
class FormulaCall:
    """One call of a formula's function."""

    function: str
    module: str
    summary: str
    lines: tuple[FormulaLine, ...]
    result: float | None
    items: dict[str, float]
    """The numbers of a result that is a dict."""
    variables: dict[str, float]
    """Local variables that are numbers, at the end."""


def trace_formulas(
    compute: Callable[[], Any], modules: Collection[str], functions: Collection[str]
) -> list[FormulaCall]:
    """The calls of `functions` (by name, in `modules`) while `compute` runs, in the order in which
    they ended."""
    tracer = _FormulaTracer(frozenset(modules), frozenset(functions))
    before = sys.gettrace()
    sys.settrace(tracer.on_call)
    try:
        compute()
    finally:
        sys.settrace(before)
    return tracer.calls


class _NameToNumberTransformer(ast.NodeTransformer):
    """Puts numbers where names are."""

    def __init__(self, inputs: dict[str, float]) -> None:
        self.inputs = inputs

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._replace_with_number(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._replace_with_number(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # The function keeps its name, its arguments are numbers.
        node.args = [self.visit(argument) for argument in node.args]
        return node

    def _replace_with_number(self, node: ast.expr) -> ast.AST:
        value = self.inputs.get(ast.unparse(node))
        if value is None:
            return node
        return ast.copy_location(ast.Constant(value), node)


class _FormulaTracer:
    def __init__(self, modules: frozenset[str], functions: frozenset[str]) -> None:
        self.modules, self.functions = modules, functions
        self.calls: list[FormulaCall] = []
        self.statements: dict[CodeType, dict[int, ast.stmt]] = {}

    def on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name not in self.functions:
            return None
        if frame.f_globals.get("__name__") not in self.modules:
            return None
        if frame.f_code not in self.statements:
            self.statements[frame.f_code] = _map_lines_to_statements(frame.f_code)
        return _CallTracer(self, frame).on_event


class _CallTracer:
    """Follows one call: at each statement the numbers of its names, and after it its result."""

    def __init__(self, tracer: _FormulaTracer, frame: FrameType) -> None:
        self.tracer = tracer
        self.statements = tracer.statements[frame.f_code]
        self.lines: list[FormulaLine] = []
        self.pending: tuple[ast.stmt, dict[str, float]] | None = None

    def on_event(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            statement = self.statements.get(frame.f_lineno)
            if self.pending is not None and statement is self.pending[0]:
                # A further line of the same statement.
                return self.on_event
            self._record_finished_statement(frame, None)
            if statement is not None:
                self.pending = (statement, _collect_input_numbers(statement, frame))
        elif event == "return":
            self._record_finished_statement(frame, argument)
            code = frame.f_code
            self.tracer.calls.append(
                FormulaCall(
                    code.co_name,
                    frame.f_globals["__name__"],
                    _get_first_docstring_sentence(frame),
                    tuple(self.lines),
                    convert_to_number(argument),
                    _extract_dict_numbers(argument),
                    _extract_dict_numbers(frame.f_locals),
                )
            )
        return self.on_event

    def _record_finished_statement(self, frame: FrameType, returned: Any) -> None:
        if self.pending is None:
            return
        statement, inputs = self.pending
        self.pending = None
        words = {name: value for name, value in frame.f_locals.items() if isinstance(value, str)}
        for target, expression in _split_into_assignments(statement):
            result = convert_to_number(returned)
            if target != "result":
                result = _evaluate_name_to_number(target, frame)
            self.lines.append(FormulaLine(target, ast.unparse(expression), inputs, result, words))


def _map_lines_to_statements(code: CodeType) -> dict[int, ast.stmt]:
    """The assignments and returns of a function, by each of their lines."""
    lines, first = inspect.getsourcelines(code)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    statements: dict[int, ast.stmt] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Return):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                statements[first + line - 1] = node
    return statements


def _split_into_assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """(target, expression) of each value that a statement makes; of a return the target is
    "result"."""
    if isinstance(statement, ast.Return) and statement.value is not None:
        yield "result", statement.value
    elif isinstance(statement, ast.AugAssign):
        yield (
            ast.unparse(statement.target),
            ast.BinOp(
                _convert_target_to_expression(statement.target), statement.op, statement.value
            ),
        )
    elif isinstance(statement, ast.Assign):
        target, value = statement.targets[0], statement.value
        is_pairwise = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        if is_pairwise and isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for number, (part, expression) in enumerate(zip(target.elts, value.elts, strict=False)):
                if isinstance(expression, ast.Starred):
                    # What it stands for belongs to all names that are left.
                    yield ", ".join(map(ast.unparse, target.elts[number:])), expression.value
                    return
                yield ast.unparse(part), expression
        else:
            yield ast.unparse(target), value


def _convert_target_to_expression(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body


def _collect_input_numbers(statement: ast.stmt, frame: FrameType) -> dict[str, float]:
    """The numbers of the names and attributes in the expressions of a statement."""
    inputs: dict[str, float] = {}
    for _, expression in _split_into_assignments(statement):
        for node in ast.walk(expression):
            if isinstance(node, ast.Name | ast.Attribute):
                name = ast.unparse(node)
                value = _evaluate_name_to_number(name, frame)
                if value is not None:
                    inputs[name] = value
    return inputs


def _evaluate_name_to_number(name: str, frame: FrameType) -> float | None:
    # A name, an attribute or an item of our own source: nothing else comes here.
    try:
        return convert_to_number(eval(name, frame.f_globals, frame.f_locals))
    except Exception:
        return None


def convert_to_number(value: Any) -> float | None:
    """The number that a value is, or a column of one; None for anything else."""
    if isinstance(value, bool | int | float):
        return float(value)
    item = getattr(value, "item", None)
    if item is None or getattr(value, "size", 1) != 1:
        return None
    number = item()
    if isinstance(number, bool | int | float):
        return float(number)
    return None


def _extract_dict_numbers(value: Any) -> dict[str, float]:
    """The numbers in a dict, by name; empty for anything else."""
    numbers: dict[str, float] = {}
    if not isinstance(value, dict):
        return numbers
    for name, item in value.items():
        number = convert_to_number(item)
        if number is not None:
            numbers[str(name)] = number
    return numbers


def _get_first_docstring_sentence(frame: FrameType) -> str:
    """The first sentence of the docstring of the function that runs in `frame`."""
    constants = frame.f_code.co_consts
    if not constants or not isinstance(constants[0], str):
        return ""
    paragraph = " ".join(constants[0].strip().split("\n\n")[0].split())
    return f"{paragraph.split('. ')[0].rstrip('.')}."
