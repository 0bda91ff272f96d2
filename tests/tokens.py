"""Print the tokens of each room, and fail where product, tests or C are above their ceilings.

A token is a name, a number, a string or an operator; comments, docstrings and layout are none.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

CEILINGS = {"product": 215_000, "tests": 180_000, "C": 63_743}
PRODUCT = ("models", "memory_estimator", "cpu3d")
COUNTED = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
C_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"|\w+(?:\.\w+)*|<<=|>>=|->|\+\+|--|[-+*/%&|^=!<>]=|&&|\|\||<<|>>|\S'
)


def python_tokens(path):
    with path.open(encoding="utf-8") as file:
        tokens = [token.type for token in tokenize.generate_tokens(file.readline)]
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    documented = [node for node in nodes if isinstance(node, HAS_DOCSTRING)]
    docstrings = sum(ast.get_docstring(node) is not None for node in documented)
    return sum(map(tokens.count, COUNTED)) - docstrings


if __name__ == "__main__":
    rooms = Counter()
    totals = Counter()
    for path in map(Path, subprocess.check_output(["git", "ls-files"], text=True).splitlines()):
        if path.suffix == ".py" and path.exists():
            count = python_tokens(path)
            rooms["/".join(path.parts[:-1][:2])] += count
            totals["product" if path.parts[0] in PRODUCT else path.parts[0]] += count
        elif path.suffix in (".c", ".h"):
            totals["C"] += len(C_TOKEN.findall(C_COMMENT.sub(" ", path.read_text("utf-8"))))
    for room, count in sorted(rooms.items()):
        print(f"{count:8,}  {room}")
    for name, ceiling in CEILINGS.items():
        print(f"{totals[name]:8,}  {name}, at most {ceiling:,}")
    sys.exit(any(totals[name] > ceiling for name, ceiling in CEILINGS.items()))
