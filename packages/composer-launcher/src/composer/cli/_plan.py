"""The command line of the launcher and the environment variables with defaults, checked before anything starts."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

_LOOPBACK = "127.0.0.1"
_PLACEHOLDERS = ("rank", "local_rank", "world_size", "node_rank", "local_world_size")


@dataclass(frozen=True)
class Plan:
    """The processes to start on this node.

    Attributes:
        command: The program and its arguments, before variables are expanded.
        nproc: Processes on this node.
        world_size: Processes on all nodes.
        base_rank: The rank of the first process of this node.
        node_rank: The index of this node.
        master_addr: The host of rank 0.
        master_port: The rendezvous port; 0: any free port.
        stdout: File name pattern for the ranks' stdout. None: a temporary folder.
        stderr: File name pattern for the ranks' stderr. None: a temporary folder.
        captures_first: Write the output of local rank 0 to files too.
        verbose: Show the output of all ranks.
        shutdown_timeout: Seconds that ranks have to exit after SIGTERM or Ctrl-C.
        store: Host and port of the launcher's store; "": there is none.
        replicas: Replica groups of `nproc` processes each; 0: the processes train without them.
        max_restarts: How often each group is started again.
        gpus: The GPUs of all groups, in the words of `CUDA_VISIBLE_DEVICES`; (): there are none.
    """

    command: tuple[str, ...]
    nproc: int
    world_size: int
    base_rank: int
    node_rank: int
    master_addr: str
    master_port: int
    stdout: str | None
    stderr: str | None
    captures_first: bool
    verbose: bool
    shutdown_timeout: float
    store: str = ""
    replicas: int = 0
    max_restarts: int = 0
    gpus: tuple[str, ...] = ()

    def variables(self, local_rank: int, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables to set for a process of this node.

        Args:
            local_rank: The index of the process on this node.
            environment: The environment of the launcher.
        """
        values = {
            "RANK": self.base_rank + local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.nproc,
            "NODE_RANK": self.node_rank,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            "PYTHONUNBUFFERED": 1,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "COMPOSER_LAUNCHER_STORE": self.store,
        }
        if self.limits_threads(environment):
            values["OMP_NUM_THREADS"] = 1
        return {name: str(value) for name, value in values.items()}

    def limits_threads(self, environment: Mapping[str, str]) -> bool:
        """Return True if each process gets one thread: several that use all cores would slow each other down."""
        return self.nproc > 1 and "OMP_NUM_THREADS" not in environment

    def path(self, pattern: str, local_rank: int) -> str:
        """Return the file name of a rank's output."""
        return pattern.format(
            rank=self.base_rank + local_rank,
            local_rank=local_rank,
            world_size=self.world_size,
            node_rank=self.node_rank,
            local_world_size=self.nproc,
        )

    def expanded(self, local_rank: int, environment: Mapping[str, str]) -> list[str]:
        """Return the command with the rank's environment variables and `~` expanded."""
        known = {**environment, **self.variables(local_rank, environment)}
        return [os.path.expanduser(_expand(part, known)) for part in self.command]


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand variables as `os.path.expandvars` does, from a given mapping; unknown ones are unchanged."""
    return re.sub(r"\$(?:(\w+)|\{([^}]*)\})", lambda m: variables.get(m[1] or m[2], m[0]), text)


def parse_plan(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> Plan:
    """Parse the command line.

    Args:
        arguments: The command line without the command's name. None: that of this process.
        environment: The environment, with defaults.

    Raises:
        SystemExit: With status 2 and a message on stderr if it is invalid; 0 after `--help` and `--version`.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return _plan(given, environment)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "composer",
        description="Start a program in several processes that train one model, and end all of them if one fails.",
        epilog="Local rank 0 writes to the console. The output of the others goes to files; --verbose shows it too, "
        "with a prefix such as `[rank1]: `. If a rank fails, the others are ended within 10 seconds, and the last "
        "lines on stderr name that rank, its exit code or signal, and the end of its stderr if that is in a file.",
    )
    add = parser.add_argument
    add("-n", "--nproc", type=int, help="processes on this node; default: LOCAL_WORLD_SIZE, else the number of GPUs")
    pattern = "a file per rank, appended to, for the %s of all but local rank 0. May contain " + ", ".join(
        f"{{{name}}}" for name in _PLACEHOLDERS
    )
    default = ". Default: a temporary folder, which is preserved if a rank fails"
    add("--stdout", metavar="FORMAT", help=pattern % "stdout" + default)
    add("--stderr", metavar="FORMAT", help=pattern % "stderr" + default)
    add("-v", "--verbose", action="store_true", help="show all ranks and their commands on the console")
    add("-m", "--module_mode", action="store_true", help="run a module, as `python -m` does")
    add("-c", "--command_mode", action="store_true", help="run a command directly, without Python")
    add("--world_size", type=int, help="processes on all nodes; default: WORLD_SIZE, else --nproc")
    add("--base_rank", type=int, help="rank of this node's first process; default: BASE_RANK, else from --node_rank")
    add("--node_rank", type=int, help="the index of this node; default: NODE_RANK, else from --base_rank")
    add("--master_addr", help="the host of rank 0, needed with several nodes; default: MASTER_ADDR")
    add("--master_port", type=int, help="a free port there, needed with several nodes; default: MASTER_PORT")
    add(
        "--shutdown_timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time that ranks have to save and exit after SIGTERM or Ctrl-C, which are forwarded to them; "
        "another Ctrl-C kills them immediately. Default: 30",
    )
    add(
        "--replicas",
        type=int,
        metavar="N",
        help="start N replica groups of --nproc processes on this machine, for composer-torchft: when one fails, the "
        "others go on and it is started again. Also starts torchft's Lighthouse, unless TORCHFT_LIGHTHOUSE is set",
    )
    add("--max_restarts", type=int, default=10, metavar="N", help="for each replica group. Default: 10")
    add("--version", action="version", version=f"Composer {version('composer-launcher')}")
    add("training_script", help="the script, module or command")
    add("training_script_args", nargs=argparse.REMAINDER, help="its arguments; $RANK and the like differ by rank")
    return parser


