"""Every reader of xd, each as a function of bytes that somebody else wrote; and what must hold whatever they are.

    PYTHONPATH=tests python -P tests/hostile_fixtures.py READER FILE...

says as JSON what each reader makes of each file, under a cap on memory and time.

A reader puts the bytes where a tool would find them, under a directory of its own, and does with them all that a tool
would. It may read them or raise XdError; `run` finds everything else: another exception, a status that blames xd or the
machine, a message that is no line, text that a terminal or a page would act on, a file made elsewhere, a process, a
connection, code that the bytes brought along.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import materialize_fixtures
import mutation_fixtures
import numpy as np
import planning_fixtures
from report_fixtures import ACTIVE, LENGTHS, LOGPROBS, Page, Words, judged, moved

from libxd import (
    canon,
    checkpoint,
    columns,
    comparison,
    config,
    identity,
    impact,
    impact_text,
    ladder,
    ladder_text,
    materialize,
    pairs,
    planner,
    prompts,
    resume,
    seal,
    sequences,
    strictjson,
    table,
    table_text,
    tensors,
)
from libxd.actual import actual
from libxd.doctor import at_hand, diagnosis, vocabulary
from libxd.doctor import text as doctor_text
from libxd.doctor.evidence import Evidence
from libxd.errors import Status, XdError, of_exception
from libxd.imports import dump, formats, publish, request
from libxd.imports.formats import columns as import_columns
from libxd.plain import plain
from libxd.records import digest
from libxd.report import content
from libxd.report import formats as report_formats
from libxd.report import run as report_run
from libxd.report import vocabulary as report_vocabulary
from libxd.rundir import PAYLOADS, SEAL, SIDES, Attempt, RunDirectory
from libxd.runtimes import registry
from libxd.runtimes.server import account, answers, client
from libxd.scoring.task import Task
from libxd.tensors import TensorFile

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
DUMPS = HERE / "dumps"
#: what a tool may answer of a bad file: 70 blames xd, 75 the machine, 0 and 1 nobody
STATUSES = (Status.USAGE, Status.INVALID, Status.MISSING, Status.REFUSED, Status.CONFLICT)
MOST_LINE = 6000  # characters of a message
MEMORY_BYTES = 512 << 20  # that one input may take, beyond what its reader's modules do
CPU_S = 30.0  # of one input


class Fault(AssertionError):
    """What must hold of every input, and did not."""


@dataclass(frozen=True)
class Reader:
    """form: as `mutation_fixtures.mutate` knows it. seeds: name -> bytes that are read without an error."""

    name: str
    form: str
    seeds: Callable[[], Mapping[str, bytes]]
    read: Callable[[bytes, Path], None]


def run(reader: Reader, data: bytes, place: Path) -> list[str]:
    """The codes of the errors that the input got, [] where it was read. Fault for whatever a tool must not do."""
    refused: list[str] = []
    place.mkdir(exist_ok=True)
    tempfile.gettempdir()  # finds one by writing to it
    reader.seeds()  # of which some are made in such a one
    try:
        with _watched(place), _collected(refused), refusing():
            reader.read(data, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return refused


def example(reader: Reader, seed: int) -> bytes:
    """The mutated seed of a number."""
    draw = random.Random(seed)
    data = draw.choice(sorted(reader.seeds().items()))[1]
    return mutation_fixtures.mutate(data, reader.form, draw)


_refused: list[str] = []


@contextlib.contextmanager
def _collected(into: list[str]) -> Iterator[None]:
    _refused.clear()
    try:
        yield
    finally:
        into += _refused


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """One tool's work, as `Console.guard` has it: an error ends it, if it is one that blames the input, in one line."""
    try:
        yield
    except Fault:
        raise
    except Exception as error:
        failure = of_exception(error)
        for issue in failure.issues:
            line = issue.line()
            if not line.isprintable() or len(line) > MOST_LINE:
                raise Fault(f"a message that is no line: {line[:300]!r}") from error
            json.dumps(issue.record())
        if failure.status not in STATUSES:
            raise Fault(f"status {int(failure.status)}: {failure.issues[0].line()[:300]}") from error
        _refused.append(failure.code)


