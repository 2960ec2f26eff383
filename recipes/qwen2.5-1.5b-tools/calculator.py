"""A calculator that the policy may call, and the reward that reads its last message. Not yet run on hardware.

The tool has TRL's form: type hints and a docstring, of which the chat template makes the schema that the policy reads.
"""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 200
MARKED = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")


def calculate(expression: str) -> str:
    """
    Calculate an arithmetic expression.

    Args:
        expression: Numbers, parentheses, +, -, * and /, such as "48 / 2 + 48".

    Returns:
        The result.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    result = _evaluate(ast.parse(expression.replace(",", "").strip(), mode="eval").body)
    return str(result) if result.denominator == 1 else f"{float(result):.10g}"


def correct(prompts, completions, completion_ids=None, answer=None, **columns) -> list[float]:
    """Return 1 where the number after the last `####` of the last message is the true answer, else 0."""
    found = [MARKED.findall(completion[-1].get("content") or "") for completion in completions]
    pairs = zip(found, answer, strict=True)
    return [float(bool(marks) and _number(marks[-1]) == _number(true)) for marks, true in pairs]


def called(prompts, completions, completion_ids=None, **columns) -> list[float]:
    """Return the calls of the calculator: logged with weight 0."""
    return [float(sum(len(m.get("tool_calls") or ()) for m in completion)) for completion in completions]


def _number(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    raise ValueError("only numbers, parentheses, +, -, * and / are allowed")
