"""The files that `bench data` reads: made once into the work folder, found again by the next run, removed by --clean.

case/     one BraTS case: NIfTI float32 and int16, plain and gzip; stores in every format
brains/   several such cases: stores as .npy and .b2nd, and the arrays of the ladder's first rungs
ct/       CTs: NIfTI int16, plain and gzip; stores as .npy and .b2nd
many/     a store of many entries over shared arrays
"""

import contextlib
import dataclasses
import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.files.arrays import encode
from cpu3d.data.nifti import write_volume
from cpu3d.data.records import Geometry, array_path, remake
from cpu3d.data.store import Store, open_store, write_store
from cpu3d.data.stores.conversion import FORMAT_CHOICES, Settings
from cpu3d.data.stores.phantom import write_phantom
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.upkeep import repeat_entries
from cpu3d.errors import InputError
from cpu3d.util.atomic import atomic_write, writable_folder, write_json
from cpu3d.util.progress import bar
from cpu3d.util.workers import run_jobs, worker_count

Shape3 = Tuple[int, int, int]

MARKER = "bench-data.json"
"""Says that a folder is the benchmark's own, and so may be cleaned."""

FOLDERS = ("case", "brains", "ct", "many", "scratch")

NIBABEL_LEVEL = 1
"""The gzip level that nibabel writes with unless told otherwise."""

AIR_HU, TISSUE_HU, ORGAN_HU, NOISE_HU = -1024, 40, 110, 12


@dataclass(frozen=True)
class Scale:
    """Sizes and counts of one benchmark."""

    case: Shape3 = (240, 240, 155)
    """Voxels of a brain, four channels each: BraTS."""
    brains: int = 10
    """Different brains that whole volumes are streamed from."""
    ct: Shape3 = (512, 512, 300)
    """Voxels of a CT, one channel."""
    cts: int = 32
    """Different CTs: S0's training set."""
    patch: Shape3 = (96, 96, 96)
    """S0's patch, cut from a CT or a brain."""
    patches: int = 8
    """Patches of a round, where one alone would be over before the clock has moved."""
    batch: int = 2
    """Patches a training step."""
    filters: int = 2
    depth: int = 4
    """Of the network that is trained on patches: a step of it takes two cores a quarter of a second, about what the
    network of S0's kind takes a GPU. With a longer step loading would hide behind it, whichever way it is done."""
    warm_up: int = 4
    train_steps: int = 40
    """Training steps of a round, after those to warm up."""
    grid_of_ladder: Shape3 = (96, 96, 96)
    """Voxels around a brain's middle that the ladder's network sees."""
    ladder_epochs: int = 2
    """Timed ones a round; one before them is not."""
    wait_steps: int = 12
    """Steps of the trainer's own network, for the wait's share."""
    wait_filters: int = 16
    wait_depth: int = 5
    core_volumes: int = 20
    """Volumes over which the loader's processor time is taken."""
    originals: int = 484
    copies: int = 101
    """Entries of the large store: S4's 484 cases and what it made of each."""
    large_shape: Shape3 = (64, 64, 48)
    """Voxels of the brains that those entries share."""
    large_samples: int = 8000
    """Samples streamed from the large store."""
    peer_volumes: int = 6
    """CTs that MONAI's data sets hold: all 32 decoded to float32 would be 10 GB."""
    peer_epochs: int = 4


FULL = Scale()

TINY = Scale(
    case=(32, 40, 28),
    brains=2,
    ct=(40, 36, 30),
    cts=2,
    patch=(16, 16, 16),
    patches=2,
    filters=2,
    depth=2,
    warm_up=1,
    train_steps=2,
    grid_of_ladder=(16, 16, 16),
    ladder_epochs=1,
    wait_steps=2,
    wait_filters=2,
    wait_depth=2,
    core_volumes=2,
    originals=5,
    copies=3,
    large_shape=(24, 24, 24),
    large_samples=12,
    peer_volumes=2,
    peer_epochs=1,
)


