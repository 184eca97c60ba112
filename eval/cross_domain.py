#!/usr/bin/env python3
"""What klt loses on a kind of text that its calibration left out, and whether the guard says so.

For each calibration domain a plan is made from all the others; the plan of all domains and this one then read
text of that domain (samples that no plan saw) token by token beside fp32, and answer a task where the domain is
one. Prints a Markdown table; pieces that the output folder holds already are not run again.

Usage: eval/cross_domain.py PROGRAM OUT_DIR [--scheme klt:3] [--domains arith lists ...] [--samples 60]
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "statepack-gdn"
DATA = ROOT / "eval" / "data"
PROSE = "wikitext2"
TASKS = ["arith", "lists", "perm", "recall", "trace"]
SHORT_TASKS = {"arith", "lists"}  # the replies of the others take minutes
CONTEXT, WINDOWS = 1024, 8


def run(args, command):
    done = subprocess.run([args.program, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stderr}")
    return done


def calibration_text(domain):
    if domain == PROSE:
        return DATA / "wikitext2" / "wikitext2.valid.txt"
    return DATA / "calibration" / f"{domain}.jsonl"


def unseen_text(args, domain):
    """Text of the domain that no plan is made from: conversations get their reference replies."""
    if domain == PROSE:
        return DATA / "wikitext2" / "wikitext2.test.txt"
    seen = {json.loads(line)["id"] for line in calibration_text(domain).read_text().splitlines()}
    path = args.out / f"{domain}.jsonl"
    with path.open("w") as file:
        for line in (DATA / f"{domain}.jsonl").read_text().splitlines():
            sample = json.loads(line)
            if sample["id"] in seen:
                continue
            reply = {"role": "assistant", "content": sample["reference"]}
            print(json.dumps({"messages": sample["messages"] + [reply]}), file=file)
    return path


def make_plan(args, domain, texts):
    plan = args.out / f"{args.scheme.replace(':', '-')}-without-{domain}.safetensors"
    if not plan.exists():
        run(args, ["calibrate", "--model", MODEL, "--scheme", args.scheme, "--segments", 16 * len(texts),
                   "--seq-len", 512, "--text", *texts, "-o", plan])
    return plan


def kl(results, scheme):
    run_of = results["runs"][next(name for name in results["runs"] if name.startswith(scheme))]
    (sums,) = run_of["forced"].values()
    n = sum(bucket["n"] for bucket in sums["buckets"])
    return (sum(bucket["kl"] for bucket in sums["buckets"]) / n,
            sums.get("over_guard", 0) / max(1, sums.get("guarded_roundings", 0)))


def read(args, domain, label, plan):
    """KL and share of roundings over the guard on the domain's text, and in a short task its score."""
    results = args.out / f"{args.scheme.replace(':', '-')}-{domain}-{label}.json"
    run(args, ["eval", "--model", MODEL, "--plan", plan, "--state", args.scheme, "--text",
               unseen_text(args, domain), "--context", CONTEXT, "--windows", WINDOWS, "-o", results])
    row = dict(zip(("kl", "guard"), kl(json.loads(results.read_text()), args.scheme)))
    if domain in SHORT_TASKS:
        tasks = args.out / f"{args.scheme.replace(':', '-')}-{domain}-{label}-task.json"
        done = run(args, ["eval", "--model", MODEL, "--plan", plan, "--state", args.scheme, "--data", DATA,
                          "--tasks", domain, "--samples", args.samples, "-o", tasks])
        for run_of in json.loads(tasks.read_text())["runs"].values():
            row["task"] = run_of["results"][domain]["exact_match,none"]
        found = re.search(r"roundings of a head, ([0-9.]+) %", done.stderr)
        if found:
            row["task_guard"] = float(found.group(1)) / 100
            tasks.with_suffix(".guard").write_text(found.group(1))
        elif tasks.with_suffix(".guard").exists():  # the task was run before
            row["task_guard"] = float(tasks.with_suffix(".guard").read_text()) / 100
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--scheme", default="klt:3")
    parser.add_argument("--domains", nargs="*", default=[PROSE, *TASKS])
    parser.add_argument("--samples", type=int, default=60)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    whole = MODEL / "plans" / f"{args.scheme.replace(':', '-')}.safetensors"

    def cell(row, key, form):
        return form.format(row[key]) if key in row else "-"

    print("| domain | KL, all domains | KL, left out | guard, all | guard, left out | task, all | task, left out "
          "| guard in task, all | left out |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for domain in args.domains:
        others = [calibration_text(d) for d in [PROSE, *TASKS] if d != domain]
        plan = make_plan(args, domain, others)
        seen, unseen = read(args, domain, "all", whole), read(args, domain, "left-out", plan)
        cells = [domain]
        for key, form in (("kl", "{:.1e}"), ("guard", "{:.2%}"), ("task", "{:.0%}"), ("task_guard", "{:.2%}")):
            cells += [cell(seen, key, form), cell(unseen, key, form)]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
