"""The command line: `python -m thunderkittens info | demo | bench | cmake-dir`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import __version__, _load

COMMANDS = {
    "info": "versions, GPU, and which kernel each op would use here",
    "demo": "train a small transformer on this package's ops, beside PyTorch's own",
    "bench": "time an op beside its best peers",
    "cmake-dir": "print the folder for cmake -Dkittens_DIR=..., for kernels of one's own",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m thunderkittens", description=_description())
    parser.add_argument("--version", action="version", version=f"thunderkittens {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    # Only the module of the wanted command is imported: info has to work where the others cannot.
    wanted = next((a for a in arguments if not a.startswith("-")), None)
    modules = {}
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name != wanted:
            continue
        if name not in ("info", "cmake-dir") and _load.import_problem:
            print(_load.import_problem, file=sys.stderr)
            return 1
        modules[name] = importlib.import_module(f".{name.replace('-', '_')}", __package__)
        modules[name].add_arguments(command)
    args = parser.parse_args(arguments)
    return int(modules[args.command].main(args))


def _description() -> str:
    return f"thunderkittens {__version__}: fast GPU kernels for PyTorch"


if __name__ == "__main__":
    sys.exit(main())
