"""Writes the files that instantiate a family's kernels from its list, csrc/<family>/instances.txt.

    instances.py csrc/gemm/instances.txt FOLDER [--suffix .cu --suffix .cpp]

CMake runs it whenever it configures; nvcc compiles the `.cu` files, the emulator's compiler the
`.cpp` files of the same contents. It prints the stems of the files. Files whose text is the same as
before are not written again, so that they are not compiled again; those that the list no longer
names are removed.

A list is an INI file. A section is a kernel:

    [a name, for readers]
    header = dense/persistent_sm90.cuh          in the family's folder
    namespace = gemm                            within thunderkittens
    function = void launch<config_of({...})>(const Params&, Stream)
    instances =
        ${dtype}_128x128    block_m=128 block_n=128 dtype=bf16,fp16 layout=nn,nt

An entry of `instances` is the stem of a file and the fields of what is compiled in it: one instance
for each combination of their values, the last field changing first. In the stem `$field` is such a
value. In the text of a function `$field` is the value as C++, and `...` stands for all fields as
designated initialisers: `.block_m = 128, .block_n = 128, .dtype = DType::bf16, .layout =
Layout::nn`, which C++ wants in the order of the struct. The section [enums] says of which
enumeration a field is. Several functions, with the same fields, are separated by semicolons; a
header without templates has none. Instances of the same stem are compiled together, those of
several sections too: the headers of a file cost as much as a small kernel.

A file holds the kernels of one architecture family, which is that of its header,
`*_sm<number>.cuh`: sm90 are those for Hopper alone, sm80 those that every GPU of compute
capability 8.0 and later runs. One for another than sm90 has `_sm<number>` in its stem, by which
CMake knows what to compile it for.
"""

from __future__ import annotations

import argparse
import configparser
import itertools
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from string import Template


class ListError(Exception):
    """A mistake in a list, told in a sentence."""


@dataclass
class File:
    """A translation unit: what it includes, and the functions of each namespace that it has."""

    headers: list[str] = field(default_factory=list)
    functions: dict[str, list[str]] = field(default_factory=dict)

    def text(self, family: str) -> str:
        includes = [f'#include "csrc/{family}/{header}"\n' for header in self.headers]
        blocks = [
            f"\nnamespace thunderkittens::{namespace} {{\n"
            + "".join(f"template {function};\n" for function in functions)
            + f"}}  // namespace thunderkittens::{namespace}\n"
            for namespace, functions in self.functions.items()
        ]
        written = f"// Written from csrc/{family}/instances.txt by tools/instances.py.\n"
        return "".join([written, *includes, *blocks])


def entries(text: str) -> list[tuple[str, dict[str, list[str]]]]:
    """(stem, values of each field) of what stands under `instances`."""
    found: list[tuple[str, dict[str, list[str]]]] = []
    for word in text.split():
        name, equals, values = word.partition("=")
        if not equals:
            found.append((word, {}))
        elif not found or not all([name, *values.split(",")]) or name in found[-1][1]:
            raise ListError(f"'{word}' is not a new field and its values, name=value,value")
        else:
            found[-1][1][name] = values.split(",")
    return found


def combinations(stem: str, fields: dict[str, list[str]]) -> list[tuple[str, dict[str, str]]]:
    """(stem, value of each field) of each instance of an entry."""
    chosen = [dict(zip(fields, c, strict=True)) for c in itertools.product(*fields.values())]
    return [(Template(stem).substitute(values), values) for values in chosen]


def as_cpp(values: dict[str, str], enums: dict[str, str]) -> dict[str, str]:
    return {
        name: f"{enums[name]}::{value}" if name in enums else value
        for name, value in values.items()
    }


def functions(section: configparser.SectionProxy, values: dict[str, str]) -> list[str]:
    """What a section instantiates for some values, which are C++."""
    initialisers = ", ".join(f".{name} = {value}" for name, value in values.items())
    texts = [" ".join(text.split()) for text in section.get("function", "").split(";")]
    return [
        Template(text.replace("...", initialisers)).substitute(values) for text in texts if text
    ]


def family_of(stem: str) -> str:
    """The architecture family of a file's stem."""
    found = re.search(r"_sm(\d+)", stem)
    return found[1] if found else "90"


def add_section(
    files: dict[str, File], section: configparser.SectionProxy, enums: dict[str, str]
) -> None:
    header, namespace = section["header"], section["namespace"]
    for entry in entries(section["instances"]):
        for stem, values in combinations(*entry):
            if not re.fullmatch(r"\w+", stem):
                raise ListError(f"'{stem}' is no stem of a file")
            if family_of(stem) != family_of(Path(header).stem):
                raise ListError(f"{stem} has to be named as its header, for {header}")
            file = files.setdefault(stem, File())
            if header not in file.headers:
                file.headers.append(header)
            listed = file.functions.setdefault(namespace, [])
            for function in functions(section, as_cpp(values, enums)):
                if function in listed:
                    raise ListError(f"{stem} has this twice: {function}")
                listed.append(function)


def read(path: Path) -> dict[str, File]:
    """The files of a list, by stem, in its order."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(path.read_text(), source=str(path))
    enums = dict(parser["enums"]) if "enums" in parser else {}
    files: dict[str, File] = {}
    for title in parser.sections():
        if title == "enums":
            continue
        try:
            add_section(files, parser[title], enums)
        except KeyError as error:
            raise ListError(f"{path}: [{title}]: {error} is not given") from error
        except (ListError, ValueError) as error:
            raise ListError(f"{path}: [{title}]: {error}") from error
    return files


def write(path: Path, folder: Path, suffixes: list[str]) -> list[str]:
    """Writes the files of a list into a folder, and gives their stems."""
    files = read(path)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {stem + suffix: file for stem, file in files.items() for suffix in suffixes}
    for old in folder.iterdir():
        if old.name not in wanted:
            old.unlink()
    for name, file in wanted.items():
        text = file.text(path.parent.name)
        target = folder / name
        if not target.is_file() or target.read_text() != text:
            target.write_text(text)
    return list(files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("list", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--suffix", action="append", help="of the files, .cu unless given")
    args = parser.parse_args()
    try:
        stems = write(args.list, args.folder, args.suffix or [".cu"])
    except ListError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(stems))
    return 0


if __name__ == "__main__":
    sys.exit(main())
