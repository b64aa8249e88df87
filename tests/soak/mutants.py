"""Mutants of a Python file: small faults, one at a time, that a test suite should detect."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_ORACLE = "tests/operators/trainer/test_update_against_oracle.py::test_update_matches_the_oracle"
_LEARNER = "tests/operators/trainer/test_learner.py"
Planted = tuple[str, str, tuple[tuple[str, str], ...], str]
PLANTED: tuple[Planted, ...] = (
    (
        "learner",
        "coefficients of the whole batch in each mini-batch",
        (
            ("coefficients[rows] = aggregation(", "coefficients[:] = aggregation("),
            (
                "torch.from_numpy(metadata.trained[rows]), self.config",
                "torch.from_numpy(metadata.trained), self.config",
            ),
        ),
        f"{_ORACLE}[grpo-kl1-w2-n1-p0-o1]",
    ),
    (
        "learner",
        "sign of the KL in rewards",
        (("penalties = config.kl_coefficient * divergence", "penalties = -config.kl_coefficient * divergence"),),
        f"{_ORACLE}[dr_grpo-kl2-w4-n2-p0-o2]",
    ),
    (
        "learner",
        "rows without advantage skipped in spite of a KL loss",
        (("        if targets.reference is not None:\n            return", "        if False:\n            return"),),
        f"{_ORACLE}[grpo-kl1-w2-n1-p0-o1]",
    ),
    (
        "learner",
        "proximal policy of each step, not of the batch",
        (("proximal=proximal if several_steps else None", "proximal=None"),),
        f"{_LEARNER}::test_several_steps_clip_against_the_initial_policy",
    ),
    (
        "learner",
        "critic's rate without the schedule",
        (
            (
                "rate = settings.learning_rate * (rate / policy_rate if policy_rate else 1.0)",
                "rate = settings.learning_rate",
            ),
        ),
        f"{_ORACLE}[ppo-kl4-w2-n3-p2-o1]",
    ),
    (
        "passes",
        "KL in the loss halved",
        (("losses + config.kl_coefficient * penalty", "losses + 0.5 * config.kl_coefficient * penalty"),),
        f"{_ORACLE}[grpo-kl1-w2-n1-p0-o1]",
    ),
    (
        "passes",
        "KL in the loss weighted by the correction",
        (("losses + config.kl_coefficient * penalty", "losses + config.kl_coefficient * penalty * weights"),),
        f"{_ORACLE}[dapo-kl3-w1-n3-p0-o3]",
    ),
    (
        "token_scores",
        "sign of the entropy",
        (("-(logprobs.exp() * logprobs)", "(logprobs.exp() * logprobs)"),),
        f"{_ORACLE}[tis-kl0-w0-n0-p0-o0]",
    ),
)
"""Faults of earlier reviews: module, name, the texts to replace, and a test that fails with the fault."""
_CALLS = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "mean": "sum", "sum": "mean"}
_SKIPPED_CALLS = {"append", "debug", "info", "warning", "error"}


@dataclass(frozen=True)
class Mutant:
    """The file's source with one fault.

    `what` is the change and the line's text, unique among the mutants; `lines` are the first and last line of the
    statement that is changed; `function` is whether that statement is in a function.
    """

    what: str
    source: str
    lines: tuple[int, int]
    function: bool


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of `source`: operators, calls and constants replaced, conditions negated, statements removed.

    Docstrings, annotations, imports, messages of raised errors and log calls stay as they are.
    """
    tree, lines = ast.parse(source), source.splitlines()
    named: Counter[str] = Counter()
    for node, change, what in _faults(tree):
        undo = change()
        mutated = copy.deepcopy(tree)
        undo()
        name = f"{what}: {lines[getattr(node, 'lineno', 1) - 1].strip()}"
        named[name] += 1
        number = f" ({named[name]})" if named[name] > 1 else ""
        yield Mutant(
            name + number,
            ast.unparse(ast.fix_missing_locations(mutated)),
            *place(tree, getattr(node, "lineno", 1)),
        )


