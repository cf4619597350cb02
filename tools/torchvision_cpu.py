"""Make `import torchvision` work with a CPU build of torch; no effect on a torchvision that works.

If only PyPI can be reached, pip pairs `torch==...+cpu` with a torchvision whose compiled operators are built for CUDA.
They cannot be loaded, and torchvision 0.28 then fails to import with "operator torchvision::nms does not exist",
although the image transforms that Qwen3-VL's processor needs are plain Python. It is enough to declare the schemas of
the two operators first. Every process needs this, including vLLM's spawned children, so `make setup` runs
`python tools/torchvision_cpu.py`: it copies this file into site-packages, next to a `.pth` file that installs the
import hook when the interpreter starts.
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
_library = None  # keeps the schemas declared: they disappear with the torch.library.Library object


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Find torchvision as usual, and declare the operators just before its code runs; looking it up costs nothing."""

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
    """Install the import hook; the `.pth` file calls this in every interpreter of the environment."""
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


if __name__ == "__main__":
    site = pathlib.Path(sysconfig.get_paths()["purelib"])
    shutil.copyfile(__file__, site / "torchvision_cpu.py")
    (site / "torchvision_cpu.pth").write_text("import torchvision_cpu; torchvision_cpu.install_hook()\n")
    print(f"torchvision hook installed in {site}")
