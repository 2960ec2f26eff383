"""Rewards that read the calculator annotations of a GSM8K solution, `<<48/2=24>>`, and its last line, `#### 72`; and
the calculator, an environment that completes annotations.

Plain functions with TRL's signature. `annotation_score` and `final_line` are what PPO maximises; `answer_accuracy` is
logged with weight 0 (ppo_calculator.yaml rewards it): it tells real progress from annotations that are merely right.
"""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

ANNOTATION = re.compile(r"<<([^<>]*)>>")
LONGEST = 80
DECIMALS, LARGEST = 4, 10**9
FINAL_LINE = re.compile(r"\n#### (-?[\d,]*\.?\d+)\s*$")
NUMBER = re.compile(r"-?[\d,]*\.?\d+")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def annotation_score(prompts, completions, completion_ids=None, **columns) -> list[float]:
    """Return the share of distinct annotations whose arithmetic is right; 0 for a completion without any."""
    return [_share_right(text) for text in completions]


def final_line(prompts, completions, completion_ids=None, **columns) -> list[float]:
    """Return 1 where the completion ends with a line `#### number`, else 0."""
    return [float(bool(FINAL_LINE.search(text))) for text in completions]


def answer_accuracy(prompts, completions, completion_ids=None, answer=None, **columns) -> list[float]:
    """Return 1 where the number of the last line is that of the true solution, else 0."""
    return [float(_final_number(text) == _final_number(true)) for text, true in zip(completions, answer, strict=True)]


class Calculator:
    """A Gymnasium text environment: it answers `<<48/2=` by `24>>`, and any other `=` by nothing.

    A turn ends at `=` (`stop_tokens`) or at the end of the solution. What is not arithmetic, the policy completes
    itself.
    """

    def reset(self, *, seed=None, options=None):
        return "", {}

    def step(self, action):
        asks = action.endswith("=")
        text, mark, expression = action.removesuffix("=").rpartition("<<")
        result = _calculated(expression) if mark and asks else None
        return "" if result is None else f"{result}>>", 0.0, not asks, False, {}


def _share_right(text: str) -> float:
    # Without spaces, for `2*2=4` and `2 * 2 = 4` are one annotation. A malformed one counts as wrong.
    annotations = {"".join(found.split()) for found in ANNOTATION.findall(text)}
    return sum(map(_is_right, annotations)) / len(annotations) if annotations else 0.0


def _is_right(annotation: str) -> bool:
    """Say whether `expression=value` is right: value is the result, rounded to the decimals that it shows."""
    expression, _, value = annotation.rpartition("=")
    calculates = any(sign in expression.lstrip("-") for sign in "+-*/")
    if len(annotation) > LONGEST or not calculates or not NUMBER.fullmatch(value):
        return False
    result = _result(expression)
    if result is None:
        return False
    plain = value.replace(",", "")
    decimals = len(plain.partition(".")[2])
    return abs(result - Fraction(plain)) <= Fraction(1, 2 * 10**decimals) * (decimals > 0)


def _calculated(expression: str) -> str | None:
    """Return the result of an annotation as GSM8K writes it, with at most DECIMALS decimals; None if there is none."""
    result = _result(expression) if len(expression) <= LONGEST else None
    if result is None or abs(result) >= LARGEST:
        return None
    return f"{float(round(result, DECIMALS)):.{DECIMALS}f}".rstrip("0").rstrip(".")


def _result(expression: str) -> Fraction | None:
    try:
        return _evaluate(ast.parse(expression.replace(",", "").strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    raise ValueError(f"{ast.dump(node)} is not arithmetic of numbers")


def _final_number(text: str) -> Fraction | None:
    found = FINAL_LINE.search(text)
    return Fraction(found.group(1).replace(",", "")) if found else None
