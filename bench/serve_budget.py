#!/usr/bin/env python3
"""Serves one model under several schemes with the same memory for states, and says what it buys.

Starts `statepack serve` once for the load and once for the prefix cache of every scheme:

- load: `--requests` streamed completions, `--concurrency` clients at a time, prompts all different.
  Slots are as many as `--bytes` hold, less one that the pool keeps for padding; the most that were in
  use at once are read from /status.
- prefixes: more prompts of one block than `--bytes` of states hold, then all of them again from the
  last one back: those that are found (`cached_tokens`) until the first that is not.

    bench/serve_budget.py --statepack build/release/src/cli/statepack --model models/statepack-gdn \\
        --state fp32 --state pace:4/8,conv=bf16 --out budget.json

Prints a table whose ratios are against the first scheme, and writes one JSON object a scheme with the
keys of `vllm bench serve`. Attention rows are not part of the budget. Needs nothing but Python's standard library.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile

import serve_load


def parser():
    options = argparse.ArgumentParser(description=__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--statepack", required=True, help="the program")
    options.add_argument("--model", required=True)
    options.add_argument("--state", action="append", required=True, metavar="SCHEME",
                         help="may be given again; the first is what the others are compared with")
    options.add_argument("--bytes", default=64 << 20, type=int, help="memory for states")
    options.add_argument("--concurrency", type=int, default=256)
    options.add_argument("--requests", type=int, default=512)
    options.add_argument("--max-tokens", type=int, default=96)
    options.add_argument("--block", type=int, default=64, help="tokens of a cached prefix")
    options.add_argument("--out", help="JSON file")
    return options


class Server:
    """One running server; a context manager."""

    def __init__(self, args, scheme, extra):
        self.log = tempfile.TemporaryFile("a+")  # the server's writes stay at the end
        self.process = subprocess.Popen(
            [args.statepack, "serve", "--model", args.model, "--state", scheme, "--port", "0",
             "--max-model-len", "2048", "--max-queue", "100000", *extra],
            stdout=self.log, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    async def address(self):
        """Once it answers: host and port, as serve_load's functions want them."""
        for _ in range(600):
            await asyncio.sleep(0.1)
            self.log.seek(0)
            text = self.log.read()
            if self.process.poll() is not None:
                sys.exit(f"the server ended:\n{text}")
            found = re.search(r"http://([0-9.]+):(\d+)", text)
            if not found:
                continue
            at = argparse.Namespace(host=found[1], port=int(found[2]), api_key="")
            if json.loads(await serve_load.get(at, "/health")).get("status") == "ok":
                return at
        sys.exit("the server was not ready within a minute")


def slots_of(args, scheme):
    said = subprocess.run([args.statepack, "serve", "--model", args.model, "--state", scheme,
                           "--state-pool-bytes", str(args.bytes), "--max-num-seqs", "1000000"],
                          capture_output=True, text=True, check=False).stderr
    found = re.search(r"the pool has (\d+) of", said)
    if not found:
        sys.exit(f"{scheme}: {said.strip()}")
    return int(found[1])


async def most_in_use(at, seen):
    while True:
        seen.append(json.loads(await serve_load.get(at, "/status"))["state"]["used"])
        await asyncio.sleep(0.2)


async def under_load(args, scheme):
    # A batch of all slots needs their number, which the server's own sizing knows.
    slots = slots_of(args, scheme)
    with Server(args, scheme, ["--state-pool-bytes", str(args.bytes), "--max-num-seqs", str(slots),
                               "--prefix-cache", "off", "--kv-cache-bytes", "0"]) as server:
        at = await server.address()
        load = argparse.Namespace(**vars(at), concurrency=args.concurrency,
                                  requests=args.requests, max_tokens=args.max_tokens,
                                  variants=args.requests)
        state = json.loads(await serve_load.get(at, "/status"))["state"]
        seen = []
        watch = asyncio.create_task(most_in_use(at, seen))
        results, duration = await serve_load.load(load)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        if max(seen) < state["slots"]:
            sys.exit(f"{scheme}: {max(seen)} of {state['slots']} slots were in use at once; the load "
                     "is too small for the budget, raise --concurrency and --requests")
        return {"slots": state["slots"], "bytes_per_slot": state["bytes_per_slot"],
                "served_at_once": max(seen), **serve_load.summary(results, duration)}


async def cached_tokens(at, tokens):
    body = {"prompt": tokens, "max_tokens": 1, "temperature": 0}
    reader, writer = await serve_load.connect(at)
    writer.write(serve_load.request_bytes(at, "/v1/completions", body))
    answer = json.loads((await reader.read()).split(b"\r\n\r\n", 1)[1])
    writer.close()
    if "error" in answer:
        sys.exit(f"a prompt was refused: {answer['error']['message']}")
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def of_prefixes(args, scheme, bytes_per_slot):
    # More than fit even if a snapshot were half a slot.
    n_prompts = args.bytes * 2 // bytes_per_slot + 8
    prompts = [[100 + i // 400, 100 + i % 400] + [1000 + (7 * i + j) % 500
                                                 for j in range(args.block - 1)]
               for i in range(n_prompts)]
    with Server(args, scheme, ["--max-num-seqs", "4", "--prefix-cache", "blocks",
                               "--prefix-cache-block", str(args.block),
                               "--prefix-cache-bytes", str(16 << 30),
                               "--prefix-cache-state-bytes", str(args.bytes)]) as server:
        at = await server.address()
        for prompt in prompts:
            await cached_tokens(at, prompt)
        cache = json.loads(await serve_load.get(at, "/status"))["prefix_cache"]
        found = 0
        for prompt in reversed(prompts):
            if await cached_tokens(at, prompt) == 0:
                break
            found += 1
        if found == n_prompts:
            sys.exit(f"{scheme}: all {n_prompts} prefixes were kept, so that the bound was not reached")
        return {"prefixes_kept": found, "prefix_snapshots": cache["snapshots"],
                "prefix_state_bytes": cache["state_bytes"], "prefix_bytes": cache["bytes"]}


async def run(args):
    rows = []
    for scheme in args.state:
        print(f"{scheme} ...", file=sys.stderr)
        row = {"scheme": scheme, "budget_bytes": args.bytes, **await under_load(args, scheme)}
        row.update(await of_prefixes(args, scheme, row["bytes_per_slot"]))
        rows.append(row)
    if args.out:
        with open(args.out + ".new", "w", encoding="utf-8") as out:
            json.dump(rows, out, indent=1)
        os.replace(args.out + ".new", args.out)
    first = rows[0]
    print("| scheme | at once | ratio | prefixes kept | ratio | tokens/s | ratio "
          "| TTFT median, ms | p99 | time per token median, ms |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        ratio = {key: row[key] / first[key]
                 for key in ("served_at_once", "prefixes_kept", "output_throughput")}
        print(f"| `{row['scheme']}` | {row['served_at_once']} | {ratio['served_at_once']:.2f} "
              f"| {row['prefixes_kept']} | {ratio['prefixes_kept']:.2f} "
              f"| {row['output_throughput']:.0f} | {ratio['output_throughput']:.2f} "
              f"| {row['median_ttft_ms']:.0f} | {row['p99_ttft_ms']:.0f} "
              f"| {row['median_tpot_ms']:.1f} |")
    failed = sum(row["failed"] for row in rows)
    if failed > 0:
        print(f"{failed} requests failed", file=sys.stderr)
    return failed == 0


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(run(parser().parse_args())) else 1)
