"""Post-processing: small parts of predicted regions are removed by rules that a run's validation cases decide.

    decision = decide(run)                                  # writes run/postprocessing.json
    chosen = postprocessing_of(run, config)                 # as decided, or off and why
    label = chosen.paint(probabilities, regions, spacing_mm)

A network answers with islands in tissue that looks alike. As in nnU-Net (Isensee et al. 2021), something is removed
only if that helps on cases that were not trained on. Here the measure is the lesion-wise Dice of BraTS 2023
(`cpu3d.inference.scores`):

- *Parts* of a region are connected by 26 neighbours. A rule removes those below a volume in mm3, or below a share of
  the region's largest part; the latter never removes a whole region.
- A part that is removed takes the code of the next larger region that holds it: small ET becomes the rest of TC. The
  smaller regions within it go with it.
- *Nested* answers are cut before they are painted: a voxel of TC outside WT, or of ET outside TC, is not in it.

The choices are, in this order, whether to nest, and the rule of each region from the largest to the
smallest. A choice needs evidence of its own:

- At least LEAST_CASES validation cases have the region. Where no case has it, every part is an
  island, and a rule would take the true lesions of other cases.
- The mean of that region rises, that of no other falls. Nesting must raise each region it cuts.
- No true lesion that was found is lost in any case and region: neither a connected part of the
  truth, of any size, that shares a voxel with the answer, nor a lesion by the rule of BraTS.

Of these rules the one with the highest mean over all regions is taken; of equal rules a share, and
of several the middle one: as far from losing a lesion as from leaving an island in a new case.
"""

import dataclasses
import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.labels import THRESHOLD, label_from_regions, own_codes, region_mask
from cpu3d.data.nifti import ras_steps_mm
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import bounding_box
from cpu3d.distributed.cluster import read_cluster
from cpu3d.errors import InputError
from cpu3d.inference.ensemble import trained_predictors
from cpu3d.inference.runs import Inference, store_of_run
from cpu3d.inference.scores import Matching, Spacing, connected_parts, match_lesions, voxel_mm3
from cpu3d.run.checkpoint import weights_file
from cpu3d.run.config import load_config
from cpu3d.settings import RunConfig
from cpu3d.training.train import Options
from cpu3d.util.atomic import write_json
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar, say
from cpu3d.util.records import count, listed
from memory_estimator.common.files import read_record, typed

FILE = "postprocessing.json"  # in the run's folder
SCHEMA = 1
LEAST_CASES = 3  # validation cases that must have a region before anything of it is removed

Regions = Mapping[str, Sequence[int]]  # region -> its label codes


@dataclass(frozen=True)
class Rule:
    """Removes the parts of a region below either bound. Raises ValueError for a bound out of range."""

    mm3: float = 0.0
    share: float = 0.0  # of the region's largest part

    def __post_init__(self):
        if not (0 <= self.mm3 < np.inf and 0 <= self.share < 1):
            raise ValueError(f"a rule must have mm3 from 0 on and a share from 0 to 1, got {self.mm3} and {self.share}")

    def __str__(self) -> str:
        return f"{self.mm3:g} mm\u00b3" if self.mm3 else f"{100 * self.share:g} % of its largest part"


# The rules that are tried.
RULES = (*(Rule(share=share) for share in (0.001, 0.003, 0.01, 0.03, 0.1)), *map(Rule, (50, 100, 200, 400, 800)))


