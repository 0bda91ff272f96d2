"""Which small parts of a predicted region are removed, decided on a run's validation cases.

    decision = decide(run)                                  # writes run/postprocessing.json
    (chosen,) = postprocessing_of([run], [config])          # as decided, or off and why
    label = chosen.paint(probabilities, regions, spacing_mm)

A network answers with islands in tissue that looks alike. As in nnU-Net (Isensee et al. 2021), which keeps the largest
part of a class where that raises the Dice of cross-validation, something is removed only where it helps on cases that
were not trained on. Here that is judged by the lesion-wise Dice of BraTS 2023 (`cpu3d.inference.scores`):

- *Parts* of a region are connected by 26 neighbours. A rule removes those below a volume in mm3, or below a share of
  the region's largest part; the latter never removes a whole region.
- A part that is removed takes the code of the next larger region that holds it: small ET becomes the rest of TC. The
  smaller regions within it go with it. It is removed from the painted label map, which is what is scored and written.
- *Nested* answers are cut before they are painted: a voxel of TC outside WT, or of ET outside TC, is not in it.

Chosen are, one after another, whether to nest, and the rule of each region from the largest to the smallest. A choice
is taken where it raises the mean over the cases, lowers that of no region, and loses no true lesion that was found in
any case. Equal ones: that which removes the fewest voxels, then a share, then the smaller number.
"""

import dataclasses
import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.labels import THRESHOLD, label_from_regions, own_codes, region_mask
from cpu3d.data.region import bounding_box
from cpu3d.distributed.cluster import read_cluster
from cpu3d.errors import InputError
from cpu3d.inference.runs import Inference, store_of_run, trained_predictor
from cpu3d.inference.scores import Matching, connected_parts, match_lesions
from cpu3d.run.checkpoint import weights_file
from cpu3d.settings import RunConfig, load_config
from cpu3d.training.train import Options
from cpu3d.util.atomic import write_json
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar, say
from cpu3d.util.records import count, listed
from memory_estimator.common.files import read_json, reason, typed

FILE = "postprocessing.json"
"""In the run's folder."""

SCHEMA = 1

LEAST_CASES = 3
"""Labelled validation cases below which nothing is removed."""

Regions = Mapping[str, Sequence[int]]
"""Region -> its label codes."""


@dataclass(frozen=True)
class Rule:
    """Which parts of a region are removed: those below either bound. Raises ValueError for a bound that cannot be."""

    mm3: float = 0.0
    share: float = 0.0
    """Of the region's largest part."""

    def __post_init__(self):
        if not (0 <= self.mm3 < np.inf and 0 <= self.share < 1):
            raise ValueError(f"a rule must have mm3 from 0 on and a share from 0 to 1, got {self.mm3} and {self.share}")

    def __str__(self) -> str:
        return f"{self.mm3:g} mm\u00b3" if self.mm3 else f"{100 * self.share:g} % of its largest part"


RULES = (*(Rule(share=share) for share in (0.001, 0.003, 0.01, 0.03, 0.1)), *map(Rule, (50, 100, 200, 400, 800)))
"""What is tried."""


@dataclass(frozen=True)
class PostProcessing:
    """What is done to an answer when it is painted."""

    rules: Dict[str, Tuple[Rule, ...]] = dataclasses.field(default_factory=dict)
    """Region -> what is removed from it; of several what each of them would remove."""
    nested: bool = False
    off: str = ""
    """Why nothing is done, else empty."""

    def paint(self, answers: np.ndarray, regions: Regions, spacing_mm: Sequence[float]) -> np.ndarray:
        """Paint `answers`, probabilities or masks `(X, Y, Z, R)` in the order of `regions`, into a label `(X, Y, Z)`.

        As `label_from_regions` does, with the small parts removed; voxels measure `spacing_mm`. `answers` stay as they
        are.
        """
        whole = label_from_regions(answers, regions)
        if self.off or not (self.rules or self.nested):
            return whole
        box, below, voxel_mm3 = _box(whole), _code_below(regions), float(np.prod(spacing_mm))
        if self.nested:  # which paints no voxel that was not
            whole[box] = label_from_regions(_nested(answers[box], regions), regions)
        label = whole[box]
        for name in _order(regions):
            if name in self.rules and below[name] is not None:
                numbered, _ = connected_parts(region_mask(label, regions[name]))
                sizes_mm3 = np.bincount(numbered.ravel())[1:] * voxel_mm3
                removed = np.concatenate([[False], _is_small(sizes_mm3, self.rules[name])])
                label[removed[numbered]] = below[name]
        return whole

    @property
    def words(self) -> str:
        """In a line, such as "removes parts of WT below 1 % of its largest part", or "off: " and why."""
        if self.off:
            return f"off: {self.off}"
        removed = [f"{name} below {listed(rules)}" for name, rules in self.rules.items()]
        parts = [f"removes parts of {', of '.join(removed)}"] if removed else []
        return "; ".join([*parts, *["cuts each region to the larger ones"] * self.nested])


