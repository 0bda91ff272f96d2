"""The page of a run: complete, self-contained, and made from whatever is there."""

import dataclasses
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from cpu3d.errors import InputError
from cpu3d.inference.evaluate import evaluate_split
from cpu3d.report import report
from cpu3d.report.report import write_report
from cpu3d.report.run_files import gather
from cpu3d.settings import load_config, save_config
from cpu3d.training.run_log import read_events, recent_events
from tests.cpu3d.runs import run_command

VOID = {"meta", "img", "br", "link"}


class Checker(HTMLParser):
    """Collects text, sources and problems of nesting."""

    def __init__(self):
        super().__init__()
        self.open, self.problems, self.sources, self.tags, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


def read(path):
    checker = Checker()
    checker.feed(path.read_text(encoding="utf-8"))
    assert not checker.problems
    assert not checker.open
    return checker, " ".join(" ".join(checker.text).split())


@pytest.fixture
def no_pictures(monkeypatch):
    """They take most of a page's time."""
    for draw in ("chart", "strips", "overlay"):
        monkeypatch.setattr(report.pictures, draw, lambda *args, **kwargs: b"PNG")


@pytest.fixture
def evaluated(tiny_store, tiny_run, fake_predictor):
    fake_predictor.shift = 1
    return evaluate_split(fake_predictor, tiny_store, "test", tiny_run)


def test_a_whole_run_gives_one_page_with_everything_on_it(tiny_run, evaluated):
    page, text = read(write_report(tiny_run))
    for word in ("WT", "TC", "ET", evaluated["split_hash"], "ITEX 2.15.0.0", "made up", "mixed_bfloat16", "2.15.1"):
        assert word in text
    assert f"{evaluated['summary']['TC']['dice']['mean']:.3f}" in text
    assert "Best case" in text
    assert "Median and worst case" in text
    assert "3.00 GiB" in text
    assert "waiting for data 1.0 %" in text  # 0.02 of 2 s
    assert "9.1 %" in text  # 2 x (3 + 1) s beside 40 x 2 s
    assert "2 cases" in text
    assert page.tags.count("img") == 3 + 6 + 2  # strips, curves, overlays
    assert "NOT untouched" not in text


def test_predictions_stand_beside_what_was_measured(tiny_run, no_pictures):
    path = tiny_run / "log.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    peaks = {"allocator_peak_bytes": 3 * 2**30, "process_peak_bytes": 4 * 2**30, "upper_bound_bytes": 5 * 2**30}
    lines[0]["predicted"] = {**peaks, "step_s": 2.178}
    lines[1]["step_s"] = 30.0  # compiles
    end = {"event": "end", "step": 40, "reason": "finished", "seconds": 90.0, "wait_share": 0.01}
    lines.append({**end, "allocator_peak_bytes": 2 * 2**30, "peak_rss_bytes": 5 * 2**30})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, text = read(write_report(tiny_run))
    assert "peak of TensorFlow's allocator 3.00 GiB 2.00 GiB +50.0%" in text
    assert "peak memory of the process 4.00 GiB 5.00 GiB -20.0%" in text
    assert "upper bound of it 5.00 GiB 5.00 GiB +0.0%" in text
    assert "time per step, waiting for data aside 2.18 s 1.98 s +10.0%" in text


END = {"event": "end", "step": 40, "reason": "finished", "seconds": 90.0}


def change(run, *ends, **settings):
    """Give a run other settings, those of devices to the starts in its log too, and attempts that ended."""
    save_config(dataclasses.replace(load_config(run), **settings), run)
    start, *lines = (json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()[:-1])
    events = [*lines, *(event for device, peak in ends for event in (
        {**start, "step": 40, "device": device}, {**END, "allocator_peak_bytes": peak}
    ))]  # fmt: skip
    (run / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in ({**start, **settings}, *events)))