class Files:
    """The files below one work folder. What is asked for is made unless it is there already."""

    def __init__(self, workdir: Path, scale: Scale, case: Optional[Path] = None):
        """Raises InputError for a folder that holds other files, and for one that cannot be written."""
        self.scale, self.case = scale, case
        if workdir.is_dir() and any(workdir.iterdir()) and not (workdir / MARKER).is_file():
            raise InputError(f"--workdir {workdir} must be empty or an earlier run's, got other files; choose another")
        self.folder = writable_folder(workdir, "--workdir").resolve()
        if not (self.folder / MARKER).is_file():
            write_json(self.folder / MARKER, {"made by": "bench data"})

    def one_case(self) -> Dict[str, Path]:
        """By name: "float32.nii.gz", "float32.nii" and the same of int16; the stores "npy", "float16", "b2nd"."""
        folder = self.folder / "case"
        names = ("float32.nii.gz", "float32.nii", "int16.nii.gz", "int16.nii")
        nifti = {name: folder / name for name in names}
        stores = {name: folder / f"store-{name}" for name in ("npy", "float16", "b2nd")}
        told = "phantom" if self.case is None else str(Path(self.case).resolve())
        with _made(folder, {"shape": self.scale.case, "case": told}) as needed:
            if needed:
                source = self.case
                if source is None:
                    source = folder / "dataset"
                    _quietly(write_phantom, source, cases=1, shape=self.scale.case, seed=0, workers=1)
                for name, store in stores.items():
                    _store(source, store, name)
                store = open_store(stores["npy"])
                record = store.cases("train")[0]
                if record.image_dtype != "int16":
                    raise InputError(f"--case {self.case} must hold whole numbers, got others; choose another case")
                image = store.image(record.case_id)
                for name, path in nifti.items():
                    array = image.astype(name.partition(".")[0])
                    write_volume(path, array, _grid(image.shape[:3]), compression=NIBABEL_LEVEL)
        return {**nifti, **stores}

    def brains(self) -> Dict[str, Path]:
        """The stores "npy" and "b2nd" of phantoms, all to train on, and the folder "ladder": see `ladder_array`."""
        folder = self.folder / "brains"
        paths = {"npy": folder / "store-npy", "b2nd": folder / "store-b2nd", "ladder": folder / "ladder"}
        with _made(folder, {"shape": self.scale.case, "brains": self.scale.brains}) as needed:
            if needed:
                _quietly(write_phantom, folder / "dataset", cases=self.scale.brains, shape=self.scale.case, seed=1)
                for name in ("npy", "b2nd"):
                    _store(folder / "dataset", paths[name], name)
                _write_ladder(open_store(paths["npy"]), paths["ladder"])
        return paths

    def cts(self) -> Dict[str, Any]:
        """The stores "npy" and "b2nd" of all CTs, in the train split, and the folders "nii" and "gz": see `ct_files`.

        Raises InputError where the disk has no room for them.
        """
        folder = self.folder / "ct"
        paths = {"npy": "store-npy", "b2nd": "store-b2nd", "nii": "dataset", "gz": "gz"}
        paths = {name: folder / inner for name, inner in paths.items()}
        with _made(folder, {"shape": self.scale.ct, "cts": self.scale.cts}) as needed:
            if needed:
                needed_bytes = 11 * int(np.prod(self.scale.ct)) * self.scale.cts
                free_bytes = shutil.disk_usage(self.folder).free
                if free_bytes < needed_bytes:
                    raise InputError(
                        f"--workdir {self.folder} must have {needed_bytes / 1e9:.1f} GB free for {folder.name}, got"
                        f" {free_bytes / 1e9:.1f}; choose another disk, or fewer --volumes"
                    )
                _write_cts(folder, self.scale.ct, self.scale.cts)
                for name in ("npy", "b2nd"):
                    _store(folder / "dataset", paths[name], name)
        return paths

    def many(self) -> Path:
        """A store of `originals` x `copies` entries, all to train on, over the arrays of a few small phantoms."""
        folder, scale = self.folder / "many", self.scale
        store = folder / "store"
        sizes = {"shape": scale.large_shape, "originals": scale.originals, "copies": scale.copies}
        with _made(folder, sizes) as needed:
            if needed:
                _quietly(write_phantom, folder / "dataset", cases=4, shape=scale.large_shape, seed=2, workers=1)
                _store(folder / "dataset", store, "npy")
                _multiply(store, scale.originals)
                repeat_entries(store, scale.copies)
        return store

    def scratch(self, name: str) -> Path:
        """An empty folder for what a peer wants to write."""
        folder = self.folder / "scratch" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def clean(self) -> None:
        """Remove everything that was made, and the work folder itself where nothing else is in it."""
        for name in FOLDERS:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / MARKER).unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def ct_files(folder: Path, compressed: bool) -> List[Tuple[Path, Path]]:
    """(image, label) of every CT in the folder "nii" or "gz" of `Files.cts`, in the store's order."""
    ending = "nii.gz" if compressed else "nii"
    images = sorted((folder / "imagesTr").glob(f"*.{ending}"))
    return [(path, folder / "labelsTr" / path.name) for path in images]


