"""Write or check a platform's lock: the version of every package that its requirements pull in.

    make lock DEVICE=gpu             # resolve requirements-gpu.txt afresh and write constraints-gpu.txt
    make lock DEVICE=gpu ARGS=--keep # the same with the versions of the present lock, after adding a package
    make check-lock DEVICE=gpu       # fail if the set no longer resolves with its lock, or a package is not in it

pip resolves for the platform it runs on (Linux on x86-64, Python 3.11), so each platform gets a lock of its own; the
GPU set needs no GPU for that. A fresh pip in a temporary environment installs nothing (`--dry-run`). It reads metadata
where the index serves it and whole wheels elsewhere: about 2 GB for the GPU set, in less than a minute on a fast line.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = "pip==26.3"
PLATFORM = ("linux", "x86_64", (3, 11))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cpu", "gpu"))
    parser.add_argument("--check", action="store_true", help="write nothing, compare with the lock")
    parser.add_argument("--keep", action="store_true", help="keep the versions of the present lock")
    args, pip_options = parser.parse_known_args()
    if (sys.platform, platform.machine(), sys.version_info[:2]) != PLATFORM:
        sys.exit("the locks are for Linux on x86-64 and Python 3.11; run this there (make lock PYTHON=python3.11)")
    requirements, lock = ROOT / f"requirements-{args.device}.txt", ROOT / f"constraints-{args.device}.txt"
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        if subprocess.run([*pip, "install", "-qq", PIP]).returncode:
            sys.exit(f"the package index does not answer: {PIP} cannot be installed")
        resolved = resolve(pip, requirements, lock if args.check or args.keep else None, pip_options)
    if not args.check:
        lock.write_text(lock_text(args.device, resolved))
    elif missing := unpinned(resolved, lock.read_text()):
        sys.exit(f"{lock.name} does not pin {', '.join(missing)}; make lock DEVICE={args.device} ARGS=--keep")
    print(f"{requirements.name}: {len(resolved)} packages, all in {lock.name}")


def resolve(pip: list[str], requirements: Path, lock: Path | None, pip_options: list[str]) -> dict[str, str]:
    """Return the version of every package that `requirements` pulls in, by name; with `lock`, held to its versions.

    Raises SystemExit if they contradict each other, or a package is not to be had.
    """
    held = ["-c", str(lock)] if lock else []
    with tempfile.NamedTemporaryFile() as report:
        command = [*pip, "install", "--dry-run", "--ignore-installed", "--report", report.name]
        command += ["-r", str(requirements), *held, *pip_options]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode:
            print("\n".join(run.stdout.splitlines()[-30:]), file=sys.stderr)
            what = requirements.name + (f" with {lock.name}" if lock else "")
            if "ResolutionImpossible" in run.stdout:
                sys.exit(f"{what} contradicts itself, see above; correct the requirements, then make lock")
            sys.exit(f"{what} cannot be resolved, see above: a package is not to be had, or the index does not answer")
        found = [item["metadata"] for item in json.loads(Path(report.name).read_text())["install"]]
    return {item["name"]: item["version"] for item in found}


def lock_text(device: str, resolved: dict[str, str]) -> str:
    """Return the lock. Which build of a version (`+cpu`) is the requirements' business, or the index's."""
    header = f"# Written by `make lock DEVICE={device}`: everything that requirements-{device}.txt pulls in.\n"
    pins = sorted((f"{name}=={version.split('+')[0]}\n" for name, version in resolved.items()), key=str.lower)
    return header + "".join(pins)


def unpinned(resolved: dict[str, str], lock: str) -> list[str]:
    """Return the packages that have no line in `lock`."""
    pinned = {canonical(name) for name in re.findall(r"^([\w.-]+)==\S", lock, re.MULTILINE)}
    return sorted(name for name in resolved if canonical(name) not in pinned)


def canonical(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