def test_a_run_says_what_its_steps_saw_and_where(tiny_run, no_pictures):
    _, text = read(write_report(tiny_run))  # its log is from before there were patches and cards
    assert "mode whole volumes grid 16 \u00d7 16 \u00d7 16 parameters" in text
    assert "policy - micro-batch - engine ITEX 2.15.0.0 device cpu" in text
    change(tiny_run, resolution=0.5)
    assert "grid 16 \u00d7 16 \u00d7 16 resolution 0.5 of the store's" in read(write_report(tiny_run))[1]
    change(
        tiny_run,
        mode="patch",
        resolution=1.0,
        grid=(8, 8, 16),
        patches_per_case=4,
        foreground=0.25,
        fold="1/2",
        device="gpu:1",
    )
    _, text = read(write_report(tiny_run))
    assert "3D U-Net on patches" in text
    assert "mode patches patch 8 \u00d7 8 \u00d7 16 patches of a case 4 an epoch, 25.0 % around labels" in text
    assert "fold 1/2" in text
    assert "device gpu:1" in text


def test_the_allocator_s_peak_is_told_for_every_device_by_itself(tiny_run, no_pictures):
    change(tiny_run, ("cpu", 2 * 2**30), ("gpu:0", 6 * 2**30), ("gpu:0", 5 * 2**30))
    _, text = read(write_report(tiny_run))
    assert "peak of TensorFlow's allocator 2.00 GiB with ITEX it holds oneDNN's scratch" in text
    assert (
        "peak of TensorFlow's allocator on gpu:0 6.00 GiB cuDNN's workspaces are in it, CUDA's context is not" in text
    )


WINDOW = {"window": [8, 8, 16], "one_pass": False, "overlap": 0.5, "flips": True}
ONE_PASS = {"window": None, "one_pass": True, "overlap": 0.5, "flips": False}


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({}, "inference -"),
        ({"inference": ONE_PASS}, "inference in one pass"),
        ({"inference": WINDOW}, "inference window of 8 \u00d7 8 \u00d7 16, 50 % overlap, mean of 8 mirror images"),
        (
            {"runs": [{"inference": ONE_PASS, "held_out": ["a"]}] * 2},
            "inference in one pass; each case by the fold that held it out",
        ),
    ],
)
def test_how_the_network_was_applied_for_the_scores(tiny_store, tiny_run, fake_predictor, no_pictures, about, words):
    evaluate_split(fake_predictor, tiny_store, "test", tiny_run, about=about)
    assert words in read(write_report(tiny_run))[1]


def test_the_page_needs_no_script_and_no_network_and_names_from_outside_are_text(tiny_run, no_pictures):
    config = json.loads((tiny_run / "config.json").read_text())
    config["store"] = "<script>alert(1)</script>"
    (tiny_run / "config.json").write_text(json.dumps(config))
    page, text = read(write_report(tiny_run))
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in text
    assert "No scores yet: run `evaluate" in text
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not re.search(r"url\(|@import|https?://", (tiny_run / "report.html").read_text(encoding="utf-8"))


def test_a_run_that_is_going_on_again_has_not_ended_yet_and_shows_each_start(tiny_run, no_pictures):
    log = tiny_run / "log.jsonl"
    lines = log.read_text().split("\n")[:-1]
    end = {"event": "end", "step": 40, "reason": "interrupted", "seconds": 3700.0, "peak_rss_bytes": 5 * 2**30}
    log.write_text("\n".join([*lines, json.dumps(end), ""]))
    text = read(write_report(tiny_run))[1]
    for part in ("interrupted after step 40", "1:01:40", "5.00 GiB"):
        assert part in text
    again = {**json.loads(lines[0]), "step": 40, "host": {"cpu": "another"}, "policy": "lean", "micro_batch": 2}
    log.write_text("\n".join([*lines, json.dumps(end), json.dumps(again), ""]))
    text = read(write_report(tiny_run))[1]
    for part in ("not yet", "5.00 GiB", "Restarted at step 40", "made up", "another", "policy lean micro-batch 2"):
        assert part in text


def test_before_the_first_step_there_is_a_page_too(tiny_run, no_pictures):
    (tiny_run / "log.jsonl").unlink()
    page, text = read(write_report(tiny_run))
    assert "no curves" in text
    assert page.tags.count("img") == 0