RAW = PostProcessing(off="--raw")


def gentlest(several: Sequence[PostProcessing]) -> PostProcessing:
    """Of several runs that answer together: what all of them remove. Off where one of them is, for its reason."""
    off = next((one.off for one in several if one.off), "")
    if off or len(several) == 1:
        return PostProcessing(off=off) if off else several[0]
    names = [name for name in several[0].rules if all(name in one.rules for one in several)]
    rules = {name: tuple(dict.fromkeys(rule for one in several for rule in one.rules[name])) for name in names}
    nested = all(one.nested for one in several)
    return PostProcessing(rules, nested, "" if rules or nested else "the runs have no rule in common")


# --- What a run has decided ---


@dataclass(frozen=True)
class Means:
    """Of a region over the validation cases, as `cpu3d.inference.scores` defines them."""

    lesion_dice: float
    false_positives: float
    dice: float


@dataclass(frozen=True)
class Decision:
    """The content of postprocessing.json."""

    schema: int
    weights_sha256: str
    """Of the best weights, with which it was decided."""
    split_hash: str
    cases: int
    """Labelled validation cases."""
    chosen: PostProcessing
    before: Dict[str, Means]
    """Region -> of the answers as they are; empty where there were too few cases."""
    after: Dict[str, Means]


def read_decision(run: Path, config: RunConfig) -> Optional[Decision]:
    """What the run has decided, with the weights it has now or others; None where it has not.

    Raises InputError for a postprocessing.json that is damaged, of another version or of other regions.
    """
    path = Path(run) / FILE
    if not path.exists():
        return None
    try:
        content = read_json(path)
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}")
        decision = typed(content, Decision)
        for part in (decision.before, decision.after):
            if set(part) != set(config.regions if part or not decision.chosen.off else ()):
                raise ValueError(f"scores of {', '.join(part) or 'no region'}")
        if not set(decision.chosen.rules) <= set(config.regions) or not all(decision.chosen.rules.values()):
            raise ValueError(f"rules of {', '.join(decision.chosen.rules)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"{path} must be JSON of schema {SCHEMA} for {', '.join(config.regions)}, got {reason(error)}"
        raise InputError(f"{rule}; delete it and repeat the run's `train`, which decides again") from None
    return decision


def postprocessing_of(
    runs: Sequence[Path], configs: Sequence[RunConfig], weights: str = "best"
) -> List[PostProcessing]:
    """What each run does to its answers with its "best" or "last" weights. Raises InputError as `read_decision`."""
    found = []
    for run, config in zip(runs, configs):
        decision, again = read_decision(run, config), "repeat the run's `train`"
        if decision is None:
            found.append(PostProcessing(off=f"not decided; {again}"))
        elif weights != "best":
            found.append(PostProcessing(off=f"decided with the best weights, these are the {weights}"))
        elif not _is_current(decision, run, config):
            found.append(PostProcessing(off=f"decided with other weights or another split; {again}"))
        else:
            found.append(decision.chosen)
    return found


def decide(run: Path, store_folder: Optional[Path] = None) -> Decision:
    """Decide the post-processing of a trained run on its labelled validation cases, and write it into the run.

    What was decided with the weights it has is returned as it is. One case is in memory at a time, beside the network
    and a few numbers of each case; after a training on 240 x 240 x 155 x 4 that added 0.2 GiB to 3.0. Raises
    InputError as `trained_predictor` and `store_of_run`, and where another process writes to the run; OSError where it
    cannot be written.
    """
    run, config = Path(run), load_config(run)
    with locked(run, "run"):
        try:
            decision = read_decision(run, config)
        except InputError:
            decision = None  # damaged: it is made again
        if decision and _is_current(decision, run, config):
            return decision
        store = store_of_run(config, store_folder)
        records, digest = [one for one in store.cases("val") if one.has_label], file_sha256(weights_file(run, "best"))
        few = f"{count(records, 'validation case')}, {LEAST_CASES} are needed"
        chosen, before, after = PostProcessing(off=few), {}, {}
        if len(records) >= LEAST_CASES:
            predictor = trained_predictor(run, "best", Inference(device=config.device))
            with bar("post-processing", total=len(records)) as advance:

                def answered():
                    for record in records:
                        label, image = np.asarray(store.label(record.case_id)), store.image(record.case_id)
                        yield predictor.probabilities(image, record), label, record.spacing_mm
                        advance()

                chosen, before, after = choose(answered(), predictor.regions)
        decision = Decision(SCHEMA, digest, config.split_hash, len(records), chosen, before, after)
        write_json(run / FILE, dataclasses.asdict(decision))
    return decision


def after(training: Options, settings: Dict[str, Any]) -> None:
    """Follow `train`, whose options these are: the chief of a run that is over decides, and prints what.

    A failure is printed and not raised, as the run is whole without. Raises KeyboardInterrupt with nothing written.
    """
    if not read_cluster(os.environ).is_chief:
        return
    gc.collect()  # the network that was trained
    try:
        decision = decide(training.run, training.store)
        line = decision.chosen.words
        if not decision.chosen.off:
            pairs = [(name, decision.before[name], one) for name, one in decision.after.items()]
            changes = ", ".join(f"{name} {was.lesion_dice:.3f} -> {one.lesion_dice:.3f}" for name, was, one in pairs)
            line += f"; lesion-wise Dice {changes} on {count(decision.cases, 'validation case')}"
    except Exception as error:  # also what TensorFlow raises: the run is whole, whatever it is
        line = f"off: it could not be decided, {str(error) or type(error).__name__}; repeat the same command"
    except KeyboardInterrupt:
        done = "the run is whole, its post-processing is not decided"
        raise KeyboardInterrupt(f"{done}; the same command decides it") from None
    say(f"post-processing: {line}")


# --- The choice ---

Case = Tuple[np.ndarray, np.ndarray, Sequence[float]]
"""Answers (X, Y, Z, R), the true label (X, Y, Z) in the codes of the regions, and mm along X, Y, Z."""


def choose(cases: Iterable[Case], regions: Regions) -> Tuple[PostProcessing, Dict[str, Means], Dict[str, Means]]:
    """The post-processing that the rules at the top of this file choose, and the means before and after it.

    `cases`, at least one, are taken one by one; kept of each are the sizes of its parts and lesions and which touch.
    """
    found, below = [], _code_below(regions)
    for case in cases:
        found.append(_parts_of(*case, regions))
        del case  # else it is in memory while the next is predicted
    chosen = PostProcessing()
    best = before = _scores(found, chosen)
    for name in (None, *(name for name in _order(regions) if below[name] is not None)):
        tried = [dataclasses.replace(chosen, nested=True)]
        if name is not None:
            tried = [dataclasses.replace(chosen, rules={**chosen.rules, name: (rule,)}) for rule in RULES]
        pairs = [(_scores(found, one), one) for one in tried]
        better = [pair for pair in pairs if _improves(pair[0], best)]
        if better:
            best, chosen = max(better, key=lambda pair: (round(pair[0][..., 0].mean(), 9), pair[0][..., 4].sum()))
    if best is before:
        chosen = dataclasses.replace(chosen, off="no rule gains on the validation cases")
    rows = (zip(_order(regions), scores.mean(0).tolist()) for scores in (before, best))
    return (chosen, *({name: Means(*row[:3]) for name, row in region_rows} for region_rows in rows))


# --- Private helpers: the choice ---


class _Parts(NamedTuple):
    """The predicted parts of a region in a case."""

    matching: Matching
    sizes_mm3: np.ndarray
    inside: Dict[str, np.ndarray]
    """Larger region -> for each part the index of the part of that region that it lies in."""


_Case = Dict[bool, Dict[str, _Parts]]
"""Whether the answer was nested -> region, the largest first -> its parts: what any choice makes of a case follows."""


def _parts_of(answers: np.ndarray, truth: np.ndarray, spacing_mm: Sequence[float], regions: Regions) -> _Case:
    case, labels = {}, [PostProcessing(nested=nested).paint(answers, regions, spacing_mm) for nested in (False, True)]
    for nested, label in zip((False, True), labels):
        if nested and np.array_equal(*labels):
            return {False: case[False], True: case[False]}
        box = _box((label > 0) | (truth > 0))  # nothing is outside, and what grows together does so inside
        numbered = {name: connected_parts(region_mask(label[box], regions[name])) for name in _order(regions)}
        case[nested] = {}
        for name, (parts, part_count) in numbered.items():
            there, inside = parts > 0, {}
            for larger in _larger(regions)[name]:
                index = np.zeros(part_count + 1, np.int64)
                index[parts[there]] = numbered[larger][0][there]
                inside[larger] = index[1:] - 1
            matching = match_lesions(region_mask(truth[box], regions[name]), parts, part_count, spacing_mm)
            case[nested][name] = _Parts(matching, matching.part_voxels * float(np.prod(spacing_mm)), inside)
    return case


def _scores(cases: Sequence[_Case], chosen: PostProcessing) -> np.ndarray:
    """Of what `PostProcessing.paint` leaves, (cases, R, 5): the fields of Means, lesions that are found, and mm3."""
    rows = []
    for case in cases:
        kept: Dict[str, np.ndarray] = {}
        for name, (matching, sizes_mm3, inside) in case[chosen.nested].items():
            stays = np.ones(len(sizes_mm3), bool)
            for larger, index in inside.items():
                stays &= kept[larger][index]
            if name in chosen.rules:
                stays[stays] = ~_is_small(sizes_mm3[stays], chosen.rules[name])
            kept[name], lesions = stays, matching.lesions(stays)
            own = (lesions.dice, lesions.false_positives, matching.dice(stays), lesions.found, sizes_mm3[stays].sum())
            rows.append(own)
    return np.reshape(rows, (len(cases), -1, 5))


def _improves(scores: np.ndarray, other: np.ndarray) -> bool:
    """Whether the mean lesion-wise Dice gains, that of no region falls, and no lesion that was found is lost."""
    change = (scores - other)[..., 0].mean(0)
    return bool(change.sum() > 1e-9 and change.min() > -1e-9 and (scores[..., 3] >= other[..., 3]).all())


# --- Private helpers ---


def _is_current(decision: Decision, run: Path, config: RunConfig) -> bool:
    try:
        digest = file_sha256(weights_file(run, "best"))
    except (InputError, OSError):
        return False  # whoever needs them says so
    return (decision.weights_sha256, decision.split_hash) == (digest, config.split_hash)


def _is_small(sizes_mm3: np.ndarray, rules: Sequence[Rule]) -> np.ndarray:
    """Which parts are below the bounds of all rules; a sum of products is exact to rounding only."""
    largest = sizes_mm3.max(initial=0.0)
    return sizes_mm3 < min(max(rule.mm3, rule.share * largest) for rule in rules) * (1 - 1e-9)


def _box(mask: np.ndarray) -> Tuple[slice, slice, slice]:
    return bounding_box(mask > 0).slices(mask.shape)


def _order(regions: Regions) -> List[str]:
    """The largest set of codes first."""
    return sorted(regions, key=lambda name: -len(set(regions[name])))


def _larger(regions: Regions) -> Dict[str, List[str]]:
    """Region -> those that hold it and more, the smallest first."""
    return {
        name: [other for other in reversed(_order(regions)) if set(regions[other]) > set(codes)]
        for name, codes in regions.items()
    }


def _code_below(regions: Regions) -> Dict[str, Optional[int]]:
    """Region -> the code of what is removed from it: the next larger region's own, background where there is none.

    None where that region has no code of its own: what left the smaller one would leave it too, so there is no rule.
    """
    own = own_codes(regions)
    return {
        name: 0 if not larger else own[larger[0]][0] if own[larger[0]] else None
        for name, larger in _larger(regions).items()
    }


def _nested(answers: np.ndarray, regions: Regions) -> np.ndarray:
    """A copy of `answers` with 0 where a voxel is in a region and not in one that holds it."""
    answers, names, larger = answers.copy(), list(regions), _larger(regions)
    inside = answers if answers.dtype == bool else answers >= THRESHOLD
    for name in names:
        for other in larger[name]:
            answers[~inside[..., names.index(other)], names.index(name)] = 0
    return answers
