#!/usr/bin/env python3
"""Sets two result files of a benchmark side by side.

    bench/step_bench --benchmark_repetitions=5 --benchmark_out=before.json
    bench/compare.py before.json after.json [--time real_time]

Prints for every benchmark the median time of its repetitions in both files and their ratio (above 1:
the second file is faster), and marks those whose output digests differ. With one file and --against,
every benchmark of that file is set against the named one with the same suffix (gate and rows, or
sequences): `--against fp32` gives the ratios of docs/performance.md."""

import argparse
import collections
import json
import statistics
import sys


def load(path):
    """Medians by benchmark name: {name: {field: median}}, and digests {name: set of labels}."""
    with open(path, encoding="utf-8") as file:
        runs = json.load(file)["benchmarks"]
    values = collections.defaultdict(lambda: collections.defaultdict(list))
    digests = collections.defaultdict(set)
    for run in runs:
        if run.get("run_type") == "aggregate" or run.get("error_occurred"):
            continue
        name = run["run_name"]
        for field, value in run.items():
            if isinstance(value, (int, float)):
                values[name][field].append(value)
        if run.get("label"):
            digests[name].add(run["label"])
    medians = {name: {field: statistics.median(list_) for field, list_ in fields.items()}
               for name, fields in values.items()}
    return medians, digests


def field(time, *files):
    """The field to compare: one that every benchmark of every file has."""
    return time or next(name for name in ("median_cpu_ns", "best_cpu_ns", "cpu_time")
                        if all(name in fields for medians in files for fields in medians.values()))


def compare(before, after, time):
    """Rows of two files; returns whether a digest differs."""
    (old, old_digests), (new, new_digests) = load(before), load(after)
    time = field(time, old, new)
    differs = False
    print(f"{'benchmark':60} {'before':>12} {'after':>12} {'ratio':>7}")
    for name in (n for n in old if n in new):
        ratio = old[name][time] / new[name][time]
        mark = ""
        if old_digests[name] != new_digests[name]:
            mark, differs = "  outputs differ", True
        print(f"{name:60} {old[name][time]:12.4g} {new[name][time]:12.4g} {ratio:7.2f}{mark}")
    for name in old.keys() ^ new.keys():
        print(f"{name:60} only in {before if name in old else after}")
    return differs


def against(path, scheme, time):
    """Rows of one file against one of its schemes."""
    medians, _ = load(path)
    time = field(time, medians)
    print(f"{'benchmark':60} {time:>12} {'ratio':>7}")
    for name, fields in medians.items():
        # step/<scheme, which may hold a slash>/<gate>/rows:<n>/..., or decode/<scheme>/<n>[/...]
        parts = name.split("/")
        gate = next((i for i, part in enumerate(parts)
                     if part in ("scalar", "channel") or part.isdigit() and i > 1), len(parts))
        reference = medians.get("/".join([parts[0], scheme, *parts[gate:]]))
        ratio = f"{reference[time] / fields[time]:7.2f}" if reference else "      -"
        print(f"{name:60} {fields[time]:12.4g} {ratio}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--against", help="a scheme of the one file given")
    parser.add_argument("--time", choices=("cpu_time", "real_time", "median_cpu_ns", "best_cpu_ns"),
                        help="the field to compare; median_cpu_ns where every file has it, "
                             "then best_cpu_ns, then cpu_time")
    options = parser.parse_args()
    if options.against is not None and len(options.files) == 1:
        against(options.files[0], options.against, options.time)
        return 0
    if len(options.files) != 2:
        parser.error("give two files, or one with --against")
    return 1 if compare(*options.files, options.time) else 0


if __name__ == "__main__":
    sys.exit(main())
