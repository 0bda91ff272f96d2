"""Files of the site from outside docs/: the README, the notebook, tables of the records, all that
pages link to; and what pages have from the code (made.py).

On its own a page's links work in the repository, `../records/compare.jsonl`; the site has these
files under `project/`."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from made import with_made  # noqa: E402

OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
PAGES = {
    "README.md": "first_hour.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    **{f"records/{name}.md": f"{name}.md" for name in ("log", "estimator", "kernels", "compare")},
    "records/README.md": "records.md",
}
"""Pages outside docs/ -> their names in the site."""


def on_files(files, config):
    """Add the pages outside docs/, the notebook, the tables and what pages link to."""
    texts = [page.content_string for page in files.documentation_pages()]
    for path, page in PAGES.items():
        text = from_docs(path, (ROOT / path).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
        texts.append(text)
    for path in sorted({path for text in texts for path in OUTSIDE.findall(text)} - set(PAGES)):
        if (ROOT / path).is_file():
            files.append(File.generated(config, f"project/{path}", abs_src_path=str(ROOT / path)))
    notebook = (ROOT / "examples" / "first_hour.ipynb").read_text(encoding="utf-8")
    cells = "\n\n".join(as_markdown(cell) for cell in json.loads(notebook)["cells"])
    files.append(
        File.generated(config, "first_hour_in_python.md", content=cells.replace("](../docs/", "]("))
    )
    for name, content in tables().items():
        files.append(File.generated(config, name, content=content))
    return files


def from_docs(path, text):
    """A page outside docs/ with its links as a page in docs/ has them."""

    def link(found):
        target = (ROOT / path).parent / found[1]
        inside = os.path.relpath(target, ROOT / "docs")
        return f"]({inside}"

    return LINK.sub(link, text)


def tables():
    """Name -> content of the pages that records.tables makes from records/, in the project's own
    environment."""
    with tempfile.TemporaryDirectory() as folder:
        pages = {"results.md": "--out", "validation.md": "--page"}
        words = [
            word for name, option in pages.items() for word in (option, str(Path(folder) / name))
        ]
        subprocess.run(
            [ROOT / ".venv/bin/python", "-m", "records.tables", "--records", "records", *words],
            cwd=ROOT,
            check=True,
        )
        return {name: (Path(folder) / name).read_text(encoding="utf-8") for name in pages}


def on_page_markdown(markdown, page, **_):
    """Put in what is made of the code, and let links to files outside docs/ lead to their place in
    the site."""
    if "/" in page.file.src_uri:
        return markdown
    return OUTSIDE.sub(
        lambda link: "](" + PAGES.get(link[1], f"project/{link[1]}"), with_made(markdown)
    )


def as_markdown(cell):
    """A notebook's cell with its output."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        if "image/png" in output.get("data", {}):
            parts.append(
                f"![output](data:image/png;base64,{''.join(output['data']['image/png'].split())})"
            )
        else:
            parts.append(
                "```text\n"
                + "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
                + "\n```"
            )
    return "\n\n".join(parts)
