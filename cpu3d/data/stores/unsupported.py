"""Data sets that are recognised and refused, as what they need is not supported yet: labels to be
ignored."""

import re

from cpu3d.data.stores.layouts import Dataset
from cpu3d.errors import raise_if_any

# A name that says "do not learn this": some of the first words, and else only such as the second.
_IGNORED = r"ignor\w*|exclud\w*|void|unlabel+ed|unannotated|unknown|undefined|unspecified"
_IGNORED += r"|do ?n[o']?t (care|use)|(not|non) (annotated|label+ed|used)|no (annotation|label)"
_FILLING = r"background|label|region|area|class|voxels?|pixels?|value|index|mask|\d+"
_FILLING += r"|to|be|or|and|the"
IGNORE_NAME = re.compile(rf"(({_FILLING}) )*({_IGNORED})( ({_IGNORED}|{_FILLING}))*")


def refuse_unsupported(dataset: Dataset) -> None:
    """Raise InputError for a data set with labels that are to be ignored."""
    rule = f"labels of data set {dataset.folder} must all be learnt"
    todo = "an ignore label is not supported yet: annotate its voxels, or leave its cases out"
    ignored = {code: name for code, name in dataset.labels.items() if code and is_ignored(name)}
    raise_if_any(f"{rule}, got {code} {name}; {todo}" for code, name in ignored.items())


def is_ignored(name: str) -> bool:
    """Whether a label's name says that its voxels are not to be learnt, such as "ignore" or "don't
    care"."""
    plain = re.sub(r"[^a-z0-9']+", " ", name.lower().replace("\u2019", "'")).strip()
    return IGNORE_NAME.fullmatch(plain) is not None
