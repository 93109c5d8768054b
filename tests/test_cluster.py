"""A plan shared out to tasks: rows by number, job arrays of Slurm, GNU parallel, an indexed Job of Kubernetes.

The long form of it, 256 tasks on a real Slurm, is dev/torture/slurm.py.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess

import cluster_fixtures as cluster
import pytest
from conftest import ROOT, Tools
from scoring_fixtures import Bench

SIZES = (1, 2, 3, 5)
POLICY = "--runtime scripted"


class Site(Bench):
    """A place from which jobs are submitted: a plan of four rows under runs/, and the recipes."""

    def __init__(self, xd, place):
        super().__init__(xd, place)
        self.rows = [self.case("wobbles", ("batch.size", size)) for size in SIZES]
        self.runs = place / "runs"
        self.plan = self.runs / "test" / "plan.jsonl"
        self.plan.parent.mkdir(parents=True)
        self.plan.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        (place / "examples").symlink_to(ROOT / "examples")
        self.environment |= {"POLICY": POLICY, "RUNS": "runs", "PLAN": str(self.plan), "WOBBLE": "0"}

    def verdicts(self):
        return cluster.verdicts(self.runs)

    def shell(self, script, **variables):
        return cluster.shell(script, self.place, cluster.tools_environment(**{**self.environment, **variables}))

    def taken(self, *options):
        """Which rows xd-resume takes, by number."""
        words = ("xd-resume", "--runs", "none", *POLICY.split(), *options)
        ran = self.xd(*words, self.plan, env=self.environment)
        assert ran.status == 0, ran.err
        return [self.rows.index(json.loads(line)) for line in ran.out.splitlines()], ran.err


@pytest.fixture
def site(xd, tmp_path):
    return Site(xd, tmp_path)


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory):
    """`one_machine(wobble)`: the verdicts of the plan on one machine, in one pipe; each asked for once."""
    place = tmp_path_factory.mktemp("alone")
    site = Site(Tools(place), place)

    @functools.cache
    def verdicts(wobble="0"):
        runs = place / f"runs-{wobble}"
        cluster.on_one_machine(site.plan, runs, **{**site.environment, "WOBBLE": wobble})
        return cluster.verdicts(runs)

    return verdicts


# -- the rows of a task


def test_a_task_takes_the_row_of_its_number_and_the_first_is_0(site):
    assert site.taken("--index", "0")[0] == [0]
    assert site.taken("--index", "3")[0] == [3]


def test_beyond_the_plan_there_is_nothing_to_do(site):
    assert site.taken("--index", "4") == ([], "xd-resume: nothing to do: there is no row 4\n")
    assert site.taken("--index", "7", "--stride", "9") == ([], "xd-resume: nothing to do: there is no row 7\n")
    assert site.taken("--index", "5", "--exit-code", "-q") == ([], "")


def test_shares_are_all_rows_each_once(site):
    shares = [site.taken("--index", str(task), "--stride", "3")[0] for task in range(3)]
    assert shares == [[0, 3], [1], [2]]


@pytest.mark.parametrize("options", [["--stride", "3"], ["--index", "3", "--stride", "3"], ["--index", "-1"],
                                     ["--index", "0", "--stride", "0"]])  # fmt: skip
def test_numbers_that_share_nothing_out_are_usage(site, options):
    """A task 3 of 3 would do the work of task 0 after nobody had done row 0."""
    ran = site.xd("xd-resume", "--runs", "none", *POLICY.split(), *options, site.plan, env=site.environment)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)


def test_rows_are_counted_over_all_files_and_nothing_but_rows(site):
    spaced, bad = site.place / "spaced", site.place / "bad"
    spaced.write_text("\n" + site.plan.read_text().replace("\n", "\n\n"))
    bad.write_text("no row\n")
    words = ("xd-resume", "-q", "--runs", "none", *POLICY.split())
    ran = site.xd(*words, "--index", "5", spaced, bad, site.plan, env=site.environment)
    assert (ran.status, json.loads(ran.out)) == (0, site.rows[0])  # a row of another task is not looked at
    ran = site.xd(*words, "--index", "4", spaced, bad, site.plan, env=site.environment)
    assert (ran.status, ran.out) == (65, "")


def test_who_writes_the_plan_into_a_pipe_is_not_cut_off(site):
    """More than a pipe holds: a task that took its row and left would end the writer by SIGPIPE."""
    script = 'for each in {1..60}; do cat "$PLAN"; done | xd-resume -q --index 0 --runs none $POLICY'
    assert len(site.shell(script).splitlines()) == 1


def test_a_plan_that_is_missing_is_not_one_without_the_row(site):
    ran = site.xd("xd-resume", "--index", "0", "--runs", "none", *POLICY.split(), "none.jsonl", env=site.environment)
    assert ran.status == 66 and "there is no row" not in ran.err


# -- one task does its whole row: case.sh


def test_a_share_of_the_rows_from_their_engines_to_their_seals(site, one_machine):
    assert site.shell('examples/case.sh "$PLAN" 1 2').count("\n") == 2
    assert {case for case, _ in site.verdicts()} == {site.rows[1]["case_id"], site.rows[3]["case_id"]}
    assert site.verdicts().items() <= one_machine().items()
    assert site.shell('examples/case.sh "$PLAN" 3; examples/case.sh "$PLAN" 5') == ""  # answered; beyond the plan


def test_the_comparison_of_verdicts_can_tell(one_machine):
    """The same rows, whose engines were off by a little."""
    here, other = one_machine(), one_machine("1")
    assert here.keys() == other.keys() and all(here[row] != other[row] for row in here)


@pytest.mark.parametrize(("script", "status"), [("raises", 70), ("ignores:batch.size", 0)])
def test_the_status_of_a_task_says_whether_its_row_came_through(site, script, status):
    """A refusal is a result; a failure is that of the stage that failed, though later stages had nothing to do."""
    site.plan.write_text(json.dumps(site.case(script)) + "\n")
    for command in (["examples/case.sh", site.plan, "0"], ["examples/slurm/array.sbatch", site.plan]):
        ran = subprocess.run(["bash", *command], cwd=site.place, capture_output=True, text=True, env={
            **cluster.tools_environment(**site.environment), "SLURM_SUBMIT_DIR": str(site.place),
            "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"})  # fmt: skip
        assert ran.returncode == status, ran.stderr
    assert site.verdicts() == {}


# -- Slurm

#: an sbatch that does what it is told at once: each task of an array in turn, and a dependent job after it
SBATCH = r"""#!/usr/bin/env bash
declare -A said=()
while [[ $1 == --* ]]; do said[${1%%=*}]=${1#*=}; shift; done
id=$(($(cat "$SBATCH_IDS" 2> /dev/null || echo 0) + 1)); echo $id > "$SBATCH_IDS"; echo $id
export SLURM_SUBMIT_DIR=$PWD
tasks=once
[[ ! ${said[--array]} ]] || tasks=$(seq "${said[--array]%-*}" "${said[--array]#*-}")
for task in $tasks; do
    [ "$task" = once ] || export SLURM_ARRAY_JOB_ID=$id SLURM_ARRAY_TASK_ID=$task
    bash "$@" > slurm-${id}_$task.out 2>&1 || { cat slurm-${id}_$task.out >&2; exit 1; }
done
"""


@pytest.fixture
def without_slurm(site):
    stubs = site.place / "bin"
    stubs.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": '#!/bin/sh\nshift\nexec "$@"\n'}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    site.environment |= {"PATH": f"{stubs}:{cluster.tools_environment()['PATH']}", "SBATCH_IDS": str(stubs / "ids")}
    return site


def readme(mark):
    return cluster.block("examples/slurm/README.md", mark)


def test_the_commands_for_slurm_score_and_judge_a_plan(without_slurm, one_machine):
    """The README's, with a stand-in for sbatch: first two of three shares, then what is left, a task a row."""
    site = without_slurm
    script = readme("share").replace("63", "1").replace("64", "3") + readme("judge")
    job, judge = site.shell("plan=$PLAN\n" + script + "echo $array").split()[::-1]
    table = (site.place / f"slurm-{judge}_once.out").read_text()
    assert len(re.findall(r"^batch.size=\d +PASS", table, re.M)) == 3 and "batch.size=3  missing" in table
    assert len(site.verdicts()) == 3
    site.shell(readme("resume"))
    assert (site.place / "left.jsonl").read_text().count("\n") == 1
    assert site.verdicts() == one_machine()
    assert job and not list(site.runs.glob(".slurm-*"))  # what judge.sbatch was handed is judged


def test_the_plan_of_the_readme_can_be_planned(site):
    (site.place / "experiments").symlink_to(ROOT / "experiments")
    site.shell(readme("plan"), RUNS="")
    assert (site.place / "runs" / "s0" / "plan.jsonl").read_text().count("\n") > 10


def test_the_two_ranks_of_the_readme_are_what_its_command_asks_for(site):
    """A world of the engines, a task of Slurm each."""
    asked = re.search(r"--ntasks=(\d+) --ntasks-per-node=1 ", readme("ranks"))[1]
    planned = site.xd("xd-plan", "-q", ROOT / re.search(r"CONFIG=(\S+)", readme("ranks"))[1])
    assert planned.status == 0, planned.err
    for line in planned.out.splitlines():
        values = json.loads(line)["values"]
        world = values["rollout.tensor_parallel_size"] * values["rollout.context_parallel_size"]
        assert (str(world), values["training.sharding"]) == (asked, "fsdp")


def test_a_job_array_that_loses_tasks_and_is_resumed(site, one_machine):
    """On a real Slurm: as they score one task is cancelled, one's scorer is killed, one is preempted."""
    if not cluster.slurm_is_installed():
        pytest.skip("needs slurm-wlm and munge")
    ways = {0: "preempted", 1: "cancelled", 2: "killed"}
    sides = {0: "training", 1: "training", 2: "rollout"}
    with cluster.slurm() as slurm:
        slurm.environment |= site.environment
        gates = cluster.Gates(site.place / "gates", sides, "SCRIPTED")
        array = slurm("bash", "-euc", f"plan=$PLAN\n{readme('array')}echo $array", place=site.place,
                      **gates.environment)  # fmt: skip
        for held in gates.each():
            cluster.disturb(slurm, array, held, ways[held.task])
        slurm.wait(slurm("bash", "-euc", readme("judge"), place=site.place, array=array, plan=str(site.plan)))
        tasks = slurm.tasks(array)
        assert {task: (tasks[task]["JobState"], tasks[task]["Restarts"]) for task in tasks} == {
            0: ("COMPLETED", "1"), 1: ("CANCELLED", "0"), 2: ("FAILED", "0"), 3: ("COMPLETED", "0"),
        }  # fmt: skip
        assert {case for case, _ in site.verdicts()} == {site.rows[0]["case_id"], site.rows[3]["case_id"]}
        slurm.wait(slurm("bash", "-euc", readme("resume"), place=site.place))
    assert site.verdicts() == one_machine()
    attempts = list(site.runs.glob("test/cases/*/a*"))
    assert len(attempts) == len(SIZES) + len(ways) and cluster.untampered(site.runs) == len(SIZES)


def test_slurm_local_says_what_is_missing_and_what_does_not_run(tmp_path):
    bare = tmp_path / "bin"
    bare.mkdir()
    for program in ("bash", "basename", "cat", "id", "ps"):
        (bare / program).symlink_to(shutil.which(program))
    script = re.sub(r"^export PATH=.*$", f"export PATH={bare}", (ROOT / "dev" / "slurm-local").read_text(), flags=re.M)
    env = {**os.environ, "SLURM_LOCAL": str(tmp_path / "slurm")}

    def local(what):
        ran = subprocess.run(["bash", "-c", script, "bash", what], env=env, capture_output=True, text=True)
        return ran.returncode, ran.stdout.count("does not run"), ran.stderr.strip()

    hint = "munged is not installed (apt-get install --no-install-recommends slurm-wlm munge)"
    assert local("start") == (69, 0, f"slurm-local: {hint}")
    assert local("status") == (1, 4, "")
    assert local("stop") == (0, 0, f"slurm-local: nothing at {tmp_path / 'slurm'}")
    assert local("restart") == (2, 0, "slurm-local: start, stop or status?")
    assert not (tmp_path / "slurm").exists()


# -- GNU parallel


@pytest.mark.skipif(not shutil.which("parallel"), reason="needs GNU parallel")
def test_the_command_for_gnu_parallel(site, one_machine):
    site.shell(f"plan=$PLAN\n{cluster.block('examples/parallel/README.md', 'parallel')}")
    assert site.verdicts() == one_machine()


# -- Kubernetes

MANIFEST = ROOT / "examples" / "kubernetes" / "job.yaml"
#: Kubernetes that first has backoffLimitPerIndex by default, and a present one
VERSIONS = ("1.29", "1.33")


def manifest(change=None):
    yaml = pytest.importorskip("yaml")
    text = MANIFEST.read_text()
    if change:
        assert text.count(change[0]) == 1, change
        text = text.replace(*change)
    return yaml.safe_load(text)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_is_a_job_of_kubernetes(version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(manifest(), version, strict=True)


@pytest.mark.parametrize("change", [
    ("completions: 16", "completions: sixteen"), ("backoffLimitPerIndex", "backofLimitPerIndex"),
    ("  template:", "  templates:"), ("name: RUNS, ", ""), ('value: "1"', "value: 1"),
    ("containerName: xd, operator: In, values", "containerName: xd, values"), ("name: xd\n", "named: xd\n"),
])  # fmt: skip
def test_a_broken_manifest_is_none(change):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest(change), VERSIONS[0], strict=True)


def test_what_the_schema_does_not_say_of_the_manifest():
    """What the API server refuses beyond the schema: the words, and fields that need one another."""
    spec = manifest()["spec"]
    assert (spec["completionMode"], spec["template"]["spec"]["restartPolicy"]) == ("Indexed", "Never")
    actions = [rule["action"] for rule in spec["podFailurePolicy"]["rules"]]
    assert actions == ["Ignore", "FailIndex"] and spec["backoffLimitPerIndex"] > 0
    container, = spec["template"]["spec"]["containers"]  # fmt: skip
    codes = spec["podFailurePolicy"]["rules"][1]["onExitCodes"]
    assert codes["containerName"] == container["name"] and 0 not in codes["values"]
    assert not {69, 70, 75} & set(codes["values"])  # 69 is no failure; the others are worth another try
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}


def test_a_pod_does_the_row_of_its_index(site, one_machine):
    """Its command, in its working directory, with its variables: but for the runtime, and where things lie."""
    container = manifest()["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["RUNS"] == container["volumeMounts"][0]["mountPath"]
    assert variables["POLICY"].startswith("--runtime")
    here = cluster.tools_environment(**{**variables, **site.environment, "RUNS": str(site.runs)})
    (site.runs / "s0").mkdir()
    (site.runs / "s0" / "plan.jsonl").symlink_to(site.plan)
    for index in ("3", "15"):  # the second is beyond the plan
        ran = subprocess.run([*container["command"], *container["args"]], cwd=ROOT, capture_output=True, text=True,
                             env=here | {"JOB_COMPLETION_INDEX": index})  # fmt: skip
        assert ran.returncode == 0, ran.stderr
    assert [case for case, _ in site.verdicts()] == [site.rows[3]["case_id"]]
    assert site.verdicts().items() <= one_machine().items()
