"""Regenerates client/pagecast/v1 from protos/pagecast/v1, and the front end's compat stubs from protos/compat; with --check, compares
instead and exits 1 on a difference.

Code is generated with the oldest toolchain we support (grpcio-tools 1.71.2, protobuf 5.29), so that it loads on every newer one;
stubs come from mypy-protobuf.
"""

import argparse
import filecmp
import importlib.resources
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OUT = ROOT.parent / "client"
COMPAT = "pagecast_scheduler/frontend/compat"
COMPAT_OUT = ROOT.parent / "scheduler_service"


def generate_compat(out: Path) -> None:
    """Write the stubs of other projects' services below `out`/pagecast_scheduler/frontend/compat."""
    from grpc_tools import protoc

    files = sorted(str(p) for p in (ROOT / "compat").glob("*.proto"))
    if protoc.main(["protoc", f"-I{COMPAT}={ROOT / 'compat'}", f"--python_out={out}", f"--grpc_python_out={out}", *files]) != 0:
        raise SystemExit("protoc failed")


def generate(out: Path) -> None:
    """Write every generated file below `out`/pagecast/v1."""
    from grpc_tools import protoc

    bin_dir = Path(sys.executable).parent
    well_known = str(importlib.resources.files("grpc_tools") / "_proto")
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "pagecast/v1").glob("*.proto"))
    plugins = [f"--plugin=protoc-gen-{name}={bin_dir / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    common = ["protoc", f"-I{ROOT}", f"-I{well_known}", *plugins]
    services = [f for f in files if "\nservice " in (ROOT / f).read_text()]
    if protoc.main([*common, f"--python_out={out}", f"--mypy_out={out}", *files]) != 0:
        raise SystemExit("protoc failed")
    if protoc.main([*common, f"--grpc_python_out={out}", f"--mypy_grpc_out={out}", *services]) != 0:
        raise SystemExit("protoc failed")


def stale_files(fresh_folder: Path, kept_folder: Path) -> list[str]:
    """Names of generated files that differ between two folders, or are in one alone."""
    fresh = {p.name: p for p in fresh_folder.glob("*_pb2*")}
    kept = {p.name: p for p in kept_folder.glob("*_pb2*")}
    return sorted(n for n in fresh.keys() | kept.keys() if n not in fresh or n not in kept or not filecmp.cmp(fresh[n], kept[n], False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead, and exit 1 on a difference")
    if not parser.parse_args().check:
        generate(OUT)
        generate_compat(COMPAT_OUT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        generate_compat(Path(folder))
        pairs = ((OUT, "pagecast/v1"), (COMPAT_OUT, COMPAT))
        stale = [name for root, below in pairs for name in stale_files(Path(folder, below), root / below)]
    if stale:
        raise SystemExit(f"generated code is out of date, run protos/generate.py: {', '.join(stale)}")


if __name__ == "__main__":
    main()