@dataclass(frozen=True)
class PostProcessing:
    """The changes to an answer when it is painted."""

    rules: Dict[str, Tuple[Rule, ...]] = dataclasses.field(default_factory=dict)  # a part goes if each removes it
    nested: bool = False
    off: str = ""  # the reason why nothing is done, else empty
    without: Dict[str, str] = dataclasses.field(default_factory=dict)
    """Region that has no rule -> why."""

    def paint(self, answers: np.ndarray, regions: Regions, spacing_mm: Spacing) -> np.ndarray:
        """Paint probabilities `(X, Y, Z, R)` in the order of `regions` into a label `(X, Y, Z)`, as
        `label_from_regions` does, without the small parts. `spacing_mm` is as in `score_region`.
        `answers` stay as they are."""
        label = label_from_regions(answers, regions)
        if self.off or not (self.rules or self.nested):
            return label
        box = bounding_box(label > 0).slices(label.shape)  # nested answers paint no voxel outside of it
        if self.nested:
            label[box] = label_from_regions(_nested(answers[box], regions), regions)
        for name, code_below in _codes_below(regions).items():
            if name in self.rules:
                parts = connected_parts(region_mask(label[box], regions[name]))
                sizes_mm3 = np.bincount(parts.ravel())[1:] * voxel_mm3(spacing_mm)
                removed = np.concatenate([[False], _is_small(sizes_mm3, self.rules[name])])
                label[box][removed[parts]] = code_below
        return label

    def steps(self, regions: Regions) -> Dict[str, Any]:
        """The same changes for a program without this project (`cpu3d.inference.segment`), as
        export.json has them: "cut", the outputs that are 0 outside of larger ones, and "remove",
        the rules in their order."""
        names, cut, remove = list(regions), [], []
        if self.nested and not self.off:
            for name, larger in _larger(regions).items():
                outputs = [names.index(other) for other in larger]
                cut.append({"output": names.index(name), "to": outputs})
        for name, code_below in _codes_below(regions).items():
            if name in self.rules and not self.off:
                below = [dataclasses.asdict(rule) for rule in self.rules[name]]
                codes = list(regions[name])
                rule = {"region": name, "codes": codes, "below": below, "becomes": code_below}
                remove.append(rule)
        return {"words": self.words, "cut": cut, "remove": remove}

    @property
    def words(self) -> str:
        """In a line, such as "removes parts of WT below 1 % of its largest part", or "off: " and why."""
        if self.off:
            return f"off: {self.off}"
        parts = []
        if self.rules:
            removed = [f"{name} below {listed(rules)}" for name, rules in self.rules.items()]
            parts.append(f"removes parts of {', of '.join(removed)}")
        if self.nested:
            parts.append("cuts each region to the larger regions")
        if self.without:
            parts.append(f"no rule for {_reasons(self.without)}")
        return "; ".join(parts)


RAW = PostProcessing(off="--raw")


def gentlest(several: Sequence[PostProcessing]) -> PostProcessing:
    """The removals that several runs have in common, for their joint answer; off if any of them is, for its reason."""
    off = [each for each in several if each.off]
    if off:
        return off[0]
    names = [name for name in several[0].rules if all(name in each.rules for each in several)]
    rules = {name: tuple(dict.fromkeys(rule for each in several for rule in each.rules[name])) for name in names}
    nested = all(each.nested for each in several)
    without: Dict[str, str] = {}
    for each in several:
        for name, why in each.without.items():
            without.setdefault(name, why)
    off = "" if rules or nested else "the runs have no rule in common"
    return PostProcessing(rules, nested, off, without)


@dataclass(frozen=True)
class Means:
    """Means of a region over the validation cases, as `cpu3d.inference.scores` defines them."""

    lesion_dice: float
    false_positives: float
    dice: float


@dataclass(frozen=True)
class Decision:
    """The content of postprocessing.json."""

    weights_sha256: str  # of the best weights, with which it was decided
    split_hash: str
    cases: int  # labelled validation cases
    chosen: PostProcessing
    before: Dict[str, Means]  # region -> means of the raw answers; empty if there were too few cases
    after: Dict[str, Means]  # the same after `chosen`
    cases_with: Optional[Dict[str, int]] = None
    """Region -> validation cases that have it. None in a file of an earlier version, whose rules
    needed none."""


def read_decision(run: Path, config: RunConfig) -> Optional[Decision]:
    """The run's decision, with its present weights or earlier ones; None if it has none. Raises InputError for a
    postprocessing.json that is damaged, of another version or of other regions."""
    path = Path(run) / FILE
    if not path.exists():
        return None

    def checked(content: Dict[str, Any]) -> Decision:
        decision = typed(content, Decision)
        chosen, before = decision.chosen, set(decision.before)
        named = {*before, *chosen.rules, *chosen.without, *(decision.cases_with or {})}
        is_whole = before == set(decision.after) and all(chosen.rules.values())
        if not is_whole or not named <= set(config.regions):
            raise ValueError(f"means or rules of other regions than {', '.join(config.regions)}")
        return decision

    return read_record(path, SCHEMA, checked, "delete it and repeat the run's `train`, which decides again", InputError)


