"""Lets `import torchvision` work beside a CPU build of torch; does nothing where torchvision is healthy.

Where only PyPI can be reached, pip pairs `torch==...+cpu` with a torchvision whose compiled operators are built for
CUDA. They cannot be loaded, and torchvision 0.28 then dies at import with "operator torchvision::nms does not exist",
although the image transforms that Qwen3-VL's processor needs are plain Python. Declaring the two operators' schemas
first is enough. Every process needs it, vLLM's spawned children too, so `make setup` runs
`python tools/torchvision_cpu.py`, which copies this file into site-packages beside a `.pth` file that installs the
import hook at interpreter start.
"""

import importlib.abc
import importlib.machinery
import pathlib
import shutil
import sys
import sysconfig

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library = None  # torch.library keeps the schemas only as long as this object lives


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds torchvision as usual and declares the operators just before its code runs; a mere look-up is free."""

    def find_spec(self, name, path=None, target=None):  # noqa: ANN001, ANN201 (signature of importlib)
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None and spec.origin is not None:
            run, package = spec.loader.exec_module, pathlib.Path(spec.origin).parent

            def exec_module(module):  # noqa: ANN001, ANN202
                _declare_missing_operators(package)
                run(module)

            spec.loader.exec_module = exec_module
        return spec


def _declare_missing_operators(package: pathlib.Path) -> None:
    import torch

    global _library
    try:
        for library in package.glob("_C*.so"):
            torch.ops.load_library(str(library))
    except OSError:
        _library = _library or torch.library.Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            if not hasattr(torch.ops.torchvision, schema.split("(")[0]):
                _library.define(schema)


def install_hook() -> None:
    """Called by the `.pth` file in every interpreter of the environment."""
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


if __name__ == "__main__":
    site = pathlib.Path(sysconfig.get_paths()["purelib"])
    shutil.copyfile(__file__, site / "torchvision_cpu.py")
    (site / "torchvision_cpu.pth").write_text("import torchvision_cpu; torchvision_cpu.install_hook()\n")
    print(f"torchvision hook installed in {site}")
