"""The cases in the folders and files that a user names, and the channel of each of their volumes.

    found = find_cases([Path("Task01/imagesTs")], ("FLAIR", "T1w"))
    found.cases[0].images, found.cases[0].names

A dataset.json names the channels of its 4D files and of nnU-Net's numbers (_0000); the name of a 3D
file tells its own. Where nothing tells them a case has no `names`.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.datasets.dataset_json import describing
from cpu3d.data.datasets.names import (
    folders_with_volumes,
    ids_of_cases,
    name_of,
    read_name,
    stem_of,
    volumes_in,
)
from cpu3d.data.nifti import read_grid
from cpu3d.errors import InputError, raise_if_any

# Names of files that lie beside images in a folder.
NO_IMAGE = re.compile(r"(^|[\s_.-])(seg|segmentations?|labels?|masks?)$", re.IGNORECASE)


@dataclass
class Found:
    """What the paths hold."""

    cases: List[CaseFiles] = field(default_factory=list)
    problems: List[str] = field(default_factory=list)  # of paths that are no cases
    unread: List[Path] = field(default_factory=list)  # files beside the images
    numbered: List[str] = field(default_factory=list)
    """Cases of nnU-Net's numbers without a dataset.json, which count the channels as given."""


def find_cases(
    paths: Sequence[Path],
    channels: Sequence[str],
    *,
    alone: str = "",
    out: Optional[Path] = None,
) -> Found:
    """The cases in `paths`. `channels` are further names that files may end in, in their order.

    A folder is a case, or holds several: 4D files, 3D files of one or more cases, or folders of
    these (two levels deep, `out` aside). 3D files that are named one by one are cases by their
    names. `alone` is the only channel that is asked for: then a 3D file that names none is a case.
    """
    search = _Search(tuple(channels), alone)
    loose = []
    for path in paths:
        if path.is_dir():
            search.add_folder(path, out)
        else:
            loose.append(path)
    if loose:
        search.add_files(loose)
    found = search.found
    ids = ids_of_cases(
        [case.case_id for case in found.cases], [case.images[0] for case in found.cases]
    )
    found.cases = [
        replace(case, case_id=case_id, patient_id=case_id)
        for case, case_id in zip(found.cases, ids)
    ]
    return found


# --- Private helpers ---


