"""The commands, files, names and links in the README and the pages exist."""

import re
import shlex
from pathlib import Path

import pytest

from cpu3d.__main__ import COMMANDS, parse
from cpu3d.compare.experiment import parse_variant
from memory_estimator import __main__ as estimator

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_subcommand_that_the_readme_names_exists():
    named = set(re.findall(r"\./run\.sh ([a-z]+)", README))
    assert named - set(COMMANDS) <= {"setup", "test", "estimate", "help"}
    assert {"prepare", "train", "evaluate", "predict", "report"} <= named


def shown_commands(path):
    """The command lines that a page or a docstring shows, without ./run.sh; those in backticks only
    with options."""
    text = re.sub(r"\\+\n\s*", "", path.read_text(encoding="utf-8"))
    lines = re.findall(r"^(?:Examples?:)?\s*\./run\.sh ([a-z].*)$", text, re.MULTILINE)
    return lines + (
        re.findall(r"`\./run\.sh ([a-z][^`]* --[^`]*)`", text) if path.suffix == ".md" else []
    )


def check(words):
    """Read a command line as its program does; SystemExit if the program would refuse it."""
    words = words[: words.index(">")] if ">" in words else words
    if words[0] == "estimate":
        estimator.make_parser().parse_args(words[1:])
    elif words[0] not in ("setup", "test", "help"):
        _, args = parse(words)
        for name, options in getattr(args, "variant", None) or ():
            parse_variant(name, options, {})


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [
    path
    for room in ("cpu3d", "memory_estimator", "models")
    for path in sorted((ROOT / room).rglob("*.py"))
]


@pytest.mark.parametrize(
    "path", [path for path in PAGES + MODULES if shown_commands(path)], ids=lambda path: path.name
)
def test_every_command_line_that_is_shown_is_one(path, capsys):
    refused = []
    for line in shown_commands(path):
        try:
            check(shlex.split(line, comments=True))
        except SystemExit as ended:
            if ended.code:
                refused.append(f"{line}: {capsys.readouterr().err}")
    assert not refused


FOLDERS = ("cpu3d", "memory_estimator", "models", "docs", "examples", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.*"))]
ELSEWHERE = {"mkl_cpu_allocator.h", "other.py", "shared.h", "your_step.py"}
"""Of TensorFlow, of a user, and what the build makes."""


def named(name):
    """The files of the project that a page may mean by `name`, such as "step/timing.py"."""
    return [path for path in SOURCES if f"/{path.relative_to(ROOT)}".endswith(f"/{name}")]


@pytest.mark.parametrize("path", [*PAGES, *MODULES], ids=lambda path: path.name)
def test_every_file_of_the_project_that_is_named_exists(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":  # what it says: docstrings and comments
        text = "\n".join(re.findall(r'""".*?"""|# .*', text, re.DOTALL))
    names = set(re.findall(r"(?<![\w./<*-])(?:\.\./)?(\w[\w/]*\.(?:py|c|h))\b(?![.(*])", text))
    assert [name for name in sorted(names - ELSEWHERE) if not named(name)] == []


def test_the_functions_of_the_journeys_are_in_the_files_beside_them():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^`|]* \| (`[^|]*) \| ([^|]*)", page, re.MULTILINE)
    assert len(rows) > 20
    lost = []
    for functions, files in rows:
        paths = [found for name in re.findall(r"`([^`]+)`", files) for found in named(name)]
        text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
        names = [name.split(".")[-1] for name in re.findall(r"`([^`]+)`", functions)]
        made = r"^ *(?:def |class )?{}\b[(:]|^{}\b"
        lost += [name for name in names if not re.search(made.format(name, name), text, re.M)]
    assert lost == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
