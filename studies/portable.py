"""Make a study's images, start model and pseudo-labels the same, bit for bit, on every x86-64 processor with AVX2.

    python -m studies.portable partial_100

Libraries choose instructions by the processor. Sums round otherwise then, and hundreds of steps of training turn that
into another model. Here all processors take one way: one thread, float32, ATen's kernels for AVX2, and MKL's for any
processor in place of oneDNN's.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from studies.arms import Study
from studies.runs import RunFailed, run_to_end

# Libraries read these when they are loaded, so that a process has to be started with them.
ONE_WAY = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}


class Replaced(TorchFunctionMode):
    """Call others in place of the functions that go their own way whatever the environment says.

    Muon orthogonalises in bfloat16; such matrix products are chosen by the processor, and slow without oneDNN. MKL's
    square root starts from the processor's own estimate, even in `COMPATIBLE` mode; ATen has the inverse one itself.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].float()
        if func is torch.Tensor.sqrt:
            return args[0].rsqrt().reciprocal()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def one_way() -> Iterator[None]:
    """Take the one way inside; the process has to be started with `ONE_WAY`."""
    with torch.backends.mkldnn.flags(enabled=False), Replaced():
        yield


def prepare(study: Study) -> None:
    """Make what a study starts from, if missing: in a process of its own if it has to be the same everywhere."""
    if not study.is_portable:
        return study.prepare()
    study.root.mkdir(parents=True, exist_ok=True)
    log = study.root / "prepare.log"
    if run_to_end([sys.executable, "-m", "studies.portable", study.name], log, ONE_WAY):
        raise RunFailed(f"studies.portable; the end of {log}:\n{log.read_text()[-2000:]}")


def main() -> None:
    from studies.results import STUDIES  # it imports this module

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=[name for name, study in STUDIES.items() if study.is_portable])
    with one_way():
        STUDIES[parser.parse_args().study].prepare()


if __name__ == "__main__":
    main()
