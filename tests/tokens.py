"""Print the tokens of each room, and fail where product, tests or C are above their ceilings.

A token is a name, a number, a string or an operator; comments, docstrings and layout are none.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

CEILINGS = {"product": 215_000, "tests": 180_000, "C": 63_743}
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
C_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"|\w+(?:\.\w+)*|<<=|>>=|->|\+\+|--|[-+*/%&|^=!<>]=|&&|\|\||<<|>>|\S'
)


def python_tokens(text):
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    docstrings = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, HAS_DOCSTRING) and ast.get_docstring(node, clean=False) is not None
    ]
    return sum(token.type not in LAYOUT for token in tokens) - len(docstrings)


def room_of(path):
    """The package below cpu3d, else the top folder."""
    parts = path.parts
    if parts[0] == "cpu3d" and len(parts) > 2:
        return "/".join(parts[:2])
    return parts[0]


if __name__ == "__main__":
    rooms = Counter()
    totals = Counter()
    for name in subprocess.check_output(["git", "ls-files"], text=True).split("\n"):
        path = Path(name)
        if path.suffix == ".py" and path.exists():
            count = python_tokens(path.read_text(encoding="utf-8"))
            rooms[room_of(path)] += count
            if path.parts[0] == "tests":
                totals["tests"] += count
            elif path.parts[0] in ("models", "memory_estimator", "cpu3d"):
                totals["product"] += count
        elif path.suffix in (".c", ".h"):
            code = C_COMMENT.sub(" ", path.read_text(encoding="utf-8"))
            totals["C"] += len(C_TOKEN.findall(code))
    for room, count in sorted(rooms.items()):
        print(f"{count:8,}  {room}")
    too_large = [name for name, ceiling in CEILINGS.items() if totals[name] > ceiling]
    for name, ceiling in CEILINGS.items():
        print(f"{totals[name]:8,}  {name}, at most {ceiling:,}")
    sys.exit(
        f"tokens of {' and '.join(too_large)} must be at most the ceiling; remove some"
        if too_large
        else 0
    )
