"""`deepspeed` as `make train` starts it: an operator's signals reach the ranks, and the ranks alone.

    python -m tools.launch --num_gpus 2 train_stage2.py --config FILE

On SIGTERM the `deepspeed` command itself ends and leaves its ranks running; on Ctrl-C its inner launcher gives them 30
seconds and then kills them, checkpoint or not (DeepSpeed 0.19). So it runs in a session of its own here; SIGTERM,
SIGINT and SIGHUP go to the ranks as SIGTERM; and their exit status comes back.
"""

import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import psutil


def main() -> None:
    launcher = Path(sys.executable).parent / "deepspeed"
    process = subprocess.Popen([launcher, *sys.argv[1:]], start_new_session=True)

    def pass_on(number: int, frame: FrameType | None) -> None:
        for target in ranks_below(process.pid) or family_of(process.pid):
            target.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    status = process.wait()
    sys.exit(status if status >= 0 else 128 - status)


def ranks_below(pid: int) -> list[psutil.Process]:
    """The ranks, which the launcher marks by `--local_rank`; none before they have started."""
    return [process for process in family_of(pid) if _is_rank(process)]


def family_of(pid: int) -> list[psutil.Process]:
    """The process and all below it that still run."""
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
