"""The files of the guide for clusters run here: with stand-ins for SLURM and Kubernetes, and on Ray itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.readme_blocks import blocks
from tools.workspace import ROOT

yaml = pytest.importorskip("yaml")
kubeflow = pytest.importorskip("kubeflow.training.api_client", reason="`nox -s clusters` has what is needed here")
BLOCKS = blocks((ROOT / "tools" / "site" / "guides" / "clusters.md").read_text(encoding="utf-8"))
SCRIPTS = [block.code for block in BLOCKS if block.language == "shell"]
MANIFESTS = [each for block in BLOCKS if block.language == "yaml" for each in yaml.safe_load_all(block.code)]
[RAY_TRAIN] = [block.code for block in BLOCKS if block.language == "py"]
MODELS = {"Service": "V1Service", "Job": "V1Job", "PyTorchJob": "KubeflowOrgV1PyTorchJob"}
SAVED, HELD, BATCHES = 8, 9, 24  # of `machine_run.py`: the last checkpoint before the interruption, and the last batch
SECONDS = 300.0  # a busy machine starts a Ray cluster and four workers
# What `train.py` is here: it waits after a batch, and tells the process of each rank.
TRAIN = """
import os
import sys
from pathlib import Path

sys.path.insert(0, {tests!r})
from machine_run import train

folder = Path({folder!r})
(folder / f"pid-rank{{os.environ['RANK']}}").write_text(str(os.getpid()))
train(folder)
"""
# It tells what a rank is given, without torch, so that sixteen of them start at once.
TELL = """
import os