def postprocessing_of(run: Path, config: RunConfig, weights: str = "best") -> PostProcessing:
    """The post-processing of a run with its "best" or "last" weights. Raises InputError as `read_decision`."""
    decision = read_decision(run, config)
    if decision is None:
        return PostProcessing(off="not decided; repeat the run's `train`")
    if weights != "best":
        return PostProcessing(off=f"decided with the best weights, these are the {weights}")
    try:
        digest = file_sha256(weights_file(run, "best"))
    except (InputError, OSError):
        digest = ""  # reported where the weights are read
    if (decision.weights_sha256, decision.split_hash) != (digest, config.split_hash):
        return PostProcessing(off="decided with other weights or another split; repeat the run's `train`")
    if decision.cases_with is None:
        rule = "decided by an earlier version, whose rules needed no case that has the region"
        return PostProcessing(off=f"{rule}; repeat the run's `train`, which decides again")
    return decision.chosen


def decide(run: Path, store_folder: Optional[Path] = None) -> Decision:
    """Decide the post-processing of a trained run on its labelled validation cases, one in memory
    at a time, and write it into the run. A decision of this version with the present weights is
    returned as it is. Raises InputError as `trained_predictors` and `store_of_run`, and if another
    process writes to the run."""
    run, config = Path(run), load_config(run)
    with locked(run, "run"):
        digest = file_sha256(weights_file(run, "best"))
        try:
            decision = read_decision(run, config)
        except InputError:
            decision = None  # damaged: decided again
        known = decision is not None and decision.cases_with is not None
        if known and (decision.weights_sha256, decision.split_hash) == (digest, config.split_hash):
            return decision
        store = store_of_run(config, store_folder)
        bare = set(store.manifest.unlabelled)
        ids = [case_id for case_id in store.manifest.split["val"] if case_id not in bare]
        records = store.cases("val").chosen(ids)  # read one at a time
        regions = config.codes_by_region
        cases_with = {
            name: sum(not record.label_voxels.keys().isdisjoint(codes) for record in records)
            for name, codes in regions.items()
        }
        if max(cases_with.values()) < LEAST_CASES:  # no network need be asked
            few = {name: _too_few(number) for name, number in cases_with.items()}
            off = _reasons(few) if len(records) >= LEAST_CASES else _too_few(len(records))
            chosen, before, after = PostProcessing(off=off, without=few), {}, {}
        else:
            (predictor,) = trained_predictors([run], "best", Inference(device=config.device))
            with bar("post-processing", total=len(records)) as advance:

                def answer(record: CaseRecord) -> Answered:
                    probabilities = predictor.probabilities(store.image(record.case_id), record)
                    advance()
                    steps_mm = ras_steps_mm(record.geometry)
                    return probabilities, np.asarray(store.label(record.case_id)), steps_mm

                chosen, before, after = choose(map(answer, records), regions)
        hashes = digest, config.split_hash
        decision = Decision(*hashes, len(records), chosen, before, after, cases_with)
        write_json(run / FILE, {"schema": SCHEMA, **dataclasses.asdict(decision)})
    return decision


def after(training: Options, settings: Dict[str, Any]) -> None:
    """Follow `train` with its options: the chief of a finished run decides, and prints the choice or why there is none.
    Raises KeyboardInterrupt with nothing written."""
    if not read_cluster(os.environ).is_chief:
        return
    gc.collect()  # frees the network that was trained
    try:
        decision = decide(training.run, training.store)
        line = decision.chosen.words
        if not decision.chosen.off:
            pairs = zip(decision.before.items(), decision.after.values())
            changes = ", ".join(f"{name} {was.lesion_dice:.3f} -> {now.lesion_dice:.3f}" for (name, was), now in pairs)
            line += f"; lesion-wise Dice {changes} on {count(decision.cases, 'validation case')}"
    except Exception as error:  # also TensorFlow's own: in any case the run is whole
        line = f"off: it could not be decided, {str(error) or type(error).__name__}; repeat the same command"
    except KeyboardInterrupt:
        done = "the run is complete, its post-processing is not decided"
        raise KeyboardInterrupt(f"{done}; the same command decides it") from None
    say(f"post-processing: {line}")


# Of a case: answers (X, Y, Z, R), true label, its spacing or steps in mm.
Answered = Tuple[np.ndarray, np.ndarray, Spacing]
LESION_DICE, FALSE_POSITIVES, DICE = range(3)  # columns of scores, as in Means


