"""What pages have from the code itself: the order of a step, and the list of files.

    python docs/made.py step
    python docs/made.py files

The site has the same in place of `<!-- made: step -->` and `<!-- made: files -->`. It needs nothing
but Python."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from models.config import POLICIES, UNetConfig  # noqa: E402
from models.network import network_program  # noqa: E402
from models.program import loss_program  # noqa: E402

ROOMS = ("models", "memory_estimator", "cpu3d")
COMMENTS = {
    ".py": r'"""(.+?)("""|\n\n)',
    ".c": r"/\*(.+?)(\*/|\n\n)",
    ".h": r"/\*(.+?)(\*/|\n\n)",
    ".js": r"// (.+?)\n(?!//)",
}
"""Where a file of a suffix says what it is."""
MARK = re.compile(r"<!-- made: (\w+) -->")


def step():
    """The operations of a network of two levels, a table for each policy."""
    tables = []
    for policy in POLICIES:
        network = network_program(UNetConfig(depth=2, policy=policy))
        sums, slopes = loss_program(network.logits)
        rows = [
            *rows_of("forward", network.forward),
            *rows_of("loss", sums + slopes),
            *rows_of("backward", network.backward),
        ]
        head = ("", "operation", "layer", "reads", "makes", "over")
        tables.append(f"`--policy {policy}`:\n\n{table(head, rows)}")
    return "\n\n".join(tables)


def rows_of(phase, ops):
    """A row for each operation; the phase is in the first."""
    rows = []
    for op in ops:
        kind = f"{op.kind.value}, again" if op.again else op.kind.value
        rows.append(("", kind, op.layer, *map(names, (op.reads, op.makes, op.over))))
    first, *others = rows
    return [(phase, *first[1:]), *others]


def names(values):
    return ", ".join(value.name for value in values)


def files():
    """Each folder's files, with the first sentence of what they say of themselves."""
    tables = []
    for room in ROOMS:
        folders = {}
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in COMMENTS and path.stem != "__init__":
                folders.setdefault(path.parent, []).append((f"`{path.name}`", says(path)))
        for folder, rows in folders.items():
            title = f"**{folder.relative_to(ROOT)}/** {says(folder / '__init__.py')}"
            tables.append(f"{title}\n\n{table(('file', 'content'), rows)}")
    return "\n\n".join(tables)


def says(path):
    """The first sentence of a file's docstring, or of its first comment."""
    text = path.read_text(encoding="utf-8")
    about = re.search(COMMENTS[path.suffix], text, re.DOTALL)
    words = re.sub(r"\s+(//)?", " ", about.group(1)).strip()
    return re.split(r"(?<=[.?])\s+(?=[A-Z])", words)[0]


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


MADE = {"step": step, "files": files}


def with_made(markdown):
    """A page with what is made in its places."""
    return MARK.sub(lambda mark: MADE[mark.group(1)](), markdown)


if __name__ == "__main__":
    print(MADE[sys.argv[1]]())
