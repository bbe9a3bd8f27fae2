"""`python -m thunderkittens cmake-dir`: where `find_package(kittens)` finds the tile library."""

from __future__ import annotations

import argparse

from . import get_cmake_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def main(args: argparse.Namespace) -> int:
    """Prints the folder."""
    print(get_cmake_dir())
    return 0