@dataclass(frozen=True)
class _Parts:
    """The P parts of a region in a case: enough to score any choice among them."""

    matching: Matching
    inside: Dict[str, np.ndarray]  # larger region -> (P,) index of the part of it that holds each
    components: int  # the connected parts of the truth
    component: np.ndarray  # (N,) the index of one that shares a voxel with a part, once a pair
    part: np.ndarray  # (N,) the index of that part

    def detected(self, kept: np.ndarray) -> np.ndarray:
        """(F,) whether each true lesion is found if only the parts of `kept` (P,) are left: the
        connected parts of the truth, then the lesions by the rule of BraTS."""
        components = np.zeros(self.components, bool)
        components[self.component[kept[self.part]]] = True
        lesions = np.zeros(len(self.matching.truth_voxels), bool)
        lesions[self.matching.lesion[kept[self.matching.part]]] = True
        return np.concatenate([components, lesions & self.matching.counted])


@dataclass(frozen=True)
class _Scores:
    """Scores of all cases under some rules."""

    rows: np.ndarray  # (cases, regions from the largest on, 3), the columns as in Means
    detected: np.ndarray  # (F,) whether each true lesion of all cases and regions is found


def choose(cases: Iterable[Answered], regions: Regions) -> Tuple[PostProcessing, Dict[str, Means], Dict[str, Means]]:
    """The post-processing that the rules at the top of this file choose, and the means before and after it. `cases`, at
    least one, are taken in turn; kept are the sizes of their parts and lesions and which touch."""
    plain, nested = [], []
    for answers, truth, spacing_mm in cases:
        label, cut = (PostProcessing(nested=nest).paint(answers, regions, spacing_mm) for nest in (False, True))
        del answers  # else they are in memory while the next case is predicted
        plain.append(_parts(label, truth, spacing_mm, regions))
        nested.append(plain[-1] if np.array_equal(label, cut) else _parts(cut, truth, spacing_mm, regions))
    cases_with = {name: sum(case[name].components > 0 for case in plain) for name in regions}
    chosen, measured = PostProcessing(), plain
    before = best = _scores(plain, {})
    cut = _scores(nested, {})
    if _is_nesting_evident(cut, before, regions, cases_with):
        chosen, measured, best = PostProcessing(nested=True), nested, cut
    codes_below = _codes_below(regions)
    rules: Dict[str, Tuple[Rule, ...]] = {}
    without: Dict[str, str] = {}
    for position, name in enumerate(_larger(regions)):
        if name not in codes_below:
            without[name] = "other regions would lose the same voxels"
            continue
        if cases_with[name] < LEAST_CASES:
            without[name] = _too_few(cases_with[name])
            continue
        tried = {rule: _scores(measured, {**rules, name: (rule,)}) for rule in RULES}
        gaining = [rule for rule in RULES if _gains(tried[rule], best)[position] > 0]
        harmless = [rule for rule in gaining if _is_harmless(tried[rule], best)]
        if harmless:
            rule = _middle_of_best({rule: _gains(tried[rule], best).mean() for rule in harmless})
            rules[name] = (rule,)
            best = tried[rule]
        elif gaining:
            without[name] = "each that gains takes a true lesion or lowers another region"
        else:
            without[name] = "none gains"
    off = "" if rules or chosen.nested else f"no rule for {_reasons(without)}"
    chosen = dataclasses.replace(chosen, rules=rules, off=off, without=without)
    return chosen, _means(before, regions), _means(best, regions)


def _is_nesting_evident(cut: _Scores, plain: _Scores, regions: Regions, cases_with: Mapping[str, int]) -> bool:
    """Whether nested answers gain in each region that nesting cuts, and do no harm."""
    cuts = [bool(larger) for larger in _larger(regions).values()]  # in the order of scores
    if not any(cuts) or not _is_harmless(cut, plain):
        return False
    inner = [name for name, larger in _larger(regions).items() if larger]
    has_cases = all(cases_with[name] >= LEAST_CASES for name in inner)
    return has_cases and bool((_gains(cut, plain)[cuts] > 0).all())