def shown(lines: list[str]) -> None:
    """Fault for text on a terminal that is not what it looks like."""
    for line in lines:
        if not line.isprintable():
            raise Fault(f"a terminal would act on {line[:300]!r}")


def page(html: str) -> None:
    """Fault for a page of another structure than the writer's, or that loads or runs something of its content's."""
    parsed = Page(html)
    if parsed.unbalanced:
        raise Fault(f"a page whose elements do not close: {parsed.unbalanced[:4]}")
    for name, attributes in parsed.elements:
        loads = [value for key, value in attributes.items() if key in ("src", "href", "action", "data", "style")]
        if any(key.startswith("on") for key in attributes) or name in ("img", "iframe", "object", "embed", "base"):
            raise Fault(f"a page runs or loads something: <{name} {attributes}>")
        if any(value and not value.startswith(("#", "data:,")) for value in loads) and name not in ("rect", "g"):
            raise Fault(f"a page loads something: <{name} {attributes}>")
    if len(parsed.named("script")) != 1:
        raise Fault("a page has another script than its own")
    if hidden := [char for char in html if not char.isprintable() and char != "\n"]:
        raise Fault(f"a page holds {hidden[:4]!r}")


# -- what is done behind a reader's back

_guarded: list[Path] = []
_hooked = False
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: audit events of whatever makes, moves or removes a file -> which of their arguments are paths
_MAKING = {"os.mkdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,), "os.remove": (0,),
           "os.rmdir": (0,), "os.truncate": (0,), "os.chmod": (0,), "shutil.rmtree": (0,)}  # fmt: skip
_RUNNING = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pty.spawn",
            "socket.connect", "socket.getaddrinfo", "pickle.find_class", "ctypes.dlopen", "code.__new__")  # fmt: skip


@contextlib.contextmanager
def _watched(place: Path) -> Iterator[None]:
    global _hooked
    if not _hooked:  # for good: a hook cannot be taken out again
        sys.addaudithook(_audit)
        _hooked = True
    _guarded.append(place.resolve())
    try:
        yield
    finally:
        _guarded.pop()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _guarded:
        return
    if event == "open":
        path, mode, flags = arguments
        unnamed = os.path.isdir(path)  # O_TMPFILE: what is read of a dump is spooled in such files
        writing = (mode and set(mode) & set("wax+")) or (flags or 0) & _WRITING
        if isinstance(path, str | bytes) and writing and not unnamed and path != os.devnull:
            _within(path, event)
    elif event in _MAKING:
        for index in _MAKING[event]:
            _within(arguments[index], event)
    elif event in _RUNNING and not _importing():
        raise Fault(f"{event}: {arguments!r:.200}")


def _within(path: Any, event: str) -> None:
    if isinstance(path, int):
        return
    found = os.path.realpath(os.path.dirname(os.path.abspath(os.fsdecode(path))))
    if not os.path.join(found, "").startswith(os.path.join(_guarded[-1], "")) and not _importing():
        raise Fault(f"{event} outside of its place: {path!r}")


