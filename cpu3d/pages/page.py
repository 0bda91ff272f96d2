"""The frame of every self-contained page: one style, pictures inside, values as text for people."""

import base64
import datetime
import json
from pathlib import Path
from typing import Any, List, Tuple

from cpu3d.errors import InputError
from cpu3d.util.atomic import writable_folder
from memory_estimator.installed import as_typed


def page_file(out: Path) -> Path:
    """`out`, in a folder that is made if it is missing. Raises InputError unless a page can be
    written there."""
    if out.is_dir():
        raise InputError(
            f"--out {out} must be a file, found a folder; add a name such as page.html"
        )
    if out.suffix.lower() not in (".html", ".htm"):  # an image named by mistake would be lost
        raise InputError(f"--out must end in .html, got {out.name}; give a name such as page.html")
    writable_folder(out.parent, "folder of --out")
    return out


def render_page(template: Path, **content: Any) -> str:
    """The page of a template, which includes the common style by `{% include "page.css" %}`.

    Text is escaped, and a name that the template asks for and `content` lacks is an error.
    """
    import jinja2  # on use: importing this module stays cheap

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(template.name).render(
        now=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        as_typed=as_typed,
        picture=_picture_url,
        **content,
    )


def flat(content: Any, prefix: str = "") -> List[Tuple[str, str]]:
    """Nested JSON as (dotted name, value) pairs; lists of plain values stay one value."""
    if isinstance(content, dict) and content:
        pairs = []
        for key, value in content.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            pairs += flat(value, name)
        return pairs
    nested = (dict, list, tuple)
    text = json.dumps(content)
    if isinstance(content, str):
        text = content
    elif isinstance(content, (list, tuple)) and not any(isinstance(v, nested) for v in content):
        text = ", ".join(map(str, content)) or "-"
    return [(prefix, text)]


def _picture_url(png: bytes) -> str:
    """PNG bytes as the address of a picture."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