def definitions(source: str) -> set[str]:
    """The texts of the statements of a module, those of its classes one by one, with the class's name."""
    found = set()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ClassDef):
            found |= {f"{statement.name}: {ast.unparse(each)}" for each in statement.body}
        else:
            found.add(ast.unparse(statement))
    return found


def planted(source: str, what: str, changes: Sequence[tuple[str, str]]) -> Mutant:
    """The mutant with the texts `changes`, each (before, after). Raises ValueError unless each occurs once."""
    mutated = source
    for before, after in changes:
        if mutated.count(before) != 1:
            raise ValueError(f"{what}: {before!r} occurs {mutated.count(before)} times, not once: adapt PLANTED")
        mutated = mutated.replace(before, after)
    line = source[: source.index(changes[0][0])].count("\n") + 1
    return Mutant(what, mutated, *place(ast.parse(source), line))


def place(tree: ast.Module, line: int) -> tuple[tuple[int, int], bool]:
    """First and last line of the statement at `line`, without its body, and whether it is in a function's body.

    The default of a parameter is in the body of its function, which reads it.
    """
    found, in_function = (line, line), False
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        body: list[ast.stmt] = getattr(node, "body", [])
        found = (node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno)
        if isinstance(node, ast.FunctionDef):
            in_function = True
            if line < body[0].lineno:
                found = (body[0].lineno, node.end_lineno or node.lineno)
    return found, in_function


Change = Callable[[], Callable[[], None]]
_Fault = tuple[ast.AST, Change, str]


def _faults(tree: ast.AST) -> list[_Fault]:
    found: list[_Fault] = []
    _visit(tree, found)
    return found


def _visit(node: ast.AST, found: list[_Fault]) -> None:
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
        return
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "bases", "type_params"}:
            continue
        if isinstance(value, list):
            for index, each in enumerate(value):
                if isinstance(each, ast.AST):
                    _consider(each, _setter(value, index), found, node)
                    _visit(each, found)
        elif isinstance(value, ast.AST):
            _consider(value, _attribute_setter(node, name), found, node)
            _visit(value, found)


def _consider(
    node: ast.AST, put: Callable[[ast.AST], None], found: list[_Fault], parent: ast.AST | None = None
) -> None:
    def fault(other: ast.AST, what: str, at: ast.AST = node) -> None:
        def change() -> Callable[[], None]:
            put(other)
            return lambda: put(node)

        found.append((at, change, what))

    if (other := _OPERATORS.get(type(node))) is not None:
        fault(other(), f"{type(node).__name__} to {other.__name__}", parent or node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        fault(node.operand, f"without {type(node.op).__name__}")
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            fault(ast.Constant(not node.value), f"{node.value} to {not node.value}")
        elif isinstance(node.value, int | float):
            changed = node.value + 1 if isinstance(node.value, int) or not node.value else node.value * 2
            fault(ast.Constant(changed), f"{node.value} to {changed}")
    elif isinstance(node, ast.Attribute) and node.attr in _CALLS:
        fault(ast.Attribute(node.value, _CALLS[node.attr], node.ctx), f"{node.attr} to {_CALLS[node.attr]}")
    elif isinstance(node, ast.Name) and node.id in {"min", "max"}:
        fault(ast.Name(_CALLS[node.id], node.ctx), f"{node.id} to {_CALLS[node.id]}")
    elif isinstance(node, ast.IfExp | ast.If) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        negated = copy.deepcopy(node)
        negated.test = ast.UnaryOp(ast.Not(), node.test)
        fault(negated, "condition negated")
    elif _is_removable(node):
        fault(ast.Pass(), f"without {ast.unparse(node).splitlines()[0][:60]}")


def _is_removable(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign):
        return True
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    function = node.value.func
    return not (isinstance(function, ast.Attribute) and function.attr in _SKIPPED_CALLS)


def _setter(values: list[ast.AST], index: int) -> Callable[[ast.AST], None]:
    def put(node: ast.AST) -> None:
        values[index] = node

    return put


def _attribute_setter(parent: ast.AST, name: str) -> Callable[[ast.AST], None]:
    def put(node: ast.AST) -> None:
        setattr(parent, name, node)

    return put
