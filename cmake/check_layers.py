#!/usr/bin/env python3
"""Checks that a folder of src/ includes only from itself and from those above it in LAYERS, that
public headers include public headers alone, and that every quoted include names a file."""

import pathlib
import re
import sys

LAYERS = ["base", "codec", "scheme", "delta", "pool", "capi", "calibrate", "model", "runtime",
          "eval", "serve", "cli"]
SUFFIXES = {".cc", ".hpp", ".h", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')


def includes(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1)


def problem(root, folder, included):
    """Why `folder` ("include" or one of LAYERS) may not include this, or None."""
    if (root / "include" / included).is_file():
        return None
    if folder == "include":
        return "a public header may only include public headers"
    if not (root / "src" / included).is_file():
        return "no such file under include/ or src/"
    layer = included.split("/")[0]
    if layer not in LAYERS:
        return f"'{layer}' is no layer"
    if LAYERS.index(layer) > LAYERS.index(folder):
        return f"{layer} comes after {folder} in the layering"
    return None


def check(root):
    problems = []
    for top in ("include", "src"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            folder = "include" if top == "include" else path.relative_to(root / "src").parts[0]
            if folder != "include" and folder not in LAYERS:
                problems.append(f"{path.relative_to(root)}: '{folder}' is no layer")
                continue
            for number, included in includes(path):
                reason = problem(root, folder, included)
                if reason:
                    problems.append(f"{path.relative_to(root)}:{number}: \"{included}\": {reason}")
    return problems


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1])
    problems = check(root)
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