def _middle_of_best(gains: Mapping[Rule, float]) -> Rule:
    """Of rules with their gains the best; of equal ones a share, and of several the middle one."""
    most = max(gains.values())
    equal = [rule for rule, gain in gains.items() if round(most - gain, 9) <= 0]
    shares = [rule for rule in equal if rule.share] or equal
    return shares[(len(shares) - 1) // 2]


def _parts(label: np.ndarray, truth: np.ndarray, spacing_mm: Spacing, regions: Regions) -> Dict[str, _Parts]:
    """Region, the largest first -> its parts in a painted label."""
    box = bounding_box((label > 0) | (truth > 0)).slices(label.shape)  # lesions grow together inside of it
    numbered, parts_of = {}, {}
    for name, larger in _larger(regions).items():
        parts = numbered[name] = connected_parts(region_mask(label[box], regions[name]))
        inside = {}
        for other in larger:
            index = np.zeros(parts.max() + 1, np.int64)
            index[parts] = numbered[other]  # index[0], of voxels in no part, means nothing
            inside[other] = index[1:] - 1
        true = region_mask(truth[box], regions[name])
        components = connected_parts(true)
        pairs = np.unique(np.stack([components, parts])[:, true & (parts > 0)], axis=1) - 1
        matching = match_lesions(true, parts, spacing_mm)
        parts_of[name] = _Parts(matching, inside, int(components.max(initial=0)), *pairs)
    return parts_of


def _scores(cases: Sequence[Dict[str, _Parts]], rules: Mapping[str, Sequence[Rule]]) -> _Scores:
    """The scores of the parts that `PostProcessing.paint` leaves under `rules`."""
    rows, detected = [], []
    for case in cases:
        kept: Dict[str, np.ndarray] = {}
        for name, parts in case.items():
            matching = parts.matching
            stays = np.ones(len(matching.part_mm3), bool)
            for larger, index in parts.inside.items():
                stays &= kept[larger][index]
            if name in rules:
                stays[stays] = ~_is_small(matching.part_mm3[stays], rules[name])
            kept[name] = stays
            lesions = matching.lesions(stays)
            rows.append((lesions.dice, lesions.false_positives, matching.dice(stays)))
            detected.append(parts.detected(stays))
    return _Scores(np.reshape(rows, (len(cases), -1, 3)), np.concatenate(detected))


def _gains(scores: _Scores, other: _Scores) -> np.ndarray:
    """(R,) gains in the mean lesion-wise Dice of each region, from the largest on."""
    return (scores.rows - other.rows)[..., LESION_DICE].mean(0).round(9)


def _is_harmless(scores: _Scores, other: _Scores) -> bool:
    """Whether the mean of no region falls and no true lesion that was found is lost."""
    return _gains(scores, other).min() >= 0 and not (other.detected & ~scores.detected).any()


def _too_few(cases: int) -> str:
    return f"in {count(cases, 'validation case')}, {LEAST_CASES} are needed"


def _reasons(without: Mapping[str, str]) -> str:
    """Regions and why they have no rule, those of one reason together: "WT and TC (no rule
    gains)"."""
    names: Dict[str, List[str]] = {}
    for name, why in without.items():
        names.setdefault(why, []).append(name)
    return ", ".join(f"{listed(regions)} ({why})" for why, regions in names.items())


def _means(scores: _Scores, regions: Regions) -> Dict[str, Means]:
    return {name: Means(*row) for name, row in zip(_larger(regions), scores.rows.mean(0).tolist())}


def _is_small(sizes_mm3: np.ndarray, rules: Sequence[Rule]) -> np.ndarray:
    """Which parts are below the bounds of all rules; sizes are exact to rounding only."""
    largest = sizes_mm3.max(initial=0.0)
    return sizes_mm3 < min(max(rule.mm3, rule.share * largest) for rule in rules) * (1 - 1e-9)


def _larger(regions: Regions) -> Dict[str, List[str]]:
    """Region, that of the most codes first -> the regions that hold it and more, the smallest first."""
    names = sorted(regions, key=lambda name: -len(set(regions[name])))
    return {name: [other for other in reversed(names) if set(regions[other]) > set(regions[name])] for name in names}


def _codes_below(regions: Regions) -> Dict[str, int]:
    """Region, the largest first -> the code of voxels removed from it: the next larger region's
    own, or background. Only for regions whose voxels can be removed without a change to any other
    region but those within them."""
    own, codes_below = own_codes(regions), {}
    members = {name: set(codes) for name, codes in regions.items()}
    for name, larger in _larger(regions).items():
        codes = own[larger[0]] if larger else (0,)
        holders = {other for other in regions if members[other].intersection(codes[:1])}
        own_members = members[name]
        is_apart = all(
            other > own_members or other < own_members or other.isdisjoint(own_members)
            for other_name, other in members.items()
            if other_name != name
        )
        if codes and is_apart and holders == set(larger):
            codes_below[name] = codes[0]
    return codes_below


def _nested(answers: np.ndarray, regions: Regions) -> np.ndarray:
    """A copy of `answers` with 0 where a voxel is in a region and not in all larger regions that hold it."""
    names, nested = list(regions), answers.copy()
    for name, larger in _larger(regions).items():
        for other in larger:
            nested[~(answers[..., names.index(other)] >= THRESHOLD), names.index(name)] = 0
    return nested
