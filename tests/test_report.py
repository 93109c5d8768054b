"""What a report says: of a run's evidence, in each format, of hostile text, and redacted."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from comparison_fixtures import floats, rewrite_json, scored
from report_fixtures import HOSTILE, LOGPROBS, Page, Words, judged, make, moved, report

from libxd import canon, comparison, doctor, impact, pairs, resume, schema, seal, table
from libxd.errors import Status, XdError
from libxd.identity import UNPROCESSED
from libxd.imports import publish
from libxd.imports.batch import Batch
from libxd.imports.record import Record
from libxd.imports.request import Declared
from libxd.report import answer, content, formats, markdown, page, run, vocabulary
from libxd.rundir import SIDES, Attempt
from libxd.table_text import WIDTH

FORMATS = ("html", "text", "md", "json")
CONTROLS = "\u202e\u0007\x1b\x00"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def said(made) -> content.Report:
    return report(made, Words("word"))


def case(found: content.Report, name: str) -> dict:
    return next(each for each in found.value["cases"] if each["name"] == name)


# -- which attempts


def test_a_run_is_read_as_its_plan_says_with_what_is_missing(made, tmp_path):
    copy = tmp_path / "test"
    shutil.copytree(made, copy)
    rows = [attempt.requested() for attempt in run.find(str(copy)).attempts]
    gone = Attempt(next(path for path in copy.glob("cases/*/a*") if "0.2" not in str(path)))
    lost = gone.requested()
    shutil.rmtree(gone.path)
    (copy / "plan.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    found = run.find(str(copy))
    listed = table.planned([table.read(attempt) for attempt in found.attempts], found.plan)
    assert [row.requested["request_digest"] for row in listed] == [row["request_digest"] for row in reversed(rows)]
    assert [row.requested["request_digest"] for row in listed if row.verdict == "missing"] == [lost["request_digest"]]
    formats.render(content.read(listed, None, False, lambda: None), "html")


def test_without_a_plan_the_baseline_comes_first_and_then_knob_by_knob(said):
    assert [each["name"] for each in said.value["cases"]] == [
        "baseline", "baseline repeat 1", "batch.size=1", "rollout.dtype=float16", "rollout.enable_prefix_caching=true",
        "rollout.enforce_eager=false", "training.attention_backend=sdpa",
    ]  # fmt: skip


def test_a_tampered_attempt_is_passed_over_for_an_older_one(tmp_path):
    old, new = judged(tmp_path, LOGPROBS, LOGPROBS), judged(tmp_path, LOGPROBS, moved(0.1))
    assert [each.attempt_id for each in run.find(str(tmp_path / "test")).attempts] == [new.attempt_id]
    rewrite_json(new, "comparison.json", status="PASS")
    found = run.find(str(tmp_path / "test"))
    assert [each.attempt_id for each in found.attempts] == [old.attempt_id]
    assert found.passed_over[0][0].attempt_id == new.attempt_id and "sealed, but" in found.passed_over[0][1]


def test_what_is_no_run(tmp_path, made):
    (tmp_path / "empty").mkdir()
    for path, status, what in (
        ("nowhere", Status.MISSING, "no such run"), ("empty", Status.INVALID, "no cases"),
    ):  # fmt: skip
        with pytest.raises(XdError, match=what) as caught:
            run.find(str(tmp_path / path))
        assert caught.value.status == status
    assert run.find(str(next(made.glob("cases/*/a*")))).attempts
    other = judged(tmp_path, LOGPROBS, LOGPROBS, source="bitwise")
    rows = [table.read(attempt) for attempt in [*run.find(str(made)).attempts, other]]
    for given, found in ((rows, r"under 1e-05 nats, .* under 0 nats"), ([], "no rows")):
        with pytest.raises(XdError, match="of one experiment under one threshold") as caught:
            content.read(given, None, False, lambda: None)
        assert re.search(found, caught.value.line())


def test_resume_and_a_report_take_the_same_attempts(made):
    found = run.find(str(made))
    run_directory = run.RunDirectory(made.parent, made.name)
    answered = [resume.outcome(attempt.requested(), run_directory, None).attempt for attempt in found.attempts]
    assert [each.path for each in answered] == [each.path for each in found.attempts]


# -- formats


@pytest.mark.parametrize("form", FORMATS)
def test_the_same_evidence_gives_the_same_bytes_wherever_it_lies(made, said, tmp_path, monkeypatch, form):
    moved_to = tmp_path / "elsewhere" / "test"
    shutil.copytree(made, moved_to)
    monkeypatch.chdir(moved_to.parent)
    data = formats.render(said, form)
    assert formats.render(report(Path("test"), Words("word")), form) == data
    assert str(made).encode() not in data
    other = make(tmp_path / "other")
    attempt = next(each for each in run.find(str(other)).attempts if each.requested()["repeat"])
    shutil.rmtree(attempt.path)
    assert formats.render(report(other, Words("word")), form) != data, "the control"


def test_the_value_is_what_its_schema_says(said):
    assert schema.validate("report", said.value, "report") is said.value
    assert [each["verdict"] for each in said.value["cases"]] == [
        "MISMATCH", "MISMATCH", "INVALID_ARTIFACT", "unsupported", "MISMATCH", "MISMATCH", "PASS",
    ]  # fmt: skip
    read = case(said, "rollout.enforce_eager=false")
    comparison_ = next(row for row in said.table.rows if row.changed == "rollout.enforce_eager=false").comparison
    for name in ("counts", "logprob_difference", "kl", "worst"):
        assert read[name] == comparison_[name]
    strip_ = read["strips"][0]
    assert (strip_["sequence"], strip_["worst"]) == (comparison_["worst"]["sequence"], comparison_["worst"]["position"])
    attempt = next(row.attempt for row in said.table.rows if row.changed == "rollout.enforce_eager=false")
    figures = impact.of_pair(pairs.of_attempt(attempt)).figures
    assert read["impact"]["ratio"]["token"].items() <= figures["ratio"]["token"].items()
    first = figures["objectives"][0]
    assert read["impact"]["clipped"][0] == {"name": first["name"], **first["outside"]}
    causes = [finding.cause for finding in doctor.examine_pair(pairs.of_attempt(attempt))]
    assert [finding["cause"] for finding in read["findings"]] == causes != []
    assert case(said, "training.attention_backend=sdpa")["findings"] == []
    assert "impact" not in case(said, "batch.size=1") and "impact" not in case(said, "rollout.dtype=float16")
    assert read["digests"]["score_rollout.safetensors"] == comparison_["inputs"]["score_rollout.safetensors"]


def test_knobs_are_shown_from_request_to_engine_with_evidence(said):
    refused_ = case(said, "rollout.dtype=float16")["knobs"]
    dtype = next(each for each in refused_ if each["knob"] == "rollout.dtype")
    assert (dtype["requested"], dtype["materialized"], dtype["actual"]) == ("float16", None, None)
    assert (dtype["status"], dtype["planned"]) == ("unsupported", "no half precision here")
    shown = next(each for each in case(said, "baseline")["knobs"] if each["knob"] == "batch.size")
    assert (shown["requested"], shown["materialized"], shown["actual"], shown["status"]) == (4, 4, 4, "applied")


def test_a_page_is_whole_and_needs_nothing_else(said):
    html = page.html(said.value)
    found = Page(html)
    assert found.unbalanced == []
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {attributes["href"] for attributes in found.named("a")}
    assert {target[1:] for target in targets} <= set(ids) and all(target.startswith("#") for target in targets)
    assert not re.search(r"https?://|//[a-z]|url\(|@import|src=", html.replace("xmlns", ""))
    (policy,) = [each["content"] for each in found.named("meta") if each.get("http-equiv")]
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(found.inside[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not any(name.startswith("on") or name == "style" for _, each in found.elements for name in each)


def test_a_page_can_be_used_without_eyes_and_without_colours(said):
    html = page.html(said.value)
    found = Page(html)
    for plot in re.findall(r"<svg[^>]*>.*?</svg>", html, re.S):
        named = 'role="img"' in plot and "<title>" in plot and "<desc>" in plot
        assert named or 'aria-hidden="true"' in plot
    assert len(found.named("table")) == len(found.named("caption"))
    assert all(each.get("scope") for each in found.named("th"))
    for each in said.value["cases"]:
        assert each["verdict"] in found.said
    chips = re.findall(r'class="chip [^"]*">([^<]*)<', html)
    assert all(re.fullmatch(r"\S \w+", text) for text in chips) and {text[0] for text in chips} >= {"✓", "≠", "✕", "–"}
    assert ", a mismatch" in html  # the word, beside the colour of a token
    assert html.startswith("<!doctype html>\n<html lang=\"en\">")


def test_what_nobody_declares_is_said_to_be_so(said):
    """As of an imported attempt: null semantics, mode and knobs."""
    value = json.loads(json.dumps(said.value))
    value["identity"] |= {"semantics": None, "rollout_mode": None, "checkpoint": None, "num_sequences": None}
    for knob in value["cases"][0]["knobs"]:
        knob |= {"requested": None, "materialized": None, "actual": None}
    schema.validate("report", value, "report")
    shown = Page(page.html({**value, "answer": answer.of(value)}))
    assert "nobody declares" in shown.said and "not at hand" in shown.said and "None" not in shown.said


def test_the_steps_of_others_are_one_report_without_a_baseline(tmp_path):
    """Imported attempts, each of its own tokens: no baseline is made up, and each step has its figures."""
    semantics = {"logprobs": "raw", **UNPROCESSED}
    declared = Declared(dict.fromkeys(SIDES, "float32"), checkpoint="c" * 64, semantics=semantics)
    for step, by in enumerate((0.0, 0.5)):
        sides = {"rollout": floats(np.nan, -1, -2), "training": floats(np.nan, -1, -2 - by)}
        batch = Batch.of_records([Record(np.array([step, 6, 7]), 1, np.arange(3) > 0, sides)], "dump.jsonl")
        attempt = publish.begin(tmp_path, "mine", f"step {step}", batch, declared)
        for side in SIDES:
            publish.add(attempt, side, batch)
        comparison.compare(attempt)
        seal.seal(attempt)
    found = report(tmp_path / "mine")
    assert [each["name"] for each in found.value["cases"]] == ["step 0", "step 1"]
    assert found.value["answer"]["what"] == "1 of 2 judged cases differs beyond 1e-05 nats."
    assert "Others scored this" in found.value["answer"]["which"][-1]["said"]
    assert found.value["identity"]["sequences"] is None and found.value["identity"]["checkpoint"] == "c" * 64
    assert answer.baseline(found.value["cases"]) is None
    assert not any("bootstrap" in each or "repeat" in each for each in found.value["answer"]["sure"])
    unsure = {**found.value, "cases": [{**each, "verdict": "INVALID_IDENTITY"} for each in found.value["cases"]]}
    assert "the table has the reasons" in answer.of(unsure)["what"]
    shown = Page(formats.render(found, "html").decode())
    assert not shown.unbalanced and "imported" in shown.said and "The line is the baseline" not in shown.said
    for form in ("text", "md", "json"):
        formats.render(found, form)


def test_no_effect_is_hidden_by_the_axis(said):
    """The row of every effect has its numbers as text, and its plot a dot."""
    html = page.html(said.value)
    rows = re.findall(r"<tr>(?:(?!</tr>).)*class=\"row\".*?</tr>", html[html.index('id="effects"'):], re.S)
    assert len([row for row in rows if "<circle" in row]) == sum(len(each["effects"]) for each in said.value["cases"])


def hostile(made: Path) -> dict:
    """A report whose tokens, reasons and evidence are markup and control characters."""
    text = HOSTILE.encode("utf-8", "backslashreplace").decode()  # what JSON can hold of it
    value = json.loads(json.dumps(report(made, Words("word")).value))
    for each in value["cases"]:
        each["reason"] = text
        for token in (token for window in each["strips"] for token in window["tokens"]):
            token["text"] = text
        for knob in each["knobs"]:
            knob["planned"] = knob["seen"] = text
    return value


def test_hostile_text_stays_text_on_a_page(made, said):
    data = page.html(hostile(made))
    found, clean = Page(data), Page(page.html(said.value))
    assert "alert(1)" in found.said, "the control: the text is there"
    assert found.unbalanced == [] and found.named("img") == [] and len(found.named("script")) == 1
    assert [name for name, _ in found.elements].count("b") == [name for name, _ in clean.elements].count("b")
    assert not set(CONTROLS) & set(data)


def test_hostile_text_stays_text_in_a_comment(made):
    data = "\n".join(markdown.lines(hostile(made)))
    assert "alert" in data and "<img" not in data and not set(CONTROLS) & set(data)
    assert "](" not in data.replace("\\](", "")


@pytest.mark.parametrize("form", FORMATS)
def test_hostile_tokens_are_escaped_where_they_are_decoded(made, tmp_path, form):
    tokenizers = pytest.importorskip("tokenizers")
    words = {HOSTILE.replace("\udc80", "") + str(token): token for token in range(96)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    row = run.find(str(made)).attempts[0].requested()
    found, why = vocabulary.find(row, tmp_path)
    assert why == "" and "</script><img" in found.text(3) and found.text(96) is None and found.text(-1) is None
    data = formats.render(report(made, found), form).decode()
    assert not set(CONTROLS) & set(data)


def test_tokens_are_decoded_by_the_tokenizer_that_made_them(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{token}": token for token in range(97)}
    place = tmp_path / "right"
    place.mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(place / "tokenizer.json"))
    files = {"tokenizer.json": canon.digest_file(place / "tokenizer.json")}
    judged(tmp_path, LOGPROBS, moved(0.1))
    row = run.find(str(tmp_path / "test")).attempts[0].requested()
    row["identity"]["tokenizer"]["files"] = files
    found, _ = vocabulary.find(row, place)
    tokens = report(tmp_path / "test", found).value["cases"][0]["strips"][0]["tokens"]
    assert all(token["text"] == f"w{token['id']}" for token in tokens)
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes((place / "tokenizer.json").read_bytes() + b" ")
    with pytest.raises(XdError, match="not the tokenizer"):
        vocabulary.find(row, other)
    with pytest.raises(XdError) as caught:
        vocabulary.find(row, tmp_path)
    assert caught.value.status == Status.MISSING
    for location, why in ((None, "no tokenizer made them"), (str(other), "another tokenizer"), ("gone", "not at hand")):
        moved_row = {**row, "locations": {**row["locations"], "tokenizer": location}}
        assert vocabulary.find(moved_row, None)[0] is None and why in vocabulary.find(moved_row, None)[1]
    (other / "tokenizer.json").write_text("{}")
    row["identity"]["tokenizer"]["files"] = {}
    with pytest.raises(XdError, match="no tokenizer that can be read"):
        vocabulary.find(row, other)


@pytest.mark.parametrize("form", FORMATS)
def test_redacted_no_byte_of_a_token_is_left(made, form):
    secret = "Geheimnis"
    open_, closed = (report(made, Words(secret), redact) for redact in (False, True))
    if form in ("html", "json", "text"):
        assert secret.encode() in formats.render(open_, form), "the control"
    data = formats.render(closed, form)
    assert secret.encode() not in data
    if form == "html":
        titles = [each["title"] for each in Page(data.decode()).named("b") if "title" in each]
        assert titles and not any(" id " in title for title in titles)
        assert all(title.startswith("position ") for title in titles)  # what is left still says where
    ids = [token["id"] for each in closed.value["cases"] for window in each["strips"] for token in window["tokens"]]
    assert set(ids) == {None} and all(each["worst"] is None or each["worst"]["token_id"] is None
                                      for each in closed.value["cases"])  # fmt: skip
    lines = [[line for each in found.value["cases"] for finding in each.get("findings", ())
              for line in finding["evidence"]] for found in (open_, closed)]  # fmt: skip
    assert lines[0] and not lines[1]
    assert closed.value["redacted"] and not open_.value["redacted"]


def test_text_and_markdown_are_for_people(said):
    lines = formats.render(said, "text").decode().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].startswith("test (test): contract ws1")
    assert lines[2].startswith("4 of 5 judged cases differ")
    rendered = formats.render(said, "md").decode()
    assert rendered.startswith("### test: 4 of 5 judged cases differ") and "INVALID\\_ARTIFACT" in rendered
    rows = [line for line in rendered.splitlines() if line.startswith("| rollout.enforce")]
    assert rows[0].count("|") == 7 and "≠ MISMATCH" in rows[0]


def test_cases_of_other_environments_are_told_apart(tmp_path):
    judged(tmp_path, LOGPROBS, LOGPROBS)
    judged(tmp_path, LOGPROBS, LOGPROBS, change=("batch.size", 1), rollout_environment={"python": "3.13.0"})
    value = report(tmp_path / "test").value
    found = {each["path"]: each["values"] for each in value["conditions"]["differing"] if each["side"] == "rollout"}
    assert found["environment.python"] == [
        {"value": "3.12.1", "cases": ["baseline"]}, {"value": "3.13.0", "cases": ["batch.size=1"]},
    ]  # fmt: skip
    assert "Not all cases were scored in the same environment" in " ".join(value["answer"]["sure"])
    shown = Page(page.html(value)).said
    assert "environment.python" in shown and "3.13.0" in shown
    same = report(make(tmp_path / "same")).value
    assert same["conditions"]["differing"] == []


def test_256_cases_of_a_million_tokens_stay_below_ten_megabytes(tmp_path):
    """A page's size is that of its cases, whose tokens are shown in windows; dev/report_size.py makes them all."""
    draw = np.random.default_rng(0)
    rollout = -draw.uniform(0.5, 6, 1 << 13).astype(np.float32)
    training = rollout + draw.normal(0, 0.1, rollout.size).astype(np.float32)
    attempt = scored(tmp_path, rollout, training, lengths=(1 << 10,) * 8, dtype="bfloat16")
    comparison.compare(attempt)
    row = table.read(attempt)
    windows = content.WINDOWS_OF_MANY
    one = content._case(row, windows, Words("internationally "), False)
    value = report(tmp_path / "test").value
    knob = {"path": "rollout.enable_prefix_caching", "value": True, "allow_fallback": False}
    value["cases"] = [{"name": f"rollout.enable_prefix_caching=true {i}", **one, "intervention": [knob],
                       "effects": [{"side": side, "mean_absolute": {"value": 0.0123456, "low": 0.01, "high": 0.02},
                                    "max_absolute": 0.1, "bitwise_equal_share": 0.0, "standing": "above"}
                                   for side in ("rollout", "training")]}
                      for i in range(256)]  # fmt: skip
    assert len(one["strips"]) == windows[0] and len(one["strips"][0]["tokens"]) == windows[1]
    size = len(page.html(value).encode())
    assert 1e6 < size < 10e6


# -- the page of the documents


def test_the_commands_of_the_page_run(made, tmp_path, root):
    """docs/report.md's, as they stand there but for the experiment's name."""
    commands = re.search(r"<!-- report -->\n```sh\n(.*?)```", (root / "docs" / "report.md").read_text(), re.S)[1]
    assert commands.count("xd-report") == 6
    shutil.copytree(made, tmp_path / "runs" / "test")
    rows = [attempt.requested() for attempt in run.find(str(made)).attempts]
    (tmp_path / "runs" / "test" / "plan.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    commands = commands.replace("runs/smollm2", "runs/test")
    tools = {"PATH": f"{root / 'tools'}:{os.environ['PATH']}", "XD_PYTHON": sys.executable}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, **tools})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Which knob\n") == 2
    for name in ("smollm2.html", "to-share.html", "comment.md", "smollm2.json"):
        assert (tmp_path / name).stat().st_size > 1000
