"""The cases in the folders and files that a user names, and the channel of each of their volumes.

    found = find_cases([Path("Task01/imagesTs")], ("FLAIR", "T1w"))
    found.cases[0].images, found.cases[0].names

A dataset.json names the channels of its 4D files and of nnU-Net's numbers (_0000); the name of a 3D
file tells its own. Where nothing tells them a case has no `names`.
"""

import contextlib
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Dict, Hashable, Iterator, List, Mapping, Optional, Sequence, Tuple

from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.datasets.dataset_json import describing
from cpu3d.data.datasets.names import (
    FileName,
    channel_key,
    ids_of_cases,
    name_of,
    read_name,
    read_names,
    stem_of,
    volumes_in,
)
from cpu3d.data.nifti import read_grid
from cpu3d.errors import InputError, raise_if_any

# Names of files that lie beside images in a folder.
NO_IMAGE = re.compile(r"(^|[\s_.-])(seg|segmentations?|labels?|masks?)$", re.IGNORECASE)
MEND = "repair the case or leave it out"


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
    for place, case_id in enumerate(ids):
        found.cases[place] = replace(found.cases[place], case_id=case_id, patient_id=case_id)
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
        below = _folders_in(folder, out)
        images = [path.name for path in below if path.name.lower().startswith("images")]
        if images:
            problem = f"{rule}, got a data set; name its {' or '.join(images)}"
            self.found.problems.append(problem)
            return
        with_volumes = []
        for path in below:
            candidates = [path] if volumes_in(path) else _folders_in(path, out)
            with_volumes += [candidate for candidate in candidates if volumes_in(candidate)]
        for path in with_volumes:
            self.add_files(volumes_in(path), path)
        if not with_volumes:
            self.found.problems.append(f"{rule}, found none; check the path")

    def add_files(self, paths: Sequence[Path], folder: Optional[Path] = None) -> None:
        """Add the cases of the files of a folder, or of files that were named one by one."""
        if folder and folder.name.lower().startswith("labels"):
            self._refuse(folder, "labels")
            return
        images = [path for path in paths if not NO_IMAGE.search(stem_of(path))]
        with_channels = [path for path in images if self._is_4d(path)]
        single = [path for path in images if path not in with_channels]
        names = read_names(single, self.channels)
        named = [path for path in single if names[path].channel]
        unnamed = [path for path in single if not names[path].channel]
        if folder and named:
            with_channels = []
            unnamed = []
        elif folder and with_channels:
            unnamed = []
        elif self.alone:
            own = [path for path in named if names[path].channel == channel_key(self.alone)]
            if own or unnamed:
                named = own
        read = [*with_channels, *named, *unnamed]
        if folder or read:
            self.found.unread += [path for path in paths if path not in read]
        for path in with_channels:
            self._add(path, stem_of(path))
        if self._are_channels(unnamed) and not named:
            self._add_numbered(unnamed)
        elif self.alone:
            for path in unnamed:
                self._add(path, stem_of(path))
        elif unnamed and not folder and not named:
            self._append(stem_of(unnamed[0]), unnamed, ())
            named = []
        elif unnamed:
            self._refuse(folder or unnamed[0].parent, f"files such as {unnamed[0].name}")
            named = []
        if named:
            self._add_named(named, names, folder)
        if not read:
            self._refuse(folder or paths[0], "a segmentation alone")

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

    def _append(self, case_id: str, images: Sequence[Path], names: Sequence[str]) -> None:
        case = CaseFiles(case_id, case_id, tuple(images), None, tuple(names))
        self.found.cases.append(case)

    def _add(self, path: Path, case_id: str) -> None:
        """Add a case whose channels are the volumes of one file."""
        with self._problems():
            about = describing(path)
            names = about.channels if about else ()
            with contextlib.suppress(InputError):  # a damaged file is named when it is loaded
                count = read_grid(path)[1]
                if about and count != len(names):
                    rule = f"{path} must hold the channels that {about.path} names"
                    todo = f'correct the file, or "{about.channels_field}" there'
                    self.found.problems.append(f"{rule}, {', '.join(names)}, got {count}; {todo}")
                    return
            self._append(case_id, [path], names)

    def _add_named(
        self, paths: Sequence[Path], names: Mapping[Path, FileName], folder: Optional[Path]
    ) -> None:
        """Add the cases of files that are named after their channels: one case if each channel has
        one file, else one for each rest of a name."""
        known = {channel_key(channel): channel for channel in self.channels}
        is_one_case = len({names[path].channel for path in paths}) == len(paths)
        if self.alone and not folder:
            is_one_case = False
        groups: Dict[Hashable, List[Path]] = defaultdict(list)
        for path in paths:
            groups[None if is_one_case else (path.parent, names[path].case)].append(path)
        for files in groups.values():
            where = folder or files[0].parent
            case_id = min(names[path].case for path in files)
            if not case_id or (folder and len(groups) == 1):
                case_id = name_of(where)
            by_channel: Dict[str, List[Path]] = defaultdict(list)
            for path in files:
                key = str(names[path].channel)
                by_channel[known.get(key, key)].append(path)
            self._add_one_each(case_id, where, by_channel)

    def _add_one_each(
        self, case_id: str, where: Path, by_channel: Mapping[str, Sequence[Path]]
    ) -> None:
        """Add a case with one file for each of these channels."""
        with self._problems():
            raise_if_any(
                f"case {case_id} in {where} must have one file for {channel}, got "
                f"{', '.join(path.name for path in files)}; {MEND}"
                for channel, files in by_channel.items()
                if len(files) != 1
            )
            images = [files[0] for files in by_channel.values()]
            self._append(case_id, images, list(by_channel))

    def _are_channels(self, paths: Sequence[Path]) -> bool:
        """Whether the numbers at the end of names are nnU-Net's, of channels, and not those of
        cases: of one channel if all are 0; of several if there is a 0, or cases of several files,
        or a dataset.json of several channels."""
        names = [read_name(path) for path in paths]
        numbers = [name.number for name in names if name.number is not None]
        if not paths or len(numbers) < len(paths):
            return False
        about = None
        with contextlib.suppress(InputError):  # refused later
            about = describing(paths[0])
        count = len(about.channels if about else self.channels)
        if count <= 1:
            return count == 1 and not any(numbers)
        if about:
            return True
        if self.alone and max(numbers) >= count:
            return False
        cases = {(path.parent, name.case) for path, name in zip(paths, names)}
        return 0 in numbers or len(cases) < len(paths)

    def _add_numbered(self, paths: Sequence[Path]) -> None:
        """Add the cases of nnU-Net's files: <case>_<number of the channel>."""
        groups: Dict[Tuple[Path, str], Dict[int, List[Path]]] = {}
        for path in paths:
            name = read_name(path)
            by_number = groups.setdefault((path.parent, name.case), defaultdict(list))
            by_number[name.number or 0].append(path)
        for (folder, case_id), files in groups.items():
            with self._problems():
                about = describing(folder / case_id)
                order = about.channels if about else self.channels
                raise_if_any(
                    f"case {case_id} in {folder} must have files of the channels 0 to "
                    f"{len(order) - 1}, {', '.join(order)}, got {files[number][0].name}; {MEND}"
                    for number in sorted(files)
                    if number >= len(order)
                )
                if about is None and len(order) > 1:
                    self.found.numbered.append(case_id)
                by_channel = {order[number]: files[number] for number in sorted(files)}
                self._add_one_each(case_id, folder, by_channel)

    @contextlib.contextmanager
    def _problems(self) -> Iterator[None]:
        """Keep the problems of a case, which leaves the others as they are."""
        try:
            yield
        except InputError as error:
            self.found.problems += error.problems


def _folders_in(folder: Path, out: Optional[Path]) -> List[Path]:
    """The folders in a folder, but for hidden ones and the one that predictions go to."""
    skipped = out.resolve() if out else None
    paths = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    return [path for path in paths if not path.name.startswith(".") and path.resolve() != skipped]