def _plan(given: argparse.Namespace, environment: Mapping[str, str]) -> Plan:
    if not 0 <= given.shutdown_timeout < float("inf"):
        raise ValueError(f"`--shutdown_timeout` must be a number of seconds, got {given.shutdown_timeout!r}. Use 30.")
    nproc = _nproc(given.nproc, environment)
    gpus: tuple[str, ...] = ()
    if given.replicas is not None:
        nproc, gpus = _check_replicas(given, nproc, environment)
        environment = without_nodes(environment)
    world_size = _world_size(given.world_size, nproc, environment)
    single = world_size == nproc
    addr = given.master_addr or environment.get("MASTER_ADDR")
    port = _number("master_port", given.master_port, environment)
    ranks = _ranks(given, environment, nproc, world_size)
    if single:
        addr, port = addr or _LOOPBACK, port or 0
    missing = [f"`--{name}`" for name, value in (("master_addr", addr), ("master_port", port)) if value is None]
    if missing:
        raise ValueError(
            f"with several nodes {' and '.join(missing)} must be given: the host of rank 0, and a free port there that "
            f"all nodes can reach. Pass the same on every node."
        )
    assert addr is not None
    assert port is not None
    if not 0 <= port <= 65535 or (port == 0 and not single):
        raise ValueError(f"`--master_port` must be a port, got {port}. Use for example 29500.")
    stdout, stderr, captures_first = _outputs(given, environment)
    plan = Plan(
        command=_command(given),
        nproc=nproc,
        world_size=world_size,
        base_rank=ranks[0],
        node_rank=ranks[1],
        master_addr=addr,
        master_port=port,
        stdout=stdout,
        stderr=stderr,
        captures_first=captures_first,
        verbose=given.verbose,
        shutdown_timeout=given.shutdown_timeout,
        replicas=given.replicas or 0,
        max_restarts=given.max_restarts,
        gpus=gpus,
    )
    _check(plan, given, environment)
    return plan


def _number(name: str, given: int | None, environment: Mapping[str, str]) -> int | None:
    """Return an argument, or else the value of the environment variable of the same name."""
    text = environment.get(name.upper())
    if given is not None or text is None:
        return given
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable `{name.upper()}` must be an integer, got {text!r}.") from None


