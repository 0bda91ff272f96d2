"""The commands, files, names and links in the README and the pages exist."""

import re
import shlex
import subprocess
import sys

import pytest

from cpu3d.__main__ import parse
from cpu3d.experiments.variants import parse_variant
from memory_estimator import __main__ as estimator
from tests.test_imports import ROOT, sources


def shown_commands(path):
    """The command lines that a page or a docstring shows, without ./run.sh; those in backticks only
    with options."""
    text = re.sub(r"\\+\n\s*", "", path.read_text("utf-8"))
    lines = re.findall(r"^(?:Examples?:)?\s*\./run\.sh ([a-z].*)$", text, re.MULTILINE)
    if path.suffix == ".md":
        lines += re.findall(r"`\./run\.sh ([a-z][^`]* --[^`]*)`", text)
    return lines


def check(words):
    """Read a command line as its program does; SystemExit if the program would refuse it."""
    if words[0] == "estimate":
        estimator.make_parser().parse_args(words[1:])
    elif words[0] not in ("setup", "test", "help"):
        _, args = parse(words)
        for name, options in getattr(args, "variant", None) or ():
            parse_variant(name, options, {})


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("records/*.md"))]
MODULES = sources("cpu3d", "memory_estimator", "models")


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


SOURCES = sources(
    "cpu3d", "memory_estimator", "models", "docs", "examples", "records", "tests", pattern="*.*"
)
ELSEWHERE = {
    "bits/confname.h",
    "linux/prctl.h",
    "mkl_cpu_allocator.h",
    "other.py",  # of a user
    "your_step.py",
    "shared.h",  # which the build makes
    "gradient.c",  # of a formula
}


def is_there(name):
    """Whether a page may mean a file of the project by `name`, such as "step/timing.py"."""
    return any(str(path).endswith(f"/{name}") for path in SOURCES)


def test_every_file_of_the_project_that_is_named_exists():
    """In pages, and in docstrings and comments."""
    unknown = []
    for path in PAGES + MODULES:
        text = path.read_text("utf-8")
        if path.suffix == ".py":
            text = "\n".join(re.findall(r'""".*?"""|# .*', text, re.DOTALL))
        names = re.findall(r"(?<![\w./<*-])(?:\.\./)?(\w[\w/]*\.(?:py|c|h))\b(?![.(*])", text)
        unknown += [(path.name, name) for name in {*names} - ELSEWHERE if not is_there(name)]
    assert unknown == []


MADE = {"step": ["convolve", "loss_slope"], "files": [f"`{path.name}`" for path in MODULES]}


@pytest.mark.parametrize("name", MADE)
def test_what_a_page_has_from_the_code_is_made_by_plain_python(name):
    command = [sys.executable, "-I", str(ROOT / "docs/made.py"), name]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [words for words in MADE[name] if words not in made and "__init__" not in words] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text("utf-8"))
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