def ladder_array(folder: Path, case_id: str, name: str) -> Path:
    """ "float32.npy", "float32.b2nd", "int16.b2nd" or "label.npy" of a case, whole grid each."""
    return Path(folder) / f"{case_id}.{name}"


def array_files(folder: Path) -> List[Path]:
    """The arrays of a store's cases, or the ladder's."""
    return sorted(path for path in Path(folder).rglob("*") if path.suffix in (".npy", ".b2nd"))


def files_of(path: Path) -> List[Path]:
    """A file itself; the arrays of a store."""
    return array_files(path) if path.is_dir() else [path]


def ct_case(shape: Shape3, seed: int) -> Tuple[np.ndarray, np.ndarray]:
    """Image (X, Y, Z) int16 in Hounsfield units and label (X, Y, Z) uint8, 1 in an organ. A pure function of both.

    Air lies outside an ellipse that changes along Z, without noise, as scanners give it; inside, fat and tissue change
    smoothly under noise that no packer can shorten.
    """
    rng = np.random.default_rng([1, seed])
    x, y, z = np.ix_(*(np.linspace(-1, 1, n, dtype=np.float32) for n in shape))
    wide, high = 0.80 + 0.05 * np.cos(2 * z + seed), 0.60 + 0.05 * np.sin(3 * z)
    body = (x / wide) ** 2 + (y / high) ** 2 < 1
    centre = rng.uniform(-0.25, 0.25, 3).astype(np.float32)
    organ = ((x - centre[0]) / 0.22) ** 2 + ((y - centre[1]) / 0.20) ** 2 + ((z - centre[2]) / 0.30) ** 2 < 1
    value = 70 * np.sin(5 * x + rng.uniform(0, 6)) * np.cos(4 * y + rng.uniform(0, 6)) + 30 * np.sin(6 * z + 2 * x)
    value = (value + TISSUE_HU).astype(np.float32)
    value[organ] = ORGAN_HU
    value += NOISE_HU * rng.standard_normal(shape, dtype=np.float32)
    image = np.where(body, np.rint(value), AIR_HU).astype(np.int16)
    return image, (organ & body).astype(np.uint8)


# --- Private helpers ---


@contextlib.contextmanager
def _made(folder: Path, identity: Dict[str, Any]):
    """Yield whether the content of `folder` has to be made; it is marked as made when that went well."""
    marker = folder / "made.json"
    identity = json.loads(json.dumps(identity))
    if marker.is_file() and json.loads(marker.read_text(encoding="utf-8")) == identity:
        yield False
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield True
    write_json(marker, identity)


