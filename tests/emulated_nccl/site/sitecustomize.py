"""Python runs this at start where PYTHONPATH names this folder: the emulated NCCL for a whole process tree."""

import os

if "EMULATED_NCCL" in os.environ:
    from tests.emulated_nccl import patches

    patches.install()