names = ("WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
with open(f"rank{os.environ['RANK']}.txt", "w") as file:
    file.write(" ".join(os.environ[name] for name in names))
"""
# Nodes that are groups of processes. As SLURM does, `srun` kills what a task leaves behind, and ends with the highest
# exit status of its tasks.
SRUN = """#!/bin/bash
set -m
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
    SLURM_NODEID=$node "$@" &
    echo $! >"task$node"
done
highest=0
for node in 0 1; do
    task=$(cat "task$node")
    wait "$task"
    status=$?
    kill -KILL -- "-$task" 2>/dev/null
    highest=$((status > highest ? status : highest))
done
exit $highest
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf '127.0.0.1\\n127.0.0.1\\n'; else echo "$@" >>requests; fi
"""


class Launches:
    """The launches of a run, in its folder. They cannot outlive the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        (folder / "train.py").write_text(TRAIN.format(tests=str(Path(__file__).parent), folder=str(folder)))
        (folder / f"hold-{HELD}").touch()

    def start(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join((str(self.folder), str(Path(sys.executable).parent), os.environ["PATH"]))
        # No variable of a launcher around the tests must reach those that are started.
        ours = {name: value for name, value in os.environ.items() if not re.search("RANK|WORLD_SIZE|MASTER_", name)}
        with open(self.folder / "log.txt", "ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**ours, "PATH": path, "OMP_NUM_THREADS": "1", **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def wait_until_held(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not all((self.folder / f"batch{HELD}-rank{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline, self.log
            assert all(process.poll() is None for process in self._started), self.log
            time.sleep(0.05)

    def release(self) -> None:
        (self.folder / f"hold-{HELD}").unlink()

    def times(self) -> dict[int, int]:
        """Return how often rank 0 trained each batch, in all launches."""
        return {batch: len((self.folder / f"batch{batch}-rank0").read_text()) for batch in range(1, BATCHES + 1)}

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                for group in (process.pid, *(int(file.read_text()) for file in self.folder.glob("task*"))):
                    with suppress(ProcessLookupError):
                        os.killpg(group, signal.SIGKILL)
                process.wait()


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    run = Launches(tmp_path)
    yield run
    run.end()


def free_port(first: int, last: int) -> int:
    for port in range(first + os.getpid() % 1000, last):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("all ports are in use")


class TestSlurm:
    @pytest.fixture
    def sbatch(self, launches: Launches) -> Callable[..., subprocess.Popen[bytes]]:
        """A function that starts the script of the guide with what SLURM sets."""

        def submit(restarts: int, srun: str = SRUN) -> subprocess.Popen[bytes]:
            for name, text in {"train.sbatch": SCRIPTS[0], "srun": srun, "scontrol": SCONTROL}.items():
                (launches.folder / name).write_text(text)
                (launches.folder / name).chmod(0o755)
            # A job that was never requeued has no count.
            count = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
            job, sizes = str(free_port(20000, 29999)), {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}
            sizes |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": job}
            return launches.start("./train.sbatch", **sizes, **count)

        return submit

    def requests(self, launches: Launches) -> str:
        file = launches.folder / "requests"
        return file.read_text() if file.exists() else ""

    def test_a_preempted_job_is_requeued_and_trains_no_batch_twice(
        self, launches: Launches, sbatch: Callable[..., subprocess.Popen[bytes]]
    ) -> None:
        job = sbatch(restarts=0)
        launches.wait_until_held()
        [name] = re.findall(r"^#SBATCH --signal=(\w+)@\d+$", SCRIPTS[0], re.MULTILINE)  # `B:` would be the script alone
        for node in (0, 1):
            os.kill(int((launches.folder / f"task{node}").read_text()), getattr(signal, f"SIG{name}"))
        launches.release()

        assert 128 + signal.SIGTERM == job.wait(SECONDS), launches.log
        assert re.fullmatch(r"requeue \d+\n", self.requests(launches))

        assert 0 == sbatch(restarts=1).wait(SECONDS), launches.log
        assert 1 == self.requests(launches).count("requeue")
        assert set(launches.times().values()) == {1}

    @pytest.mark.parametrize(
        ("status", "restarts", "requeued"), [(0, 0, False), (143, 99, True), (1, 0, True), (1, 4, True), (1, 5, False)]
    )
    def test_a_failing_job_is_not_requeued_forever(
        self,
        launches: Launches,
        sbatch: Callable[..., subprocess.Popen[bytes]],
        status: int,
        restarts: int,
        requeued: bool,
    ) -> None:
        assert status == sbatch(restarts, srun=f"#!/bin/bash\nexit {status}\n").wait(SECONDS), launches.log
        assert requeued == ("requeue" in self.requests(launches))


class TestKubernetes:
    @pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
    def test_a_manifest_has_the_fields_of_the_api(self, manifest: dict[str, Any]) -> None:
        """A field that is unknown, or in the wrong place, does not come back from the model."""
        api = kubeflow.ApiClient()
        model = api.deserialize(SimpleNamespace(data=json.dumps(manifest)), MODELS[manifest["kind"]])

        assert manifest == api.sanitize_for_serialization(model)

    def test_the_service_names_the_pods_of_the_job(self) -> None:
        service, job, _ = MANIFESTS
        name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]

        assert service["spec"]["selector"] == {"job-name": name}
        assert service["metadata"]["name"] == pod["subdomain"]
        assert f"--master_addr {name}-0.{pod['subdomain']} " in pod["containers"][0]["args"][0]

    @pytest.mark.parametrize("manifest", MANIFESTS[1:], ids=lambda manifest: manifest["kind"])
    def test_the_commands_of_both_pods_start_all_ranks(self, launches: Launches, manifest: dict[str, Any]) -> None:
        (launches.folder / "train.py").write_text(TELL)
        port = str(free_port(30000, 32000))
        if manifest["kind"] == "Job":
            templates = 2 * [manifest["spec"]["template"]]
            index_name, address, given = "JOB_COMPLETION_INDEX", "train-0.train", {}
        else:  # WORLD_SIZE counts pods in some versions of the operator, and processes in others
            replicas = manifest["spec"]["pytorchReplicaSpecs"]
            templates = [replicas[kind]["template"] for kind in ("Master", "Worker")]
            index_name, address = "RANK", "train-master-0"
            given = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": "2"}
        pods = []
        for index, template in enumerate(templates):
            [container] = template["spec"]["containers"]
            [text] = container["args"]
            text = text.replace("29500", port)  # another session may use it
            pods.append(launches.start(*container["command"], text, **given, **{index_name: str(index)}))
        assert [0, 0] == [pod.wait(SECONDS) for pod in pods], launches.log

        ranks = {file.stem: file.read_text() for file in launches.folder.glob("rank*.txt")}
        assert ranks == {f"rank{rank}": f"16 {rank // 8} {rank % 8} {address} {port}" for rank in range(16)}


def test_ray_starts_the_workers_again_after_one_was_killed(launches: Launches) -> None:
    program = RAY_TRAIN
    smaller = {"num_workers=16, use_gpu=True": "num_workers=2, use_gpu=False", "/shared": str(launches.folder)}
    for there, here in smaller.items():
        assert program.count(there) == 1
        program = program.replace(there, here)
    (launches.folder / "ray_train.py").write_text(program)
    sockets = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the path of a socket must be short
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": sockets}
    driver = launches.start(sys.executable, "ray_train.py", str(launches.folder / "train.py"), **quiet)
    try:
        launches.wait_until_held()
        os.kill(int((launches.folder / "pid-rank1").read_text()), signal.SIGKILL)
        launches.release()

        assert 0 == driver.wait(SECONDS), launches.log
        assert {HELD} == {batch for batch, times in launches.times().items() if times == 2}, launches.log
        assert 1 == launches.times()[SAVED]
    finally:
        driver.terminate()  # which ends Ray's processes, too
        driver.wait()
        shutil.rmtree(sockets, ignore_errors=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.partition("\n")[0])
def test_shellcheck_finds_nothing_in_the_scripts(script: str) -> None:
    # The variables in single quotes are those of the tasks.
    command = [str(Path(sys.executable).with_name("shellcheck")), "--shell=bash", "--exclude=SC2016", "-"]
    found = subprocess.run(command, input=script, capture_output=True, text=True, check=False)

    assert 0 == found.returncode, found.stdout
