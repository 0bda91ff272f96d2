"""The cases to predict, from the paths a user gives: folders, 4D files, or 3D files, one a channel.

found = find_cases([Path("Task01/imagesTs")], predictor)    # its cases, problems and notes

Channels are found by name wherever names are known: a dataset.json names those of its 4D files and
of nnU-Net's numbers (_0000), the end of a 3D file's name its own. Only where nothing tells them
they are taken in the order of the run's.
"""

import contextlib
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Any,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.datasets.dataset_json import Description, describing
from cpu3d.data.datasets.layouts import LABEL_CODES, LabelCodes, label_codes_of
from cpu3d.data.datasets.names import (
    FileName,
    channel_key,
    name_of,
    places_of,
    read_name,
    read_names,
    stem_of,
    volumes_in,
)
from cpu3d.data.labels import PaintedRegions, painted_codes
from cpu3d.data.nifti import channel_count
from cpu3d.errors import InputError, raise_if_any
from cpu3d.settings import AUTO
from cpu3d.util.records import listed

# Names of files that lie beside images in a folder.
NO_IMAGE = re.compile(r"(^|[\s_.-])(seg|segmentations?|labels?|masks?)$", re.IGNORECASE)
MEND = "repair the case or leave it out"
STORE = "the run's store"  # the origin of label codes if a case has none of its own


@dataclass(frozen=True)
class Case:
    """A case to predict, and the label codes that it is written in."""

    files: CaseFiles
    channels: Tuple[str, ...]  # of its image: those of the run's store, or just the run's own
    codes_of: str  # origin of the codes: STORE, a layout, or the path of a dataset.json
    labels: Mapping[int, str]  # code -> name
    regions: PaintedRegions  # the run's regions and painting, in these codes
    written: Mapping[int, int]  # code that the run paints -> code that is written; {} if the same

    def translated(self, label: np.ndarray) -> np.ndarray:
        """A label that the run has painted, in the codes of the case."""
        table = np.arange(256, dtype=np.uint8)
        for code, own in self.written.items():
            table[code] = own
        return table[label]


class Found(NamedTuple):
    """The cases in some paths."""

    cases: List[Case]
    problems: List[str]  # of paths that are none
    notes: List[str]  # lines on what was assumed, and on files that were not read


def check_exist(name: str, paths: Sequence[Path]) -> None:
    """Raise InputError for each of the `paths` of an option that does not exist."""
    raise_if_any(
        f"{name} {path} must exist, found none; check the path"
        for path in paths
        if not path.exists()
    )


def find_cases(
    paths: Sequence[Path],
    predictor: Any,
    codes: str = AUTO,
    out: Optional[Path] = None,
) -> Found:
    """The cases in `paths`, with each of the channels of the run's store, or else of the run's own.

    A folder is a case, or holds several: 4D files, 3D files of one or more cases, or folders of
    these (two levels deep, `out` aside). 3D files that are named one by one are cases by their
    names; for a run of one channel each file is one, without those of other modalities and
    segmentations.
    """
    search = _Search(predictor)
    loose = []
    for path in paths:
        if path.is_dir():
            search.add_folder(path, out)
        elif search.is_4d(path):
            search.add_4d(path)
        else:
            loose.append(path)
    if loose:
        search.add_3d(loose)
    cases = []
    problems = search.problems
    for files, channels in search.images:
        try:
            cases.append(Case(files, channels, *codes_for(predictor, files, codes)))
        except InputError as error:
            problems += error.problems
    unread = [f"not read: {path}" for path in search.unread]
    return Found(cases, list(dict.fromkeys(problems)), [*unread, *search.assumptions()])


def codes_for(
    predictor: Any, files: CaseFiles, choice: str = AUTO
) -> Tuple[str, Mapping[int, str], PaintedRegions, Mapping[int, int]]:
    """The last fields of a `Case`: the codes of --codes, or of the case's own data set, or the
    store's if that is not known. Raises InputError if codes that were chosen, or that a
    dataset.json names, lack a label of the run's regions."""
    labels = predictor.labels
    regions = predictor.regions
    painted = painted_codes(regions)
    own = None
    if choice == AUTO:
        own = label_codes_of(files)
    elif choice in LABEL_CODES:
        own = LabelCodes.of_layout(choice)
    translated = own.translated(labels, regions) if own else {}
    if own and not translated and (choice != AUTO or own.of not in LABEL_CODES):
        own_labels = ", ".join(f"{code} {name}" for code, name in own.labels.items() if code)
        codes = sorted({code for codes in regions.values() for code in codes})
        wanted = ", ".join(f"{code} {labels.get(code, 'without a name')}" for code in codes)
        rule = f"label codes of {own.of} for case {files.case_id} must name the run's labels"
        raise InputError(f"{rule}, {wanted}, got {own_labels}; give --codes store, or others")
    if not translated:
        return STORE, labels, PaintedRegions(regions, painted.items()), {}
    codes_of = {
        name: tuple(sorted({own for code in codes for own in translated[code]}))
        for name, codes in regions.items()
    }
    written = {code: own[0] for code, own in translated.items()}
    paint = [(name, written[code]) for name, code in painted.items()]
    return own.of, own.labels, PaintedRegions(codes_of, paint), written


