"""Run `deepspeed` so that signals reach the ranks and only the ranks; `make train` and `make grpo` use it.

    python -m tools.launch --num_gpus 2 train_stage2.py --config FILE
    python -m tools.launch --hostfile hosts train_stage2.py --config FILE

On SIGTERM the `deepspeed` command itself ends and leaves its ranks running; on Ctrl-C its inner launcher gives them 30
seconds and then kills them, whether or not they have saved a checkpoint (DeepSpeed 0.19). Therefore it runs in a
session of its own, SIGTERM, SIGINT and SIGHUP are forwarded to the ranks as SIGTERM, and their exit status is returned.
If a rank is killed and takes the others with it before they can report, this program reports the state of the run.
Refused before anything starts: a rendezvous port that is already in use, a hostfile that does not exist, with which
DeepSpeed would train on this machine alone, and GPUs that this machine lacks.

With a hostfile the ranks of all nodes get the variables of `FORWARDED`; DeepSpeed by itself forwards few of them.
"""

import argparse
import contextlib
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil

from utils.dist import COMMAND_NAME, SECRET_NAME, check_master_port
from utils.output import outlive_readers

MASTER_PORT, HOSTFILE = 29500, "/job/hostfile"  # DeepSpeed's defaults
SSH_FAILED = 255  # ssh's own status, which pdsh passes on
# Beginnings of names. DeepSpeed adds PYTHON*, and NCCL* where it runs on GPUs (launcher/runner.py, EXPORT_ENVS).
FORWARDED = (
    *("ROLLOUT_SERVER_TOKEN", SECRET_NAME, COMMAND_NAME),
    *("GLOO_", "NCCL_", "UCX_", "OMP_", "DS_ACCELERATOR", "TORCH_", "PYTORCH_", "CUDA_HOME", "VLLM_"),
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "PATH", "LD_LIBRARY_PATH"),
    *("WANDB_", "MLFLOW_", "TRACKIO_"),  # DeepSpeed would write MLFLOW* in clear
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"),
)
# In names: such values never stand on a command line. A URI, or a proxy's, may hold a password.
SECRET = re.compile("TOKEN(?!IZERS)|KEY|SECRET|PASSWORD|URI|(?i:https?|all)_(?i:proxy)")
PLAIN = re.compile(r"[\w@%+=:,./ -]*")  # values that a shell leaves as they are, in double quotes
# The slots that DeepSpeed finds without a hostfile, counted as it does (launcher/runner.py, main): on CPU, NUMA nodes.
COUNT_SLOTS = """
import os
from deepspeed.accelerator import get_accelerator
accelerator = get_accelerator()
os.environ.pop(accelerator.visible_devices_envs()[0], None)
print()
print(accelerator.device_name(), accelerator.device_count())
"""


def main() -> None:
    arguments = sys.argv[1:]
    outlive_readers()
    try:
        check_places_of(arguments)
        check_port_of(arguments)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    with environment_for(arguments) as environment:
        status = run([*deepspeed_command(), *arguments], environment)
    if status == SSH_FAILED and options_of(arguments).has_hosts:
        told = "a node could not be reached, or the connection to it broke: see the lines of ssh above"
        print(told, file=sys.stderr, flush=True)
    elif 256 - status in set(signal.Signals):  # a signal ended one of the ranks
        print("\n".join(killed_rank_message(256 - status, arguments)), file=sys.stderr, flush=True)
    sys.exit(status if status >= 0 else 128 - status)


def deepspeed_command() -> list[str]:
    """DeepSpeed's launcher in this environment. Its own first line cannot name a Python in a path with a space."""
    return [sys.executable, str(Path(sys.executable).parent / "deepspeed")]