def _quietly(function, *args: Any, **more: Any) -> Any:
    """Call a command of the project without what it prints to stdout; its bar on stderr stays."""
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*args, **more)


def _store(dataset: Path, store: Path, format_: str) -> None:
    _quietly(prepare, dataset, store, fractions=(1, 0, 0), settings=Settings(**FORMAT_CHOICES[format_]))


def _grid(shape: Sequence[int]) -> Geometry:
    affine = tuple(tuple(float(i == j) for j in range(4)) for i in range(4))
    return Geometry(shape=tuple(shape), affine=affine, axes="RAS", sform_code=1, qform_code=1)


def _multiply(store_folder: Path, count: int) -> None:
    """Make `count` cases of a store's few, each with files of its own name, which are links to the few."""
    manifest = open_store(store_folder).manifest
    cases = []
    for number in range(count):
        old = manifest.cases[number % len(manifest.cases)]
        name = f"MANY_{number + 1:04d}"
        new = dataclasses.replace(old, case_id=name, patient_id=name, stem=name)
        for part in ("x", "y"):
            os.link(array_path(store_folder, old, part), array_path(store_folder, new, part))
        cases.append(new)
    split = {"train": tuple(case.case_id for case in cases), "val": (), "test": ()}
    write_store(store_folder, remake(manifest, cases=cases, split=split))


def _write_ladder(store: Store, folder: Path) -> None:
    """The arrays of the ladder: float32 z-scores as S1 keeps its images, then the stored integers, packed."""
    folder.mkdir()
    with bar("ladder", total=len(store.manifest.cases)) as advance:
        for record in store.cases("train"):
            image, label = store.image(record.case_id), store.label(record.case_id)
            mean, std = np.float32(record.channel_mean), np.float32(record.channel_std)
            scores = np.where(image == 0, np.float32(0), (image.astype(np.float32) - mean) / std)
            for name, array, format_ in (
                ("float32.npy", scores, "npy"),
                ("float32.b2nd", scores, "b2nd"),
                ("int16.b2nd", image, "b2nd"),
                ("label.npy", label, "npy"),
            ):
                with atomic_write(ladder_array(folder, record.case_id, name)) as file:
                    for piece in encode(np.ascontiguousarray(array), format_):
                        file.write(piece)
            advance()


def _write_cts(folder: Path, shape: Tuple[int, int, int], count: int) -> None:
    """CTs in the Decathlon layout below "dataset", and the same gzipped below "gz"."""
    for name in ("dataset", "gz"):
        for inner in ("imagesTr", "labelsTr"):
            (folder / name / inner).mkdir(parents=True)
    ids = [f"CT_{number + 1:03d}" for number in range(count)]
    jobs = [(str(folder), case_id, tuple(shape), number) for number, case_id in enumerate(ids)]
    results = run_jobs(_write_ct, jobs, worker_count(None))
    with contextlib.closing(results), bar("ct", total=count) as advance:
        for _ in results:
            advance()
    content = {
        "name": "CT phantom",
        "modality": {"0": "CT"},
        "labels": {"0": "background", "1": "organ"},
        "training": [{"image": f"./imagesTr/{i}.nii", "label": f"./labelsTr/{i}.nii"} for i in ids],
        "test": [],
    }
    write_json(folder / "dataset" / "dataset.json", content)


def _write_ct(job: Tuple[str, str, Tuple[int, int, int], int]) -> None:
    folder, case_id, shape, seed = job
    image, label = ct_case(shape, seed)
    for name, ending in (("dataset", "nii"), ("gz", "nii.gz")):
        top = Path(folder) / name
        write_volume(top / "imagesTr" / f"{case_id}.{ending}", image, _grid(shape), compression=NIBABEL_LEVEL)
        write_volume(top / "labelsTr" / f"{case_id}.{ending}", label, _grid(shape), compression=NIBABEL_LEVEL)