def _importing() -> bool:
    """Whether a module is just being loaded, which compiles, and may open a library."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


# -- configs, rows, prompts


def _config(data: bytes, place: Path) -> None:
    path = place / "experiment.json"
    path.write_bytes(data)
    with refusing():
        experiment = config.load(path)
        plan = planner.rows(experiment, repeats=1)
        published = planner.publish_plan(place / "runs", experiment, list(planner.encode(plan)))
        for line in (published / "plan.jsonl").read_bytes().splitlines():
            planner.read_row(line, "plan.jsonl")


def _plan_row(data: bytes, place: Path) -> None:
    """xd-materialize, xd-resume and xd-report of a plan that somebody sent, and of it with every digest made right."""
    for number, line in enumerate(data.split(b"\n")):
        _one_row(line, f"rows:{number}", place / "sent")
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            _one_row(json.dumps(materialize_fixtures.signed(json.loads(line))).encode(), "signed", place / "signed")


def _one_row(line: bytes, where: str, runs: Path) -> None:
    with refusing():
        row = planner.read_row(line, where)
        environments = materialize_fixtures.environments()
        for environment in environments.values():
            environment["xd"]["scorers"] |= dict.fromkeys(("vllm", "hf"), "c" * 64)
        policy = materialize_fixtures.policy(registry.load("vllm"), registry.load("hf"))
        value = materialize.materialized(row, policy, environments)
        expected = identity.expected(row, value["sides"])
        directory = RunDirectory(runs, row["experiment_id"])
        attempt = directory.new_attempt(row["case_id"])
        attempt.write_json("requested.json", row)
        attempt.write_json("identity.json", expected)
        attempt.write_json("materialized.json", value)
        resume.outcome(row, directory, value)
        (directory.path / "plan.jsonl").write_bytes(line + b"\n")
        _reported([str(directory.path)])


def _prompt(data: bytes, place: Path) -> None:
    with refusing():
        found = prompts.parse(prompts.rows(data, "prompts.jsonl"), "prompts.jsonl")
        prompts.digest(found)


# -- attempts


@cache
def _sealed() -> Path:
    """A sealed attempt that everything can be read of, to be copied."""
    root = Path(tempfile.mkdtemp(prefix="xd-hostile-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return judged(root, LOGPROBS, moved(1e-2)).path


def _copied(place: Path, leave: tuple[str, ...] = ()) -> Attempt:
    """The sealed attempt under `place`, without some of its files."""
    sealed = _sealed()
    path = place / "runs" / "test" / "cases" / sealed.parent.name / sealed.name
    path.mkdir(parents=True)
    for file in sealed.iterdir():
        if file.name not in leave:
            shutil.copyfile(file, path / file.name)
    return Attempt(path)


def _read_all(attempt: Attempt) -> None:
    """What each tool does with an attempt that somebody handed over."""
    with refusing():
        attempt = Attempt.open(attempt.path)
        for problem in seal.verify(attempt):
            shown([XdError(str(problem), where=str(attempt)).line()])
    for side in SIDES:
        with refusing():
            task = Task.read(attempt.path, side)
            assert task.needs and task.request
            task.answered()
    with refusing():
        comparison.compare(attempt)
    with refusing():
        seal.seal(attempt)
    with refusing():
        resume.outcome(attempt.requested(), RunDirectory(attempt.path.parents[3], "test"), None)
    with refusing():
        for each in table.tables([table.read(attempt)]):
            shown(table_text.lines(each))
    with refusing():
        shown(impact_text.lines(impact.of_pair(pairs.of_attempt(attempt))))
    with refusing():
        evidence = Evidence.of_pair(pairs.of_attempt(attempt))
        found = diagnosis.of_pair(evidence.with_known(at_hand.known(evidence)))
        shown(doctor_text.lines(found, True))
    with refusing():
        rungs = ladder.ladders([ladder.read(attempt, None)])
        for each in rungs:
            shown(ladder_text.lines(each, rungs))
    with refusing():
        _reported([str(attempt.path), str(attempt.path.parents[2])])


def _reported(operands: list[str]) -> None:
    """xd-report, in every format that is text."""
    for operand in operands:
        with refusing():
            found = report_run.find(operand)
            shown([plain(f"{attempt}: passed over: {why}") for attempt, why in found.passed_over])
            rows = table.planned([table.read(attempt) for attempt in found.attempts], found.plan)
            report = content.read(rows, Words(plain("</script>\x1b[31m\u2028")), False, lambda: None)
            shown(report_formats.render(report, "text").decode().split("\n"))
            shown(report_formats.render(report, "md").decode().split("\n"))
            page(report_formats.render(report, "html").decode())
            report_formats.render(report, "json")


def _payload(name: str) -> Reader:
    def read(data: bytes, place: Path) -> None:
        attempt = _copied(place)
        attempt.file(name).write_bytes(data)
        _read_all(attempt)

    form = "safetensors" if name.endswith(".safetensors") else "json"
    return Reader(f"attempt/{name}", form, lambda: {"sealed": (_sealed() / name).read_bytes()}, read)


_RECORDS = tuple(name for name in PAYLOADS if name.endswith(".json"))


def _forged(data: bytes, place: Path) -> None:
    """All records of an attempt as one object, by somebody who knows how to make every digest right."""
    try:
        records = strictjson.loads(data, "forged")
    except XdError:
        return
    if not isinstance(records, dict) or not all(isinstance(records.get(name), dict) for name in _RECORDS):
        return
    sealed = _copied(place)
    try:
        case = _signed(records, sealed)
    except (KeyError, TypeError, AttributeError, XdError):
        case = sealed.case_id  # too far from its form to be signed: as it is
    attempt = Attempt(sealed.path.parents[1] / case / "a0001")
    if attempt.path != sealed.path:
        attempt.path.parent.mkdir()
        sealed.path.rename(attempt.path)
    for name in _RECORDS:
        attempt.file(name).write_text(json.dumps(records[name]), encoding="utf-8")
    attempt.file(SEAL).unlink()
    _read_all(attempt)


def _signed(records: dict[str, Any], attempt: Attempt) -> str:
    """The records with the digests that their content gives, and the score files' stamps; the case's id."""
    requested, materialized = records["requested.json"], records["materialized.json"]
    materialize_fixtures.signed(requested)
    case = str(requested["case_id"])
    for record in records.values():
        record["case_id"] = case
    key = materialized["execution_key"] = materialize.execution_key(materialized)
    for name in _RECORDS[3:]:
        if "execution_key" in records[name]:
            records[name]["execution_key"] = key
    for side in SIDES:
        path = attempt.file(f"score_{side}.safetensors")
        with TensorFile(path) as file:
            arrays = {name: np.array(file.array(name)) for name in file.names}
            about = {**file.metadata, "case_id": case, "execution_key": key}
        path.unlink()
        tensors.write(path, arrays, about)
    readbacks = {side: records[f"readback_{side}.json"] for side in SIDES}
    records["actual.json"] = actual(requested, materialized, readbacks)
    said = records["comparison.json"]
    said["actual"] = canon.digest(records["actual.json"])
    said["inputs"] |= {name: digest(name, records[name]) for name in _RECORDS[:5]}
    return case


def _forged_seeds() -> dict[str, bytes]:
    return {"sealed": json.dumps({name: json.loads((_sealed() / name).read_bytes()) for name in _RECORDS}).encode()}


def _scores(data: bytes, place: Path) -> None:
    """A score file that nothing has judged yet."""
    attempt = _copied(place, leave=(SEAL, "comparison.json", "token_diffs.safetensors", "actual.json"))
    attempt.file("score_training.safetensors").write_bytes(data)
    _read_all(attempt)
    with refusing():
        shown(impact_text.lines(impact.of_pair(pairs.of_files(
            [attempt.file(f"score_{side}.safetensors") for side in SIDES]
        ))))  # fmt: skip


# -- files of tensors, models, tokenizers


def _safetensors(data: bytes, place: Path) -> None:
    path = place / checkpoint.SINGLE
    path.write_bytes(data)
    (place / "config.json").write_text("{}")
    with refusing(), TensorFile(path) as file:
        for name in file.names:
            file.array(name)
            file.expect(name, file.dtype(name), file.shape(name))
        assert isinstance(file.metadata, object)
    with refusing():
        checkpoint.parameter_digests(place, "bfloat16")


def _safetensors_seeds() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((2, 3)).astype(np.float32), "h": np.zeros((0, 4), np.float16),
              "m": np.array([True, False, True]), "n": np.array(7, np.int64)}  # fmt: skip
    return {"tensors": b"".join(map(bytes, tensors.serialise(arrays, {"schema_version": "x", "é": [1, {"a": None}]})))}


def _sequences(data: bytes, place: Path) -> None:
    path = place / "sequences.safetensors"
    path.write_bytes(data)
    with refusing():
        sequences.identity(path)
    with refusing():
        found = sequences.read(path)
        found.unusual(), found.answered()


def _sequences_seeds() -> dict[str, bytes]:
    made = materialize_fixtures.SEQUENCES
    about = json.loads((HERE / "schema_examples/sequences_metadata/valid-sampled.json").read_bytes())
    arrays = {name: getattr(made, name) for name in sequences.LAYOUT}
    return {name: b"".join(map(bytes, tensors.serialise(arrays, metadata)))
            for name, metadata in (("plain", made.metadata), ("sampled", about))}  # fmt: skip


def _members(data: bytes) -> dict[str, Any]:
    """File name -> JSON value, of an object that stands for a directory."""
    value = json.loads(data)
    return value if isinstance(value, dict) else {}


def _directory(names: tuple[str, ...], use: Callable[[Path], None]) -> Callable[[bytes, Path], None]:
    """A reader of a directory of JSON files, given as one object of them."""

    def read(data: bytes, place: Path) -> None:
        try:
            members = _members(data)
        except (ValueError, RecursionError):
            members = {names[0]: None}
            (place / names[0]).write_bytes(data)
        for name in names:
            if name in members and not (place / name).exists():
                (place / name).write_text(json.dumps(members[name]), "utf-8", "surrogatepass")
        use(place)

    return read


def _use_checkpoint(place: Path) -> None:
    for use in (lambda: checkpoint.parameter_digests(place, "float32"), lambda: checkpoint.require_sound(place),
                lambda: checkpoint.tensor_names(place), lambda: vocabulary.read([place])):  # fmt: skip
        with refusing():
            use()
    with refusing():
        declared = request.Declared(dict.fromkeys(SIDES, "float32"), place, place)
        request.row("test", "step", None, None, declared)
    with refusing():
        value = planning_fixtures.experiment_config()
        value["identity"]["checkpoint"] = {"path": "."}
        value["identity"].pop("model")
        planner.rows(config.parse(value, place, "experiment.json"))


def _checkpoint(data: bytes, place: Path) -> None:
    tensors.write(place / "a.safetensors", {"model.embed_tokens.weight": np.zeros((8, 4), np.float32)}, {})
    _directory(("config.json", checkpoint.INDEX), _use_checkpoint)(data, place)


def _checkpoint_seeds() -> dict[str, bytes]:
    about = {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 8, "hidden_size": 4,
             "tie_word_embeddings": True, "eos_token_id": [1, 2], "bos_token_id": 1}  # fmt: skip
    index = {"metadata": {"total_size": 128}, "weight_map": {"model.embed_tokens.weight": "a.safetensors"}}
    return {"indexed": json.dumps({"config.json": about, checkpoint.INDEX: index}).encode(),
            "nested": json.dumps({"config.json": {"text_config": about}, checkpoint.INDEX: index}).encode()}


def _use_tokenizer(place: Path) -> None:
    with refusing():
        vocabulary.read([place])
    row = materialize_fixtures.row()
    with refusing():
        words, _ = report_vocabulary.find(row, place)
        if words:
            for token in (0, 1, 2, 10**6, -1):
                shown([words.text(token) or ""])


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")


def _tokenizer_seeds() -> dict[str, bytes]:
    added = [{"id": 3, "content": "<|im_start|>", "special": True, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False}]  # fmt: skip
    words = {"<unk>": 0, "a": 1, "user": 2}
    shared = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
              "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}  # fmt: skip
    word = {**shared, "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}}
    pair = {**shared, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                                        "use_regex": True},
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}}  # fmt: skip
    piece = {**shared, "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}}
    others = {"tokenizer_config.json": {"eos_token": {"content": "a"}, "bos_token": "<unk>", "pad_token": None},
              "config.json": {"vocab_size": 8, "eos_token_id": 2, "pad_token_id": [0]},
              "generation_config.json": {"eos_token_id": [1, 2], "bos_token_id": 0}}  # fmt: skip
    return {name: json.dumps({"tokenizer.json": each, **others}).encode()
            for name, each in (("word", word), ("pair", pair), ("piece", piece))}  # fmt: skip


# -- numbers beside a pair


def _columns(suffix: str, group: str | None) -> Callable[[bytes, Path], None]:
    def read(data: bytes, place: Path) -> None:
        path = place / f"rewards{suffix}"
        path.write_bytes(data)
        layout = columns.Layout(np.cumsum([0, *LENGTHS]).astype(np.int64), ACTIVE)
        with refusing():
            columns.read(path, "reward", layout, group=group)
        with refusing():
            columns.read(path, "advantage", layout)

    return read


def _columns_seeds(suffix: str) -> Callable[[], dict[str, bytes]]:
    def seeds() -> dict[str, bytes]:
        rows = [{"sequence": i, "reward": float(i), "group": f"g{i % 2}"} for i in range(len(LENGTHS))]
        lists = [{"advantages": [0.5] * length, "reward": 0} for length in LENGTHS]
        if suffix == ".jsonl":
            return {"rows": b"\n".join(json.dumps(row).encode() for row in rows),
                    "lists": b"\n".join(json.dumps(row).encode() for row in lists)}  # fmt: skip
        if suffix == ".csv":
            places = [(s, p) for s, length in enumerate(LENGTHS) for p in range(length)]
            return {"rows": "\n".join(["sequence,reward,group", *(f"{r['sequence']},{r['reward']},{r['group']}"
                                                                   for r in rows)]).encode(),
                    "places": "\n".join(["sequence,position,advantage", *(f"{s},{p},0.5" for s, p in places)]).encode()}
        arrays = {"reward": np.arange(4, dtype=np.float32), "group": np.array([0, 0, 1, 1], np.int32),
                  "advantages": np.ones(int(ACTIVE.sum()), np.float64)}  # fmt: skip
        return {"arrays": b"".join(map(bytes, tensors.serialise(arrays, {})))}

    return seeds


# -- imports


def _import(format: str, suffix: str) -> Callable[[bytes, Path], None]:
    """xd-import of a file, and what follows it."""

    def read(data: bytes, place: Path) -> None:
        path = place / f"dump{suffix}"
        path.write_bytes(data)
        declared = request.Declared(dict.fromkeys(SIDES, "float32"))
        of = formats.named(format, _MAPPED.get(format, {}))
        with refusing():
            found = dump.read(format, [path], of.sides or ("rollout",), _MAPPED.get(format, {}))
            shown([*found.notes, found.summary()])
            attempt = publish.begin(place / "runs", "test", "step 1", found.batch, declared)
            for side in found.batch.logprobs:
                shown(publish.add(attempt, side, found.batch, source=found.source()))
            if len(found.batch.logprobs) == len(SIDES):
                _read_all(attempt)
        if of.of_prompts:
            with refusing():
                dump.read(format, [path], ("training",), {}, of_prompts=True)

    return read


_MAPPED = {"csv": {"version": "step"}, "parquet": {}}
_FILES = {
    "vllm": ("vllm.json", "vllm_flat.json"), "sglang": ("sglang.json",),
    "openai": ("openai_batch.jsonl", "openai_chat.json", "openai_completions.json", "openai_echo.json",
               "openai_generate.json"),
    "trl": ("trl.jsonl", "trl_batch.safetensors"), "verl": ("verl.jsonl",), "openrlhf": ("openrlhf.jsonl",),
    "slime": ("slime.jsonl",), "prime-rl": ("prime_rl.jsonl",), "nemo-rl": ("nemo_rl.jsonl",),
    "jsonl": ("sequences.jsonl",), "csv": ("tokens.csv",),
}  # fmt: skip
_FORM_OF = {".json": "json", ".jsonl": "jsonl", ".safetensors": "safetensors", ".csv": "csv", ".pt": "zip",
            ".parquet": "bytes"}  # fmt: skip


def _importers() -> Iterator[Reader]:
    for format, names in _FILES.items():
        for suffix in sorted({Path(name).suffix for name in names}):
            files = [name for name in names if name.endswith(suffix)]

            def seeds(files: list[str] = files) -> dict[str, bytes]:
                return {name: (DUMPS / name).read_bytes() for name in files}

            yield Reader(f"import/{format}{suffix}", _FORM_OF[suffix], seeds, _import(format, suffix))
    if importlib.util.find_spec("torch"):
        for format in ("trl", "verl", "slime"):
            yield Reader(f"import/{format}.pt", "zip", _torch_seeds(format), _import(format, ".pt"))
    if importlib.util.find_spec("pyarrow"):
        yield Reader("import/parquet", "bytes", _parquet_seeds, _import("parquet", ".parquet"))


def _torch_seeds(format: str) -> Callable[[], dict[str, bytes]]:
    def seeds() -> dict[str, bytes]:
        import torch

        lines = (DUMPS / _FILES[format][0]).read_text().splitlines()
        rows = [{name: value for name, value in json.loads(line).items() if value is not None} for line in lines]
        one = {name: [value] for name, value in rows[0].items()}
        held = {"rows": {"samples": rows} if format == "slime" else rows,
                "columns": {name: torch.tensor(value) if not _words(value) else value for name, value in one.items()}}
        made = {}
        for name, value in held.items():
            out = io.BytesIO()
            torch.save(value, out)
            made[name] = out.getvalue()
        out = io.BytesIO()
        torch.save(held["columns"], out, _use_new_zipfile_serialization=False)
        return {**made, "legacy": out.getvalue()}

    return cache(seeds)


def _words(value: Any) -> bool:
    return any((isinstance(each, list) and _words(each)) or isinstance(each, str | dict | None) for each in value)


@cache
def _parquet_seeds() -> dict[str, bytes]:
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(line) for line in (DUMPS / "sequences.jsonl").read_text().splitlines()]
    made = {}
    for name, how in (("plain", "none"), ("packed", "snappy")):
        out = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(rows), out, compression=how, store_schema=False)
        made[name] = out.getvalue()
    return made


# -- a server's answers


def _server(data: bytes, place: Path) -> None:
    with contextlib.suppress(XdError):  # 70 and 75 are right here: an engine is somebody's at hand, not a file
        client._good(400, data)
    account._configuration(account._json(data), data)
    with contextlib.suppress(XdError):
        value = strictjson.loads(data, "answer")
        found = answers.read(value, "m", [[5, 6, 7]], ["sequence 0"])
        answers.require_logprobs(found[0].logprobs[1:], 1, "sequence 0")


def _server_seeds() -> dict[str, bytes]:
    choice = {"index": 0, "prompt_token_ids": [5, 6, 7],
              "prompt_logprobs": [None, {"6": {"logprob": -0.5, "rank": 1}}, {"7": {"logprob": -1.5}}]}  # fmt: skip
    info = {"vllm_config": {"model_config": {"dtype": "torch.bfloat16"}, "parallel_config":
            {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}}, "vllm_env": {}}  # fmt: skip
    return {"answer": json.dumps({"model": "m", "choices": [choice]}).encode(), "info": json.dumps(info).encode(),
            "error": b'{"error": {"message": "no \\u001b[31m"}}'}  # fmt: skip


# -- operands


def _operand(data: bytes, place: Path) -> None:
    """A path on a line of stdin, as every tool that reads attempts takes it."""
    for line in data.split(b"\n")[:4]:
        path = os.fsdecode(line)
        for given in (path, str(place / "runs") + "/" + path):
            with refusing():
                attempt = Attempt.open(given)
                seal.verify(attempt)
            with refusing():
                report_run.find(given)
        with refusing():
            RunDirectory(place / "runs", path).new_attempt("c-" + "0" * 16)
        with refusing():
            RunDirectory(place / "runs", "test").new_attempt(path)
        with refusing():
            import_columns.mapping([path])


def _operand_seeds() -> dict[str, bytes]:
    names = [name for name in mutation_fixtures.NAMES if name.isascii()]
    return {"path": b"test/cases/c-0123456789abcdef/a0001",
            **{f"name-{i}": name.encode() for i, name in enumerate(names)}}  # fmt: skip


def _files(*names: str) -> Callable[[], dict[str, bytes]]:
    return lambda: {name: (HERE.parent / name).read_bytes() for name in names}


def _config_seeds() -> dict[str, bytes]:
    pairwise = planning_fixtures.experiment_config(strategy="pairwise", pairs=[["batch.size", "rollout.dtype"]])
    return {"s0": (HERE.parent / "experiments/s0.json").read_bytes(), "pairwise": json.dumps(pairwise).encode(),
            "trial": json.dumps(planning_fixtures.experiment_config()).encode()}  # fmt: skip


def _row_seeds() -> dict[str, bytes]:
    of = {"baseline": materialize_fixtures.row(), "changed": materialize_fixtures.row(("rollout.dtype", "float16")),
          "repeat": materialize_fixtures.row(repeat=2), "missing": materialize_fixtures.row(
              missing=("/identity/sequences: not at hand",))}  # fmt: skip
    place = _sealed().parents[3] / "sequences.safetensors"
    sequences.write(place, materialize_fixtures.SEQUENCES)
    for name, row in of.items():
        if name != "missing":
            row["locations"]["sequences"] = str(place)
    return {name: canon.dumps(materialize_fixtures.signed(row)) for name, row in of.items()}


@cache
def readers() -> dict[str, Reader]:
    """Name -> reader, of all there are here: those of .pt and .parquet where torch and pyarrow are installed."""
    found = [
        Reader("experiment", "json", cache(_config_seeds), _config),
        Reader("plan-row", "jsonl", cache(_row_seeds), _plan_row),
        Reader("prompts", "jsonl", _files("experiments/prompts/short.jsonl", "experiments/prompts/mix.jsonl"), _prompt),
        *map(_payload, (*_RECORDS, SEAL, "token_diffs.safetensors")),
        Reader("attempt/forged", "json", cache(_forged_seeds), _forged),
        Reader("attempt/score_training.safetensors", "safetensors",
               lambda: {"sealed": (_sealed() / "score_training.safetensors").read_bytes()}, _scores),
        Reader("safetensors", "safetensors", cache(_safetensors_seeds), _safetensors),
        Reader("sequences", "safetensors", cache(_sequences_seeds), _sequences),
        Reader("checkpoint", "json", cache(_checkpoint_seeds), _checkpoint),
        Reader("tokenizer", "json", cache(_tokenizer_seeds), _directory(_TOKENIZER_FILES, _use_tokenizer)),
        *(Reader(f"columns{suffix}", _FORM_OF[suffix], cache(_columns_seeds(suffix)), _columns(suffix, "group"))
          for suffix in (".jsonl", ".csv", ".safetensors")),
        *_importers(),
        Reader("server", "json", cache(_server_seeds), _server),
        Reader("operand", "bytes", cache(_operand_seeds), _operand),
    ]  # fmt: skip
    return {reader.name: reader for reader in found}


# -- under a cap


@contextlib.contextmanager
def capped(more_bytes: int, cpu_s: float = 0) -> Iterator[None]:
    """Let this process map so much more than it has, and compute for so long (0: for ever). Beyond it is a MemoryError
    or a Fault."""

    def hangs(_number: int, _frame: Any) -> None:
        raise Fault(f"computes for {cpu_s:g} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    previous = signal.signal(signal.SIGVTALRM, hangs)
    resource.setrlimit(resource.RLIMIT_AS, (held + more_bytes, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGVTALRM, previous)


def outcome(
    reader: Reader, data: bytes, place: Path, more_bytes: int = MEMORY_BYTES, cpu_s: float = CPU_S
) -> dict[str, Any]:
    """What the reader makes of an input under the cap: {"codes": those of its errors}, or {"fault": what happened}."""
    try:
        with capped(more_bytes, cpu_s):
            return {"codes": run(reader, data, place)}
    except (Fault, MemoryError, RecursionError) as error:
        return {"fault": f"{type(error).__name__}: {error}"}


def main(arguments: list[str]) -> None:
    loaded: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="xd-hostile-") as place:
        for name, path in zip(arguments[::2], arguments[1::2], strict=True):
            reader = readers()[name]
            for data in reader.seeds().values() if name not in loaded else ():  # its modules, before the cap is set
                run(reader, data, Path(place) / "seed")
            loaded.add(name)
            found = outcome(reader, Path(path).read_bytes(), Path(place) / "input")
            print(json.dumps({"reader": name, "path": path, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
