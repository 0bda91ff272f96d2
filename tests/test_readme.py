"""The README's figures are those of the records, and its commands and files exist."""

import re
from pathlib import Path

from cpu3d.__main__ import COMMANDS
from cpu3d.bench.tables import data_page, tables
from memory_estimator.paper import paper_lines

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_line_of_the_generated_tables_stands_in_the_readme():
    lines = README.splitlines()
    assert [line for line in tables(ROOT / "records") if line not in lines] == []


def test_the_data_page_s_tables_are_those_of_the_record():
    lines = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in data_page(ROOT / "records") if line not in lines] == []


def test_every_subcommand_that_the_readme_names_exists():
    named = set(re.findall(r"\./run\.sh ([a-z]+)", README))
    assert named - set(COMMANDS) <= {"setup", "test", "estimate", "help"}
    assert {"prepare", "train", "evaluate", "predict", "report", "bench"} <= named


def test_every_file_of_the_tree_exists_and_every_module_is_in_it():
    tree = README.split("## Where things are")[1].split("```")[1]
    named = set(re.findall(r"[a-z0-9_]+\.(?:py|md|sh)", tree))
    there = {path.name for path in ROOT.rglob("*.*") if not any(part.startswith(".venv") for part in path.parts)}
    assert named <= there
    rooms = ("models", "memory_estimator", "cpu3d", "cpu3d/data")
    modules = {path.name for room in rooms for path in (ROOT / room).glob("*.py")}
    assert modules - named - {"__init__.py"} == set()


def test_the_estimator_s_page_says_what_the_estimator_says_of_the_paper_s_job():
    page = (ROOT / "docs" / "estimator.md").read_text(encoding="utf-8")
    missing = [line for line in paper_lines() if line not in page]
    assert not missing, "print them with `python -m memory_estimator.paper`:\n" + "\n".join(missing)