def run(command: list[str], environment: dict[str, str]) -> int:
    """Run `deepspeed` to its end and return its exit status; signals to this program ask its ranks to stop."""
    process = subprocess.Popen(command, start_new_session=True, env=environment)

    def forward(number: int, frame: FrameType | None) -> None:
        ranks = ranks_of(process.pid)
        if ranks or not stop_other_nodes(process.pid, command):
            for target in ranks or process_tree(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    target.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, forward)
    return process.wait()


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The options of DeepSpeed and of the script that matter here, as those two read them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--master_port", type=int, default=MASTER_PORT)
    parser.add_argument("-H", "--hostfile")
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_gpus", type=int, default=0)
    parser.add_argument("--no_ssh", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--config")
    options = parser.parse_known_args(arguments)[0]
    options.has_hosts = Path(options.hostfile or HOSTFILE).is_file()
    return options


@contextlib.contextmanager
def environment_for(arguments: list[str]) -> Iterator[dict[str, str]]:
    """The environment of `deepspeed`. With a hostfile, DS_ENV_FILE names a file of the variables to forward, mode 0600.

    It holds a new secret, by which the ranks know each other (`Ranks.gather`), unless each node is launched by hand.
    DeepSpeed writes `export NAME="VALUE"` on the command line that pdsh and ssh carry to each node, where all users see
    it, and into its log. Of a secret, that is a `$(cat FILE)`; the file, mode 0600 in `training.output_dir`, which all
    nodes share, is deleted at the end. What stands in the user's own `.deepspeed_env` comes last and wins.
    """
    options, environment = options_of(arguments), dict(os.environ)
    environment[COMMAND_NAME] = launched_as(arguments)
    if not options.no_ssh and (options.config or not options.has_hosts):  # other nodes read it in the run directory
        environment.setdefault(SECRET_NAME, secrets.token_hex(32))
    if options.no_ssh or not options.has_hosts:
        yield environment
        return
    with contextlib.ExitStack() as files:

        def write(text: str, folder: Path | None = None) -> str:
            file = files.enter_context(tempfile.NamedTemporaryFile("w", dir=folder, prefix=".launch-"))  # mode 0600
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # the other nodes of a network file system see it
            return file.name

        run_dir, lines = run_dir_of(options.config), []
        for name, value in sorted(environment.items()):
            if name.startswith(FORWARDED):
                if SECRET.search(name) or not PLAIN.fullmatch(value):
                    value = f"$(cat {shlex.quote(write(value, run_dir))})"
                lines.append(f"{name}={value}")
        environment["DS_ENV_FILE"] = write("\n".join(lines + own_lines()) + "\n")
        yield environment


def own_lines() -> list[str]:
    """Lines of the files that DeepSpeed would read without us."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    paths = dict.fromkeys(Path(folder, name) for folder in (Path.home(), "."))
    lines = [line for path in paths if path.is_file() for line in path.read_text().splitlines()]
    return [line for line in lines if "=" in line]


def run_dir_of(config: str | None) -> Path | None:
    """The run directory, made if it is missing; exit status 2 with all problems of a config that cannot be used."""
    from utils.config.load import load_config_or_exit

    if config is None:
        return None
    run_dir = Path(load_config_or_exit(config).training.output_dir).absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def stop_other_nodes(pid: int, command: list[str]) -> bool:
    """Have the `pdsh` that `deepspeed` started for several nodes send SIGTERM to their ranks; False if there is none.

    Ranks that have not started yet are ended with their launcher.
    """
    script = next((number for number, word in enumerate(command) if word.endswith(".py")), len(command) - 1)
    name, options = command[script], re.escape("".join(f" {word}" for word in command[script + 1 :]))
    # The brackets keep the patterns from matching the shell that runs this very command.
    rank = shlex.quote(f"[{name[0]}]{re.escape(name[1:])} --local_rank=[0-9]+{options}")
    launcher = shlex.quote(f"[d]eepspeed.launcher.launch .*{re.escape(name)}{options}")
    for process in process_tree(pid):
        with contextlib.suppress(psutil.Error, ValueError):
            words = process.cmdline()
            if "pdsh" in (Path(word).name for word in words[:2]):  # the second where it is a script
                on_all_nodes = words[: words.index("-w") + 2]
                remote = f"pkill -TERM -f -- {rank} || pkill -TERM -f -- {launcher}"
                subprocess.Popen([*on_all_nodes, remote], env=process.environ())
                return True
    return False


def launched_as(arguments: list[str]) -> str:
    """The command that starts the same run again."""
    return shlex.join(["python", "-m", "tools.launch", *arguments])


def _check_hostfile(path: Path) -> None:
    lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(path.read_text().splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        raise ValueError(f"--hostfile {path}: names no host; write one a line, as `node-a slots=4`")
    seen = set[str]()
    for number, line in lines:
        if not re.fullmatch(r"\S+\s+slots=\d+", line):
            raise ValueError(f"--hostfile {path}:{number}: {line!r} must look like `node-a slots=4`")
        if (host := line.split()[0]) in seen:
            raise ValueError(f"--hostfile {path}:{number}: {host} is listed before; give it one line")
        seen.add(host)


def check_places_of(arguments: list[str]) -> None:
    """Raise ValueError if `--hostfile` names no file, `--include` a GPU that this machine lacks, or the GPUs are others
    than `CUDA_VISIBLE_DEVICES` leaves to this shell: DeepSpeed goes by the machine's numbers then.

    Args:
        arguments: of this program.
    """
    options = options_of(arguments)
    if options.hostfile is not None and not options.has_hosts:
        raise ValueError(f"--hostfile {options.hostfile}: no such file; correct HOSTFILE=")
    if options.hostfile is not None:
        _check_hostfile(Path(options.hostfile))
    if options.has_hosts:
        return
    visible = [number.strip() for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number.strip()]
    if visible and not options.include:
        _check_counted_gpus(options, visible)
    here, _, given = options.include.partition(":")
    if here != "localhost" or not given:
        return
    if not re.fullmatch(r"\d+(,\d+)*", given):
        raise ValueError(f"GPUS={given}: give numbers with commas and no spaces, as in GPUS=0,1")
    if (found := _slots()) is None:
        return  # DeepSpeed says why
    kind, slots = found
    if max(map(int, given.split(","))) >= int(slots):
        few = ["no GPU that DeepSpeed finds; to train on CPU give RANKS=2 instead", "1 GPU (0)"]
        number = 0 if kind == "cpu" else int(slots)
        has = few[number] if number < 2 else f"{number} GPUs (0 to {number - 1})"
        raise ValueError(f"GPUS={given}: this machine has {has}")
    if kind == "cuda" and visible and not set(given.split(",")) <= set(visible):
        # A scheduler gave the others to somebody else.
        rule = "GPUS= counts all GPUs of the machine, and some of these are not for this shell; choose among them"
        raise ValueError(f"GPUS={given}, but CUDA_VISIBLE_DEVICES={','.join(visible)}: {rule}, or unset the variable")


def _check_counted_gpus(options: argparse.Namespace, visible: list[str]) -> None:
    """Raise ValueError where `--num_gpus` or `--exclude` would take GPUs that are not for this shell."""
    if options.exclude:
        option = f"--exclude {options.exclude}"
    elif not set(map(str, range(options.num_gpus))) <= set(visible):
        option = f"--num_gpus {options.num_gpus}"
    else:
        return
    if (_slots() or [""])[0] == "cuda":
        rule = f"counts all GPUs of the machine, but CUDA_VISIBLE_DEVICES={','.join(visible)}"
        instead = ",".join(visible[: options.num_gpus or None])
        raise ValueError(f"{option} {rule}; give --include localhost:{instead}, or unset the variable")


def _slots() -> list[str] | None:
    """`cuda` or `cpu`, and the number of slots that DeepSpeed finds; None where it fails."""
    # In a process of its own: this one stays small, and opens no GPU.
    done = subprocess.run([sys.executable, "-c", COUNT_SLOTS], capture_output=True, text=True)
    return None if done.returncode else done.stdout.splitlines()[-1].split()


def check_port_of(arguments: list[str]) -> None:
    """Raise OSError if the ranks could not meet at `--master_port`. A dry run needs no port; with a hostfile rank 0 may
    be on another node, and checks it there.

    Args:
        arguments: of this program.
    """
    options = options_of(arguments)
    if not options.dry_run and not options.has_hosts:
        check_master_port(options.master_port)


def killed_rank_message(number: int, arguments: list[str]) -> list[str]:
    """Lines that say how far the run got and how to resume it, from the run directory.

    Args:
        number: of the signal.
        arguments: of this program.
    """
    # Imported late, so that the launcher stays small while the ranks run.
    from utils.config.load import ConfigError, load_config
    from utils.run.rollout_log import rollout_lines
    from utils.run.shutdown import newest_checkpoint, resume_command

    signal_name, command = signal.Signals(number).name, launched_as(arguments)
    cause = "; the kernel does this when memory runs out (see dmesg)" * (number == signal.SIGKILL)
    config = options_of(arguments).config
    try:
        run_dir = Path(load_config(config).training.output_dir)
    except (ConfigError, OSError) as error:  # it was fine when the run began
        return [f"a rank was ended by {signal_name}{cause}", f"  {command}: its config has changed since: {error}"]
    log, newest = run_dir / "rollouts.jsonl", newest_checkpoint(run_dir)
    last = deque(rollout_lines(log) if log.exists() else [], maxlen=1)
    command = resume_command(command, run_dir)
    return [
        f"run {run_dir}: a rank was ended by {signal_name}{cause}",
        *(f"  last logged step: {line['step']}, with weights {line['weight_version']}" for line in last),
        f"  newest complete checkpoint: {newest}" if newest else "  no checkpoint is complete",
        f"  {'resume from it' if newest else 'start again'} with: {command}",
    ]


def ranks_of(pid: int) -> list[psutil.Process]:
    """Return the rank processes, recognised by the launcher's `--local_rank`; none before they have started."""
    return [process for process in process_tree(pid) if _is_rank(process)]


def process_tree(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants that are still running."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _is_rank(process: psutil.Process) -> bool:
    try:
        return any(word.startswith("--local_rank=") for word in process.cmdline())
    except psutil.Error:
        return False


if __name__ == "__main__":
    main()