class _Search:
    """Fills `found`."""

    def __init__(self, channels: Tuple[str, ...], alone: str):
        self.channels = channels
        self.alone = alone
        self.found = Found()

    def add_folder(self, folder: Path, out: Optional[Path]) -> None:
        """Add the cases in a folder, or in the folders below it."""
        rule = f"--image {folder} must be a case or hold cases, files in .nii.gz or .nii"
        if volumes_in(folder):
            self.add_files(volumes_in(folder), folder)
            return
        images = [path.name for path in folder.iterdir() if path.name.lower().startswith("images")]
        if images:
            names = " or ".join(sorted(images))
            self.found.problems.append(f"{rule}, got a data set; name its {names}")
            return
        with_volumes = folders_with_volumes(folder, out)
        for path in with_volumes:
            self.add_files(volumes_in(path), path)
        if not with_volumes:
            self.found.problems.append(f"{rule}, found none; check the path")

    def add_files(self, paths: Sequence[Path], folder: Optional[Path] = None) -> None:
        """Add the cases of the files of a folder, or of files that were named one by one."""
        with_channels = []
        named = []
        unnamed = []
        for path in paths:
            if NO_IMAGE.search(stem_of(path)):
                continue
            if self._is_4d(path):
                with_channels.append(path)
            elif read_name(path, self.channels).channel:
                named.append(path)
            else:
                unnamed.append(path)
        if folder and named:  # other files lie beside those of a case
            with_channels = []
            unnamed = []
        elif folder and with_channels:
            unnamed = []
        read = [*with_channels, *named, *unnamed]
        is_labels = folder is not None and folder.name.lower().startswith("labels")
        if is_labels or not read:
            self._refuse(folder or paths[0], "a segmentation alone")
            return
        self.found.unread += [path for path in paths if path not in read]
        try:
            self._add_cases(with_channels, named, unnamed, folder)
        except InputError as error:  # of a dataset.json
            self.found.problems += error.problems

    def _add_cases(
        self,
        with_channels: Sequence[Path],
        named: Sequence[Path],
        unnamed: Sequence[Path],
        folder: Optional[Path],
    ) -> None:
        """Add the cases of 4D files, and of 3D files whose names tell their channel or do not."""
        for path in with_channels:
            self._add_alone(path)
        if named and unnamed:
            self._refuse(unnamed[0].parent, f"files such as {unnamed[0].name}")
        elif named or self._are_channels(unnamed):
            self._add_groups([*named, *unnamed])
        elif self.alone:
            for path in unnamed:
                self._add_alone(path)
        elif unnamed and not folder and not any(map(self._has_channel, unnamed)):
            self._append(stem_of(unnamed[0]), unnamed, ())
        elif unnamed:
            self._refuse(unnamed[0].parent, f"files such as {unnamed[0].name}")

    def _refuse(self, path: Path, got: str) -> None:
        rule = f"--image {path} must hold 4D files, or 3D files whose names tell their channel"
        order = ", ".join(f"{name} or {n:04d}" for n, name in enumerate(self.channels))
        todo = "rename them, or give the files of one case in order"
        self.found.problems.append(f"{rule} ({order}), got {got}; {todo}")

    def _is_4d(self, path: Path) -> bool:
        """Whether a file is a case of its own, by its header; one that is damaged is, unless its
        name tells more."""
        try:
            return read_grid(path)[1] > 1
        except InputError:
            name = read_name(path, self.channels)
            return name.channel is None and name.number is None

    def _has_channel(self, path: Path) -> bool:
        """Whether a name has a channel at another place than its end, where none is read."""
        words = re.split(r"[\s_.-]", stem_of(path))
        return any(read_name(Path(word), self.channels).channel for word in words)

    def _append(self, case_id: str, images: Sequence[Path], names: Sequence[str]) -> None:
        case = CaseFiles(case_id, case_id, tuple(images), None, tuple(names))
        self.found.cases.append(case)

    def _add_alone(self, path: Path) -> None:
        """Add a case whose channels are the volumes of one file."""
        about = describing(path)
        self._append(stem_of(path), [path], about.channels if about else ())

    def _are_channels(self, paths: Sequence[Path]) -> bool:
        """Whether the numbers at the end of names are nnU-Net's, of channels, and not those of
        cases: of one channel if all are 0; of several if more than one of them is asked for, or no
        number is beyond them."""
        numbers = [read_name(path).number for path in paths]
        told = [number for number in numbers if number is not None]
        if not paths or len(told) < len(paths):
            return False
        count = len(self._order_at(paths[0]))
        if count <= 1:
            return count == 1 and not any(told)
        return not self.alone or max(told) < count

    def _order_at(self, image: Path) -> Tuple[str, ...]:
        """The channels that nnU-Net's numbers count."""
        about = describing(image)
        return about.channels if about else self.channels

    def _add_groups(self, paths: Sequence[Path]) -> None:
        """Add the cases of files that are named after their channels, or numbered in nnU-Net's way:
        one for each rest of a name."""
        groups: Dict[Tuple[Path, str], List[Path]] = defaultdict(list)
        for path in paths:
            groups[path.parent, read_name(path, self.channels).case].append(path)
        for (folder, rest), files in groups.items():
            try:
                self._add_group(rest or name_of(folder), folder, files)
            except InputError as error:  # the other cases are read
                self.found.problems += error.problems

    def _add_group(self, case_id: str, folder: Path, files: Sequence[Path]) -> None:
        """Add a case with one file for each channel."""
        mend = "repair the case or leave it out"
        where = f"case {case_id} in {folder} must have"
        by_channel: Dict[str, List[str]] = defaultdict(list)
        files = sorted(files)
        for path in files:
            name = read_name(path, self.channels)
            channel = str(name.channel)
            if name.number is not None:
                order = self._order_at(path)
                if name.number >= len(order):
                    rule = f"{where} files of the channels 0 to {len(order) - 1}"
                    raise InputError(f"{rule}, {', '.join(order)}, got {path.name}; {mend}")
                channel = order[name.number]
                if describing(path) is None and len(order) > 1:
                    self.found.numbered.append(case_id)
            by_channel[channel].append(path.name)
        raise_if_any(
            f"{where} one file for {channel}, got {', '.join(names)}; {mend}"
            for channel, names in by_channel.items()
            if len(names) != 1
        )
        self._append(case_id, files, list(by_channel))
