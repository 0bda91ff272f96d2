"""The order of rooms: a module imports only from its own room and from those before it."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ORDER = (
    *({"models"}, {"memory_estimator"}, {"errors"}, {"util"}, {"data"}, {"run"}, {"pages"}, {"host"}, {"settings"}),
    *({"distributed"}, {"training"}, {"inference"}, {"report"}, {"compare"}, {"bench"}, {"__main__", "demo"}),
)
"""Rooms beside each other stand in one set; "settings" is what else lies in cpu3d/ itself."""

RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}


def room_of(dotted):
    """Of a dotted name, such as "cpu3d.data.store"; None outside the project."""
    package, _, rest = dotted.partition(".")
    if package != "cpu3d":
        return package if package in RANK else None
    name = rest.partition(".")[0]
    return name if name in RANK else "settings"


def imported(path):
    """Dotted names of what a module imports, at its top or within a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            # `from cpu3d import memory_plan` names a module, `from cpu3d.settings import RunConfig` does not.
            yield from (f"{node.module}.{one.name}" if node.module == "cpu3d" else node.module for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)


def test_rooms_import_only_from_those_before_them():
    found = {}
    for path in (
        path for package in ("models", "memory_estimator", "cpu3d") for path in (ROOT / package).rglob("*.py")
    ):
        here = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for room in filter(None, map(room_of, imported(path))):
            if RANK[room] > RANK[here]:
                found.setdefault((here, room), set()).add(str(path.relative_to(ROOT)))
    assert not found
