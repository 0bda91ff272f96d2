"""What the site takes from outside docs/: the README as its first hour, and each file that a page links to.

On its own a page's links work in the repository, `../records/wide.jsonl`; the site has these files under `project/`.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]

OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files, config):
    """Add the README and what pages link to."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = re.sub(r"\]\((?!docs/|https?:|#)", "](../", readme).replace("](docs/", "](")
    texts = [page.content_string for page in files.documentation_pages()] + [readme]
    for path in sorted({path for text in texts for path in OUTSIDE.findall(text)}):
        if (ROOT / path).is_file():
            files.append(File.generated(config, f"project/{path}", abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "first_hour.md", content=readme))
    return files


def on_page_markdown(markdown, page, **_):
    """Link to what lies outside where the site has it."""
    return markdown if "/" in page.file.src_uri else OUTSIDE.sub(r"](project/\1", markdown)
