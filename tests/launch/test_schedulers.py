"""The files for schedulers, tested without a scheduler: scripts run, manifests fit the schemas."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from scripted import wait_for

from launch import options
from trainer.config.schema import Stop
from trainer.errors import EXIT_COMPLETE, EXIT_STOPPED, FINAL_EXIT_CODES

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
GRACE_S = Stop().grace_s
NEVER_AGAIN = sorted(set(FINAL_EXIT_CODES) - {EXIT_COMPLETE, EXIT_STOPPED})

SRUN = """\
#!/bin/bash
trap 'echo "srun: SIGUSR1" >> "$CALLS"; exit "$CODE"' USR1
echo "srun $*" >> "$CALLS"
echo "secret ${#TRAINER_SECRET} $TRAINER_SECRET" >> "$CALLS"
while [[ $HOLD ]]; do sleep 0.05; done
exit "$CODE"
"""
SCONTROL = """\
#!/bin/bash
echo "scontrol $*" >> "$CALLS"
[[ $1 != show ]] || case $2 in
    hostnames) printf 'n07\\nn08\\n' ;;
    job) echo "   JobState=$STATE Reason=None" ;;
esac
"""


class Batch:
    """`train.sbatch` as Slurm runs it, with fake srun and scontrol that log their calls."""

    def __init__(self, folder: Path, *arguments: str, code: int, nodes: int = 1, hold: bool = False,
                 state: str = "RUNNING", **more: str) -> None:
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.log = folder / "calls"
        env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
               "CALLS": str(self.log), "CODE": str(code), "HOLD": "1" * hold, "STATE": state,
               "SLURM_JOB_ID": "10123", "SLURM_JOB_NUM_NODES": str(nodes),
               "SLURM_JOB_NODELIST": "n[07-08]", **more}
        self.process = subprocess.Popen(
            ["bash", str(LAUNCH / "slurm/train.sbatch"), *arguments], env=env, cwd=ROOT)

    def calls(self, command: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(command)]

    def end(self) -> int:
        return self.process.wait(200)


def test_sbatch_exits_with_the_launchers_code_and_does_not_requeue(tmp_path):
    batch = Batch(tmp_path, code=76)

    assert batch.end() == 76
    assert batch.calls("scontrol") == []


@pytest.mark.parametrize(("number", "state", "again"), [
    (signal.SIGUSR1, "RUNNING", True),  # the time limit
    (signal.SIGTERM, "RUNNING", True),  # preempted, during the grace time
    (signal.SIGTERM, "COMPLETING", False),  # cancelled
])
def test_sbatch_forwards_a_signal_waits_and_requeues_a_saved_run(number, state, again, tmp_path):
    batch = Batch(tmp_path, code=75, hold=True, state=state)
    wait_for(lambda: batch.calls("srun"), 1)

    batch.process.send_signal(number)

    assert batch.end() == 75
    assert batch.calls("srun:") == ["SIGUSR1"]
    assert ("requeue 10123" in batch.calls("scontrol")) is again


def test_sbatch_starts_a_launcher_on_each_node_with_the_first_as_endpoint(tmp_path, capfd):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    single = Batch(one, "--run-dir", "runs/a b", code=0, NPROC="3", PYTHON="py")
    double = Batch(two, "--steps=1", code=0, nodes=2, SLURM_GPUS_ON_NODE="8", MIN_NODES="2",
                   SLURM_CPUS_PER_TASK="32")

    assert single.end() == double.end() == 0
    assert capfd.readouterr().out.count("one core for all ranks of a node") == 1
    step = "--no-kill --kill-on-bad-exit=0"
    assert single.calls("srun") == [
        f"{step} py -m launch --nproc-per-node 3 --max-restarts 3 -- --run-dir runs/a b"]
    assert double.calls("srun") == [
        f"{step} --cpus-per-task=32 python -m launch --nproc-per-node 8 --max-restarts 3"
        " --nnodes 2:2 --rdzv-endpoint n07:20123 -- --steps=1"]
    assert single.calls("secret") == ["0 "]
    (secret,) = double.calls("secret")
    assert re.fullmatch("64 [0-9a-f]{64}", secret)  # in the environment: ps does not show it


# --- Kubernetes

def manifests(name: str) -> dict[str, Any]:
    """The objects of a manifest file, by kind."""
    yaml = pytest.importorskip("yaml", reason="needs the test extra: pip install -e '.[test]'")
    found = yaml.safe_load_all((LAUNCH / "kubernetes" / name).read_text())
    return {each["kind"]: each for each in found}


def job_specs() -> dict[str, tuple[dict, dict]]:
    """By file: the JobSpec, and the object with the command line."""
    job = manifests("job.yaml")["Job"]["spec"]
    kubeflow = manifests("trainjob.yaml")
    (node,) = kubeflow["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return {"job.yaml": (job, job["template"]["spec"]["containers"][0]),
            "trainjob.yaml": (node["template"]["spec"], kubeflow["TrainJob"]["spec"]["trainer"])}


@pytest.mark.parametrize(("name", "kind", "model"), [
    ("runs.yaml", "PersistentVolumeClaim", "IoK8sApiCoreV1PersistentVolumeClaim"),
    ("job.yaml", "Service", "IoK8sApiCoreV1Service"),
    ("job.yaml", "Job", "IoK8sApiBatchV1Job"),
    ("trainjob.yaml", "TrainingRuntime", "TrainerV1alpha1TrainingRuntime"),
    ("trainjob.yaml", "TrainJob", "TrainerV1alpha1TrainJob"),
])
def test_a_manifest_conforms_to_the_published_schema(name, kind, model):
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="needs the test extra: pip install -e '.[test]'")
    manifest = manifests(name)[kind]
    schema = getattr(models, model)

    # The model drops unknown fields, so a misspelt field would be missing here.
    assert schema.from_dict(manifest).to_dict() == manifest


@pytest.mark.parametrize("name", ["job.yaml", "trainjob.yaml"])
def test_each_exit_code_has_a_rule(name):
    job, _ = job_specs()[name]
    pod = job["template"]["spec"]
    container, actions = pod["containers"][0]["name"], {}
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"values": ["disruption"]})
        assert codes.get("containerName", container) == container
        assert codes.get("operator", "In") == "In"
        actions |= {code: rule["action"] for code in codes["values"]}

    assert actions == {**dict.fromkeys(NEVER_AGAIN, "FailJob"), EXIT_STOPPED: "Ignore",
                       "disruption": "Ignore"}
    assert pod["restartPolicy"] == "Never"  # else Kubernetes refuses the policy
    assert pod["terminationGracePeriodSeconds"] > GRACE_S
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    claim = manifests("runs.yaml")["PersistentVolumeClaim"]["metadata"]["name"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim


@pytest.mark.parametrize("name", ["job.yaml", "trainjob.yaml"])
def test_a_pod_has_valid_arguments_a_secret_and_no_right_that_training_does_not_need(name):
    job, container = job_specs()[name]
    pod, policy = job["template"]["spec"], manifests(name)["NetworkPolicy"]["spec"]
    secrets = {each["name"]: each.get("valueFrom") for each in container["env"]}

    set_by_kubeflow = {"PET_NNODES": "2", "PET_MASTER_ADDR": "host", "PET_MASTER_PORT": "29400"}
    given = [re.sub(r"\$\((\w+)\)", lambda m: set_by_kubeflow[m[1]], a) for a in container["args"]]
    assert options.parse_options(given).trainer_argv == ("--run-dir=/runs/mine",)
    assert secrets[options.SECRET] == {"secretKeyRef": {"name": "trainer", "key": "secret"}}
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]}}
    assert all("sizeLimit" in volume["emptyDir"] for volume in pod["volumes"]
               if "emptyDir" in volume)
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]  # its own pods
    label = {"job.yaml": "batch.kubernetes.io/job-name",
             "trainjob.yaml": "jobset.sigs.k8s.io/jobset-name"}[name]
    owner = manifests(name)["Job" if name == "job.yaml" else "TrainJob"]["metadata"]["name"]
    assert policy["podSelector"] == {"matchLabels": {label: owner}}


# --- systemd

def settings() -> dict[str, str]:
    text = (LAUNCH / "systemd/trainer.service").read_text().replace("\\\n", "")
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line[:30] and
                not line.startswith("#"))


def test_the_unit_restarts_only_if_a_restart_can_help():
    unit = settings()

    assert unit["Restart"] == "on-failure"
    assert unit["RestartPreventExitStatus"].split() == [str(code) for code in NEVER_AGAIN]
    assert unit["SuccessExitStatus"] == str(EXIT_STOPPED)
    assert (unit["KillSignal"], unit["KillMode"]) == ("SIGTERM", "mixed")
    assert float(unit["TimeoutStopSec"]) > GRACE_S
    assert {unit[name] for name in ("NoNewPrivileges", "PrivateTmp")} == {"yes"}
    assert (unit["ProtectSystem"], unit["UMask"]) == ("full", "0027")
    words = unit["ExecStart"].split()
    assert words[1:3] == ["-m", "launch"]
    assert dataclasses.replace(options.parse_options(words[3:]),
                               nproc_per_node=1) == options.Options(
        trainer_argv=("--run-dir", "runs/mine"))


# --- the wheel

def test_the_files_are_part_of_the_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["launch"]

    packed = {path for pattern in patterns for path in LAUNCH.glob(pattern)}
    assert packed == {path for path in LAUNCH.rglob("*") if path.is_file()
                      and path.suffix not in (".py", ".pyc")}
    assert len(packed) == 6


def test_the_tested_versions_are_within_the_ranges_and_complete():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {(found := Requirement(text)).name: found.specifier
              for text in project["dependencies"]}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines()
             if not line.startswith("#")]

    tested = {name: version for name, version in (line.split("==") for line in lines)}
    assert sorted(ranges) == sorted(tested) == list(tested)
    for name, version in tested.items():
        assert version in ranges[name], name


def test_the_image_file_can_be_built_of_the_checkout_and_fits_the_jobs():
    text = (LAUNCH / "kubernetes/Dockerfile").read_text()
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    found = [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]
    copied = [name for kind, rest in found if kind == "COPY" for name in rest.split()[:-1]]
    containers = [container for _, container in job_specs().values()]

    assert {"trainer", "launch", "pyproject.toml", "constraints.txt"} < set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    (image,) = re.findall(r"docker build -t (\S+)", text)
    assert {container["image"].partition(":")[0] for container in containers} == {image}

    names = [name for name, _ in found]
    first = names.index("FROM")
    assert {*names} == {"ARG", "FROM", "RUN", "ENV", "COPY", "WORKDIR", "USER",
                        "ENTRYPOINT", "CMD"}
    assert {*names[:first]} == {"ARG"}, "only ARG may come before FROM"
    known = set[str]()
    for number, (name, rest) in enumerate(found):
        # An ARG of before FROM is known to FROM alone.
        known = set() if number == first + 1 else known
        assert set(re.findall(r"\$\{?([A-Z_]+)", rest)) <= known, rest
        if name in ("ARG", "ENV"):
            known |= set(re.findall(r"([A-Z_]+)=", rest))
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
    (base,) = (rest for name, rest in found[:first] if rest.startswith("BASE="))
    assert re.fullmatch(r"BASE=[a-z]+:[\w.-]+", base), "no host"

    entry = json.loads(dict(found)["ENTRYPOINT"])
    assert entry == ["python", "-m", "launch"]
    assert all(container["command"] == entry for container in containers)
    shown = subprocess.run([sys.executable, *entry[1:], *json.loads(dict(found)["CMD"])], cwd=ROOT,
                           capture_output=True, text=True, check=True)
    assert "--nproc-per-node" in shown.stdout
