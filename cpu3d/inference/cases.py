"""The files of cases to predict, as a user names them: folders, 4D files, or a file a channel."""

from pathlib import Path
from typing import List, Sequence

from cpu3d.data.stores.layouts import (
    CHANNEL_NAMES,
    MODALITY_SUFFIX,
    CaseFiles,
    modality_of,
    name_of,
    one_each,
    stem_of,
    volumes_in,
)
from cpu3d.errors import InputError, refuse


def case_files(paths: Sequence[Path], channels: Sequence[str]) -> CaseFiles:
    """The image files of one case to predict: a BraTS case folder, one 4D file, or one 3D file per channel. Files that
    all end in a known modality (`_flair`, `-t1c`, ...) are put in the order of `channels`, others must be given in it.
    Segmentations are left out: `label` is None. Raises InputError when a channel is missing or double."""
    first, own = paths[0], [CHANNEL_NAMES.get(name.lower()) for name in channels]
    folder, named = first.is_dir(), all(own) and all(map(modality_of, paths))
    case_id = name_of(first) if folder else stem_of(first)
    apart = not folder and (len(paths) > 1 or len(channels) == 1)
    if apart:
        paths = [path for path in paths if modality_of(path) != "seg"]
        if named:
            case_id = MODALITY_SUFFIX.sub("", f"{case_id}.nii") or name_of(first.parent)
        elif len(paths) != len(channels):
            rule = f"one 4D file or one for each of {', '.join(channels)}"
            raise InputError(f"--image must name {rule}, got {len(paths)} files; name them all")
        else:
            rule = f"must be the file of its channel by its place among {', '.join(channels)}"
            others = [
                (path, modality_of(path)) for path, one in zip(paths, own) if modality_of(path) in {*own} - {None, one}
            ]
            refuse(f"{path} {rule}, got a name of {other}; give files in that order" for path, other in others)
    if folder or (named and apart):
        wanted = [known or name for known, name in zip(own, channels)]
        files, wrong = one_each(volumes_in(first) if folder else paths, wanted, first if folder else first.parent)
        refuse(wrong)
        paths = [files[name] for name in wanted]
    return CaseFiles(case_id, case_id, tuple(paths), None)


def grouped_by_case(paths: Sequence[Path], channels: Sequence[str]) -> List[List[Path]]:
    """3D files to predict, those of one case together: they are one case, or for a single channel a case each, without
    the files of other modalities and segmentations."""
    if len(channels) > 1:
        return [list(paths)] if paths else []
    wanted = (None, CHANNEL_NAMES.get(channels[0].lower()))
    return [[path] for path in paths if modality_of(path) in wanted] or [[path] for path in paths]