# --- Private helpers ---


class _Search:
    """The images that were found so far, for one run."""

    def __init__(self, predictor: Any):
        self.store: Tuple[str, ...] = tuple(predictor.channels)
        self.inputs: Tuple[str, ...] = tuple(predictor.inputs)
        self.images: List[Tuple[CaseFiles, Tuple[str, ...]]] = []  # files, and their channels
        self.problems: List[str] = []
        self.unread: List[Path] = []
        self.assumed: Dict[Tuple[str, ...], List[str]] = defaultdict(list)
        """Order of channels that nothing tells -> its cases."""

    def assumptions(self) -> List[str]:
        """A line for each order of channels that was assumed."""
        lines = []
        for order, ids in self.assumed.items():
            if len(ids) > 3:
                ids = [*ids[:2], f"{len(ids) - 2} other cases"]
            rule = "no dataset.json or name tells the order of the channels, which is taken to be"
            lines.append(f"note: {listed(ids)}: {rule} {', '.join(order)}")
        return lines

    def is_4d(self, path: Path) -> bool:
        """Whether a file is a case of its own, by its header; one that is damaged is, unless its
        name tells more."""
        try:
            return channel_count(path) > 1
        except InputError:
            name = read_name(path, self.store)
            return name.channel is None and name.number is None

    # --- Folders ---

    def add_folder(self, folder: Path, out: Optional[Path]) -> None:
        """Add the cases in a folder, or in the folders below it."""
        if volumes_in(folder):
            self._add_volumes(folder)
            return
        below = _folders_in(folder, out)
        images = [path.name for path in below if path.name.lower().startswith("images")]
        if images:
            rule = f"--image {folder} must be a folder of cases, got a data set"
            self.problems.append(f"{rule}; name its {' or '.join(images)}")
            return
        with_volumes = []
        for path in below:
            candidates = [path] if volumes_in(path) else _folders_in(path, out)
            with_volumes += [candidate for candidate in candidates if volumes_in(candidate)]
        for path in with_volumes:
            self._add_volumes(path)
        if not with_volumes:
            rule = f"--image {folder} must be a case or hold cases, files in .nii.gz or .nii"
            self.problems.append(f"{rule}, found none; check the path")

    def _add_volumes(self, folder: Path) -> None:
        """Add the cases whose files lie in a folder."""
        if folder.name.lower().startswith("labels"):
            rule = f"--image {folder} must be a folder of images"
            self.problems.append(f"{rule}, got one of labels; name that of the images")
            return
        volumes = [path for path in volumes_in(folder) if not NO_IMAGE.search(stem_of(path))]
        is_4d = {path: self.is_4d(path) for path in volumes}
        whole = [path for path in volumes if is_4d[path]]
        single = [path for path in volumes if not is_4d[path]]
        names = read_names(single, self.store)
        named = [path for path in single if names[path].channel]
        if named:
            self._add_named(named, names, folder)
            self.unread += [path for path in volumes if is_4d[path] or not names[path].channel]
        elif whole:
            for path in whole:
                self.add_4d(path)
            self.unread += single
        elif single and self._are_channels(names):
            self._add_numbered(single)
        elif single and len(self.inputs) == 1:
            self.add_3d(single)
        else:
            got = "a segmentation alone"
            if single:
                got = f"{len(single)} 3D files such as {single[0].name}"
            rule = f"--image {folder} must hold 4D files, or 3D files whose names end in a channel"
            order = ", ".join(f"{name} or {number:04d}" for number, name in enumerate(self.store))
            todo = "rename them, or give the files of one case in order"
            self.problems.append(f"{rule} ({order}), got {got}; {todo}")

    # --- 4D files ---

    def add_4d(self, path: Path) -> None:
        """Add a case whose channels are the volumes of one file."""
        case_id = stem_of(path)
        with self._problems():
            about = describing(path)
            count = None
            with contextlib.suppress(InputError):  # a damaged file is named when it is loaded
                count = channel_count(path)
            if about and count and count != len(about.channels):
                todo = f'correct the file, or "{about.channels_field}" there'
                raise InputError(f"{_must_hold(path, about)}, got {count}; {todo}")
            if about:
                names = about.channels
                channels, _ = self._wanted(names, str(about.path))
            else:
                names = ()
                channels = self.store
                if count == len(self.inputs) != len(self.store):
                    channels = self.inputs
                if count == len(channels) > 1:
                    self.assumed[channels].append(case_id)
            self.images.append((CaseFiles(case_id, case_id, (path,), None, names), channels))

    def _wanted(
        self,
        present: Sequence[str],
        where: str,
    ) -> Tuple[Tuple[str, ...], Tuple[int, ...]]:
        """The channels to take of those that are there, the store's if there are all of them, else
        the run's; and their places. Raises InputError if the run's are not there."""
        try:
            return self.store, places_of(self.store, present, where)
        except InputError:
            return self.inputs, places_of(self.inputs, present, where)

    # --- 3D files ---

    def add_3d(self, paths: Sequence[Path]) -> None:
        """Add the cases of 3D files that were named one by one, or that names do not tell apart in
        their folder."""
        names = read_names(paths, self.store)
        self.unread += [path for path in paths if names[path].channel == "seg"]
        paths = [path for path in paths if names[path].channel != "seg"]
        named = [path for path in paths if names[path].channel]
        unnamed = [path for path in paths if not names[path].channel]
        if not paths:
            rule = f"--image must name images of {', '.join(self.inputs)}"
            self.problems.append(f"{rule}, got segmentations alone; name them all")
        elif not named and self._are_channels({path: names[path] for path in paths}):
            self._add_numbered(paths)
        elif len(self.inputs) == 1:
            own = [path for path in named if names[path].channel == channel_key(self.inputs[0])]
            if unnamed or own:
                self.unread += [path for path in named if path not in own]
                named = own
            if named:
                self._add_named(named, names)
            for path in unnamed:
                self._add_alone(path)
        elif unnamed:
            self._add_in_order(paths, names)
        else:
            self._add_named(named, names)

    def _add_named(
        self,
        paths: Sequence[Path],
        names: Mapping[Path, FileName],
        folder: Optional[Path] = None,
    ) -> None:
        """Add the cases of files that are named after their channels: one case if each channel has
        one file, else one for each rest of a name. In a folder files of other channels may lie
        beside them."""
        is_one_case = len({names[path].channel for path in paths}) == len(paths)
        groups = defaultdict(list)
        for path in paths:
            key = None if is_one_case else (path.parent, names[path].case)
            groups[key].append(path)
        for files in groups.values():
            where = folder or files[0].parent
            case_id = min(names[path].case for path in files)
            if not case_id or (folder and len(groups) == 1):
                case_id = name_of(where)
            own = {}
            for channel in self.store:
                key = channel_key(channel)
                own[channel] = [path for path in files if names[path].channel == key]
            has_store = all(len(paths) == 1 for paths in own.values())
            is_alone = folder is None and len(self.inputs) == 1
            wanted = self.store if has_store and not is_alone else self.inputs
            with self._problems():
                rule = f"of case {case_id} in {where} must have one file named after it"
                known = {channel_key(channel): channel for channel in self.store}
                there = [names[path].channel for path in files]
                both = _both(wanted, (known.get(key, key) for key in there))
                raise_if_any(
                    f"{channel} {rule}, got {_names(own[channel])}; {both}; {MEND}"
                    for channel in wanted
                    if len(own[channel]) != 1
                )
                images = tuple(own[channel][0] for channel in wanted)
                self.images.append((CaseFiles(case_id, case_id, images, None), wanted))

    def _are_channels(self, names: Mapping[Path, FileName]) -> bool:
        """Whether the numbers at the end of names are nnU-Net's, of channels, and not those of
        cases.

        With one channel they are if all are 0; with several, if there is a 0, or cases of several
        files, or a dataset.json of several channels.
        """
        numbers = [name.number for name in names.values()]
        if None in numbers:
            return False
        about = self._description(next(iter(names)))
        count = len(about.channels) if about else len(self.store)
        if count == 1:
            return not any(numbers)
        if about:
            return True
        if len(self.inputs) == 1 and max(numbers) >= count:
            return False
        cases = [(path.parent, name.case) for path, name in names.items()]
        return 0 in numbers or len(set(cases)) < len(cases)

    def _add_numbered(self, paths: Sequence[Path]) -> None:
        """Add the cases of nnU-Net's files: <case>_<number of the channel>."""
        groups: Dict[Tuple[Path, str], Dict[int, List[Path]]] = {}
        for path in paths:
            name = read_name(path)
            by_number = groups.setdefault((path.parent, name.case), defaultdict(list))
            by_number[name.number].append(path)
        for (folder, case_id), files in groups.items():
            with self._problems():
                about = describing(folder / case_id)
                order = about.channels if about else self.store
                where = str(about.path) if about else STORE
                channels, places = self._wanted(order, where)
                if not all(place in files for place in places):
                    channels = self.inputs
                    places = places_of(self.inputs, order, where)
                rule = f"case {case_id} in {folder} must have one file for each channel of {where}"
                wrong = {number: files.get(number, []) for number in {*places, *files}}
                both = _both(
                    (_numbered(place, order) for place in places),
                    (_numbered(number, order) for number in files),
                )
                raise_if_any(
                    f"{rule}, got {_names(got)} for {_numbered(number, order)}; {both}; {MEND}"
                    for number, got in sorted(wrong.items())
                    if len(got) != 1 or number >= len(order)
                )
                images = tuple(files[place][0] for place in places)
                self.images.append((CaseFiles(case_id, case_id, images, None), channels))
                if about is None and len(order) > 1:
                    self.assumed[order].append(case_id)

    def _add_alone(self, path: Path) -> None:
        """Add a 3D file, whose name tells no channel, as a case of a run of one channel."""
        with self._problems():
            about = describing(path)
            if about and len(about.channels) > 1:
                todo = f"name the file after its channel, as in x_{self.inputs[0]}.nii.gz"
                raise InputError(f"{_must_hold(path, about)}, got 1; {todo}")
            if about:
                places_of(self.inputs, about.channels, str(about.path))
            case_id = stem_of(path)
            self.images.append((CaseFiles(case_id, case_id, (path,), None), self.inputs))

    def _add_in_order(self, paths: Sequence[Path], names: Mapping[Path, FileName]) -> None:
        """Add one case of files of which some, or all, do not tell their channel: they must be in
        its order."""
        channels = self.inputs if len(paths) == len(self.inputs) else self.store
        with self._problems():
            if len(paths) != len(channels):
                rule = f"--image must name one 4D file or one for each of {', '.join(channels)}"
                got = f"{len(paths)} files, {_names(paths)}"
                raise InputError(f"{rule}, got {got}; name them all")
            rule = f"--image must name files in the order {', '.join(channels)}"
            todo = "name every file after its channel, or put them in that order"
            raise_if_any(
                f"{rule}, got {path} for {channel}; {todo}"
                for path, channel in zip(paths, channels)
                if names[path].channel not in (None, channel_key(channel))
            )
            case_id = stem_of(paths[0])
            self.assumed[channels].append(case_id)
            self.images.append((CaseFiles(case_id, case_id, tuple(paths), None), channels))

    # --- Problems ---

    @contextlib.contextmanager
    def _problems(self) -> Iterator[None]:
        """Keep the problems of a case, which leaves the others as they are."""
        try:
            yield
        except InputError as error:
            self.problems += error.problems

    def _description(self, path: Path) -> Optional[Description]:
        """The description of an image's data set; None for one that is damaged, which is refused
        later."""
        with contextlib.suppress(InputError):
            return describing(path)
        return None


def _must_hold(path: Path, about: Description) -> str:
    """The rule for a file of a data set."""
    return f"{path} must hold the channels that {about.path} names, {', '.join(about.channels)}"


def _both(wanted: Iterable[str], found: Iterable[str]) -> str:
    """The channels that the run needs, and those that a case has."""
    return f"the run needs {', '.join(wanted)}, the case has {', '.join(sorted(set(found)))}"


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths) or "none"


def _numbered(number: int, order: Sequence[str]) -> str:
    """A number of nnU-Net's and the channel that it means."""
    meaning = order[number] if number < len(order) else "no channel"
    return f"{number:04d} ({meaning})"


def _folders_in(folder: Path, out: Optional[Path]) -> List[Path]:
    """The folders in a folder, but for hidden ones and the one that predictions go to."""
    skipped = out.resolve() if out else None
    paths = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    return [path for path in paths if not path.name.startswith(".") and path.resolve() != skipped]
