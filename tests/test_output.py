"""What is printed when its reader is gone, as `tee` is after Ctrl-C."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STOPPED = """
import os, signal
from utils.run.shutdown import Stopped, StopRequest, end_with
request = StopRequest()
request.is_training = True
request.install()
os.kill(os.getpid(), signal.SIGTERM)
assert request.requested.is_set()
"""


def status_without_reader(program: str, *arguments: str) -> int:
    """Exit status of a Python program whose standard output and error nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, cwd=ROOT, stdout=writer, stderr=writer, timeout=120).returncode
    finally:
        os.close(writer)


def test_prints_go_to_nowhere_once_nobody_reads():
    prints = "[print('x' * 100_000, file=stream, flush=True) for stream in (sys.stdout, sys.stderr) * 2]"
    program = f"import sys, utils.output; utils.output.outlive_readers(); {prints}; sys.exit(3)"
    assert status_without_reader(program) == 3
    read = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert (read.returncode, len(read.stdout), len(read.stderr)) == (3, 200_002, 200_002)


def test_a_signal_whose_words_nobody_reads_still_asks_for_a_checkpoint_LRN_12():
    """LRN-12: at the signal itself, whatever is printed later."""
    assert status_without_reader(f"{STOPPED}os._exit(4)") == 4


def test_a_stopped_run_has_its_status_although_nobody_reads_its_last_words_LRN_12():
    ending = "sys.exit(end_with(Stopped('stopped by SIGTERM'), pathlib.Path('gone'), 'a.yaml', 1, None))"
    begun = "import pathlib, sys, utils.output; utils.output.outlive_readers()"
    assert status_without_reader(f"{begun}{STOPPED}{ending}") == 75


@pytest.mark.parametrize(
    ("module", "start"),
    [
        ("utils.run.program", "program.run_program('train_stage2.py', 'a', 'A', None, None)"),
        ("rollout_server", "program.main()"),
        ("tools.launch", "program.main()"),
    ],
)
def test_every_program_goes_on_when_its_reader_is_gone_SRV_7_LRN_12(module, start):
    speak = "lambda *_: print('x', flush=True) or sys.exit(5)"
    program = f"import sys, {module} as program; program.load_config_or_exit = program.check_places_of = {speak}"
    assert status_without_reader(f"{program}; {start}", "--config", "a.yaml") == 5


def test_a_server_told_to_stop_while_it_loads_ends_although_nobody_reads_SRV_7():
    program = "import signal, rollout_server as server; signal.signal(signal.SIGTERM, server.stop_loading)"
    assert status_without_reader(f"{program}; signal.raise_signal(signal.SIGTERM)") == 128 + 15