def test_scores_of_seen_cases_carry_a_warning_and_those_of_untouched_ones_go_first(
    tiny_store, tiny_run, fake_predictor, no_pictures
):
    evaluate_split(fake_predictor, tiny_store, "train", tiny_run)
    assert "These are NOT untouched cases" in read(write_report(tiny_run))[1]
    evaluate_split(fake_predictor, tiny_store, "test", tiny_run)
    assert "NOT untouched" not in read(write_report(tiny_run))[1]


def test_a_store_that_is_gone_is_said_and_everything_else_is_there(tiny_store, tiny_run, evaluated, no_pictures):
    shutil.rmtree(tiny_store.folder)
    page, text = read(write_report(tiny_run))
    assert "is not there now, so no cases are shown" in text
    assert page.tags.count("img") == 3 + 6


def test_a_prediction_that_is_damaged_is_left_out(tiny_run, evaluated, no_pictures):
    (tiny_run / "evaluation/predictions/e.nii.gz").write_bytes(b"not a volume")
    assert read(write_report(tiny_run))[0].tags.count("img") == 3 + 6 + 1


def test_lines_of_the_log_that_were_cut_off_are_left_out(tiny_run):
    assert gather(tiny_run).events[-1]["event"] == "checkpoint"  # and not the torn 41st step
    with open(tiny_run / "log.jsonl", "a") as file:
        file.write('\n[1]\n{"event": "step", "step": 42}\n')
    assert gather(tiny_run).events[-1]["step"] == 42


@pytest.mark.parametrize(
    "line",
    [
        *("3", '"x"', "[]", "{}", "[" * 100_000, '{"event": "step"}', '{"event": ["step"], "step": 43}'),
        *('{"event": "step", "step": "43"}', '{"event": "step", "step": NaN}', '{"event": "validation", "step": 43}'),
        *('{"event": "step", "step": 43, "step_s": []}', '{"event": "end", "step": 43, "seconds": 1}'),
        *('{"event": "step", "step": 43, "dice": {"WT": "x"}}', '{"event": "start", "step": 43, "host": 1}'),
        '{"event": "start", "step": 43, "predicted": {"step_s": "x"}}',
    ],
)
def test_lines_of_the_log_that_are_no_events_are_left_out_by_all_who_read_it(tiny_run, line):
    before = read_events(tiny_run)
    with open(tiny_run / "log.jsonl", "a") as file:
        file.write(f"\n{line}\n")
    assert read_events(tiny_run) == before == recent_events(tiny_run)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "must hold a config"),
        ('{"store": ', "must be JSON"),
        ("[]", "must be JSON"),
        ('{"schema": 99}', "must have schema 1, got 99"),
    ],
    ids=["missing", "cut off", "a list", "another version"],
)
def test_a_folder_without_a_config_of_this_version_is_refused(tiny_run, content, words, no_pictures):
    config = tiny_run / "config.json"
    config.unlink()
    if content is not None:
        config.write_text(content)
    with pytest.raises(InputError, match=words):
        write_report(tiny_run)


@pytest.mark.parametrize(
    ("content", "message"),
    [("[]", "must be JSON with a schema"), ('{"schema": 99}', "must have schema 1, got 99")],
)
def test_scores_that_are_damaged_or_of_another_version_are_refused_and_the_old_page_stays(
    tiny_run, evaluated, no_pictures, content, message
):
    path = write_report(tiny_run)
    before = path.read_bytes()
    (tiny_run / "evaluation/scores.json").write_text(content)
    with pytest.raises(InputError, match=message):
        write_report(tiny_run)
    assert path.read_bytes() == before


def test_the_page_can_be_written_elsewhere_but_not_onto_a_folder(tiny_run, tmp_path, capsys, no_pictures):
    page = tmp_path / "page.html"
    assert run_command(report, "--run", tiny_run, "--out", page) == 0
    assert page.is_file()
    assert str(page) in capsys.readouterr().out
    with pytest.raises(InputError, match="must be a file, found a folder"):
        write_report(tiny_run, tmp_path)
    assert write_report(tiny_run, tmp_path / "new" / "page.html").is_file()
    with pytest.raises(InputError, match=r"folder of --out .* must be a folder to write to, got a file"):
        write_report(tiny_run, page / "page.html")
    with pytest.raises(InputError, match="must hold a config"):
        write_report(tmp_path / "no run")
    assert not (tmp_path / "no run").exists()
