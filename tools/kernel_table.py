"""Merges the reports of compile_kernel.py into one table of kernels, prints it and writes it as
JSON.

    kernel_table.py --output kernels.json OBJECT...

A row: family, source (stem of a file that csrc/<family>/instances.txt names), arch, symbol,
registers, spills, stack, static shared memory, barriers, code size, and ptxas's warnings about
serialised wgmma."""

import argparse
import json
import re
import sys
from pathlib import Path


def row_of(kernel: dict, family: str, source: str, warnings: list[str]) -> dict:
    return {
        "family": family,
        "source": source,
        "arch": kernel["arch"],
        "symbol": kernel["symbol"],
        "registers": kernel.get("registers", 0),
        "spill_store_bytes": kernel.get("spill_store_bytes", 0),
        "spill_load_bytes": kernel.get("spill_load_bytes", 0),
        "stack_bytes": kernel.get("stack_bytes", 0),
        "static_shared_bytes": kernel.get("static_shared_bytes", 0),
        "barriers": kernel.get("barriers", 0),
        "code_bytes": kernel["code_bytes"],
        "warnings": warnings,
    }


def report_of(path: Path) -> dict:
    return json.loads(path.with_name(path.name + ".json").read_text())


def collect(objects: list[Path]) -> list[dict]:
    rows = []
    for path in objects:
        report = report_of(path)
        match = re.search(r"instances/([^/]+)/([^/]+)\.cu\.o$", path.as_posix())
        family, source = match.groups() if match else ("", path.name)
        for kernel in report["kernels"]:
            # A warning names the kernel it is about; one that names none is shown on every row.
            mine = [w for w in report["warnings"] if kernel["symbol"] in w or "_Z" not in w]
            # What the file took to compile, which may hold several kernels.
            rows.append({**row_of(kernel, family, source, mine), "seconds": report.get("seconds")})
    return sorted(rows, key=lambda row: (row["family"], row["source"], row["symbol"]))


def print_columns(rows: list[dict], columns: dict[str, str]) -> None:
    """Prints keys of the rows, each below its head."""
    cells = [tuple(columns.values()), *(tuple(str(row[c]) for c in columns) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def print_table(rows: list[dict]) -> None:
    columns = ("family", "source", "arch", "registers", "spill_store_bytes", "spill_load_bytes")
    columns += ("stack_bytes", "barriers", "code_bytes")
    heads = ("family", "source", "arch", "regs", "spill st", "spill ld", "stack", "bars", "code")
    print_columns(rows, dict(zip(columns, heads, strict=True)))
    for row in rows:
        for warning in row["warnings"]:
            print(f"warning: {row['family']}/{row['source']}: {warning}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("objects", type=Path, nargs="*")
    arguments = parser.parse_args()
    rows = collect(arguments.objects)
    if rows:
        print_table(rows)
        seconds = {path.stem: report_of(path)["seconds"] for path in arguments.objects}
        slowest = max(seconds, key=seconds.__getitem__)
        print(
            f"compiled {len(seconds)} files in {sum(seconds.values()):.0f} s; "
            f"the slowest, {slowest}, took {seconds[slowest]} s"
        )
    arguments.output.write_text(json.dumps({"kernels": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
