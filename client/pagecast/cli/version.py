"""`pagecast version`: versions of Pagecast and of the packages it runs on, without importing them."""

import argparse
import importlib.metadata
import platform

import pagecast

_PACKAGES = ("grpcio", "protobuf", "torch", "triton", "transformers", "pyzmq", "msgspec", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(args: argparse.Namespace) -> int:
    print(f"pagecast {pagecast.__version__} (Python {platform.python_version()})")
    for name in _PACKAGES:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} not installed")
    return 0