def without_nodes(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a job of several nodes; each replica group is a job of one."""
    names = ("WORLD_SIZE", "BASE_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in environment.items() if name not in names}


def _nproc(given: int | None, environment: Mapping[str, str]) -> int:
    nproc = given if given is not None else _number("local_world_size", None, environment)
    if nproc is None:
        import torch

        nproc = max(1, torch.cuda.device_count())
    if nproc < 1:
        raise ValueError(f"`--nproc` must be at least 1, got {nproc}. Pass `-n` with the processes to start here.")
    return nproc


def _check_replicas(
    given: argparse.Namespace, nproc: int, environment: Mapping[str, str]
) -> tuple[int, tuple[str, ...]]:
    """Return the processes of each replica group, and the GPUs of all groups."""
    import torch

    if given.replicas < 1 or given.max_restarts < 0:
        raise ValueError(
            f"`--replicas` must be at least 1 and `--max_restarts` at least 0, got {given.replicas} and "
            f"{given.max_restarts}."
        )
    others = ("world_size", "base_rank", "node_rank", "master_addr", "master_port", "stdout", "stderr")
    if wrong := [f"`--{name}`" for name in others if getattr(given, name) is not None]:
        raise ValueError(
            f"`--replicas` starts groups on this machine alone, without {', '.join(wrong)}. Start each group by its "
            f"own `composer`, with NUM_REPLICA_GROUPS, REPLICA_GROUP_ID and TORCHFT_LIGHTHOUSE."
        )
    count = torch.cuda.device_count()
    if given.nproc is None:
        nproc = max(1, count // given.replicas)
    if 0 < count < given.replicas * nproc:
        raise ValueError(
            f"`--replicas` times `--nproc` must be at most the number of GPUs, {count}, got {given.replicas} times "
            f"{nproc}."
        )
    named = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return nproc, tuple(named[:count] or map(str, range(count)))


def _world_size(given: int | None, nproc: int, environment: Mapping[str, str]) -> int:
    world_size = given
    # WORLD_SIZE = LOCAL_WORLD_SIZE describes the single-node job that the launcher runs in, not the one it starts.
    if given is None and environment.get("WORLD_SIZE") != environment.get("LOCAL_WORLD_SIZE"):
        world_size = _number("world_size", None, environment)
    if world_size is None:
        return nproc
    if world_size < nproc:
        raise ValueError(
            f"`--world_size` must be at least `--nproc` ({nproc}), got {world_size}. It counts the processes of all "
            f"nodes; leave it out on a single node, and check the environment variable `WORLD_SIZE`."
        )
    return world_size


def _ranks(given: argparse.Namespace, environment: Mapping[str, str], nproc: int, world_size: int) -> tuple[int, int]:
    """Return the rank of this node's first process, and the index of this node."""
    base, node = (_number(name, getattr(given, name), environment) for name in ("base_rank", "node_rank"))
    if world_size == nproc:
        if base or node:
            raise ValueError(
                f"on a single node `--base_rank` and `--node_rank` must be 0, got {base or 0} and {node or 0}. Pass "
                f"`--world_size` if there are more nodes."
            )
        return 0, 0
    if base is None and node is None:
        raise ValueError("with several nodes `--node_rank` or `--base_rank` must be given. Count the nodes from 0.")
    if base is None or node is None:
        if world_size % nproc:
            raise ValueError(
                f"`--base_rank` and `--node_rank` must both be given, since `--world_size` ({world_size}) is not a "
                f"multiple of `--nproc` ({nproc}): the nodes have different numbers of processes."
            )
        if base is not None and base % nproc:
            raise ValueError(
                f"`--base_rank` must be a multiple of `--nproc` ({nproc}), got {base}. Pass `--node_rank` too if the "
                f"nodes have different numbers of processes."
            )
        base, node = (node or 0) * nproc if base is None else base, (base or 0) // nproc if node is None else node
    if base < 0 or node < 0:
        raise ValueError(f"`--base_rank` and `--node_rank` must not be negative, got {base} and {node}.")
    if base + nproc > world_size:
        raise ValueError(
            f"`--base_rank` + `--nproc` must be at most `--world_size` ({world_size}), got {base} + {nproc}. Check "
            f"`--node_rank`, which counts from 0."
        )
    return base, node


def _outputs(given: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str | None, str | None, bool]:
    """Return the patterns for stdout and stderr, and True if they apply to local rank 0 (on MosaicML's platform)."""
    folder, prefix = environment.get("MOSAICML_LOG_DIR"), environment.get("MOSAICML_GPU_LOG_FILE_PREFIX")
    on_platform = environment.get("MOSAICML_PLATFORM", "").lower() in ("1", "true", "yes")
    if on_platform and folder and prefix and given.stdout is None and given.stderr is None:
        pattern = os.path.join(folder, prefix).replace("{", "{{").replace("}", "}}") + "{local_rank}.txt"
        return pattern, pattern, True
    return given.stdout, given.stderr, False


def _command(given: argparse.Namespace) -> tuple[str, ...]:
    if given.module_mode and given.command_mode:
        raise ValueError("`--module_mode` and `--command_mode` cannot be combined. Pass one of them.")
    program = (given.training_script, *given.training_script_args)
    if given.command_mode:
        return program
    return (sys.executable, "-m", *program) if given.module_mode else (sys.executable, *program)


def _check(plan: Plan, given: argparse.Namespace, environment: Mapping[str, str]) -> None:
    for name, pattern in (("stdout", plan.stdout), ("stderr", plan.stderr)):
        try:
            _ = pattern and plan.path(pattern, 0)
        except (KeyError, IndexError, ValueError):
            raise ValueError(
                f"`--{name}` may only contain the placeholders {', '.join(_PLACEHOLDERS)}, got {pattern!r}. Use for "
                f"example 'rank{{rank}}.txt'."
            ) from None
    program = plan.expanded(0, environment)[0 if given.command_mode else 1]
    if given.command_mode and shutil.which(program) is None:
        raise ValueError(f"the command {program!r} was not found. Check its name and `PATH`.")
    if not (given.command_mode or given.module_mode or os.path.exists(program)):
        raise ValueError(
            f"there is no script {program!r} in {os.getcwd()}. Pass `-m` before it if it is a module, or `-c` if it is "
            f"a command."
        )
