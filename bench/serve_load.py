#!/usr/bin/env python3
r"""Loads a running server with concurrent streams and measures what its clients see.

Sends `--requests` greedy completions, `--concurrency` at a time, and compares each text with that of
the same request alone. Prints one JSON object with the keys of `vllm bench serve`, so that scripts
made for those can read it. Needs nothing but Python's standard library.

    statepack serve -m models/statepack-gdn --state stepquant:6 --max-num-seqs 512 \
      --prefix-cache blocks &      # "turns" resumes where a reply ended: equal to that, not to a cold read
    bench/serve_load.py --port 8080 --concurrency 512 --requests 1024
    bench/serve_load.py --port 8080 --idle 10000        # open connections beside the load; the server
                                                        # closes silent ones after --header-timeout
    bench/serve_load.py --port 8080 --aborts 10000      # clients that leave at random moments
    bench/serve_load.py --port 8080 --soak 180          # load again and again; memory at the end

Exit code 1: a text differed, a request failed, an idle connection was lost, slots were left over, or
memory grew.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import sys
import time

PROMPTS = [
    "Once upon a time",
    "Compute 12 + 30.",
    "The list is 4, 8, 15, 16, 23, 42. The third number is",
    "A letter from the north says that winter",
    "def fibonacci(n):",
    "In the beginning there was",
    "Sort these words: pear, apple, plum.",
    "The capital of the country by the sea",
]


class Result:
    """What one client saw of one request."""

    def __init__(self):
        self.text = ""
        self.error = ""
        self.n_prompt = 0
        self.n_reply = 0
        self.start = 0.0
        self.times = []  # of chunks with text


def body_of(args, index):
    prompt = PROMPTS[index % len(PROMPTS)] + " " * (index // len(PROMPTS) % args.variants)
    return {"prompt": prompt, "max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}


def request_bytes(args, path, body):
    data = json.dumps(body).encode()
    key = f"Authorization: Bearer {args.api_key}\r\n" if args.api_key else ""
    head = (f"POST {path} HTTP/1.1\r\nHost: {args.host}\r\nContent-Type: application/json\r\n{key}"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n")
    return head.encode() + data


async def connect(args):
    for attempt in range(50):  # a burst may be longer than the kernel's queue of new connections
        try:
            return await asyncio.open_connection(args.host, args.port)
        except OSError:
            if attempt == 49:
                raise
            await asyncio.sleep(0.1)


async def stream(args, body):
    result = Result()
    result.start = time.perf_counter()
    writer = None
    try:
        reader, writer = await connect(args)
        writer.write(request_bytes(args, "/v1/completions", body))
        status = (await reader.readline()).decode()
        if " 200 " not in status:
            result.error = status.strip()
            return result
        async for raw in reader:
            if not raw.startswith(b"data: {"):
                continue
            event = json.loads(raw[6:])
            if "error" in event:
                result.error = event["error"]["message"]
                return result
            if event.get("usage"):
                result.n_prompt = event["usage"]["prompt_tokens"]
                result.n_reply = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if choice["text"]:
                    result.times.append(time.perf_counter())
                    result.text += choice["text"]
        if result.n_reply == 0:
            result.error = "the stream ended without its usage"
    except OSError as error:
        result.error = str(error)
    finally:
        if writer is not None:
            writer.close()
    return result


async def get(args, path):
    reader, writer = await connect(args)
    key = f"Authorization: Bearer {args.api_key}\r\n" if args.api_key else ""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{key}Connection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.split(b"\r\n\r\n", 1)[1]


async def status(args):
    return json.loads(await get(args, "/status"))


async def used_slots(args):
    return (await status(args))["state"]["used"]


async def open_connections(args):
    return (await status(args))["requests"]["connections"]


async def wait_for_no_slots(args, seconds=60):
    end = time.perf_counter() + seconds
    while (used := await used_slots(args)) > 0 and time.perf_counter() < end:
        await asyncio.sleep(0.05)
    return used


async def load(args):
    """All requests, a fixed number at a time; results in order."""
    gate = asyncio.Semaphore(args.concurrency)

    async def one(index):
        async with gate:
            return await stream(args, body_of(args, index))

    start = time.perf_counter()
    results = await asyncio.gather(*(one(i) for i in range(args.requests)))
    return results, time.perf_counter() - start


def spread(name, values_ms):
    if not values_ms:
        return {}
    values_ms = sorted(values_ms)
    p99 = values_ms[min(len(values_ms) - 1, int(0.99 * len(values_ms)))]
    return {f"mean_{name}_ms": statistics.fmean(values_ms),
            f"median_{name}_ms": statistics.median(values_ms),
            f"std_{name}_ms": statistics.pstdev(values_ms),
            f"p99_{name}_ms": p99}


def summary(results, duration):
    good = [r for r in results if not r.error]
    ttft = [1e3 * (r.times[0] - r.start) for r in good if r.times]
    tpot = [1e3 * (r.times[-1] - r.times[0]) / (r.n_reply - 1)
            for r in good if r.times and r.n_reply > 1]
    itl = [1e3 * (b - a) for r in good for a, b in zip(r.times, r.times[1:])]
    e2el = [1e3 * (r.times[-1] - r.start) for r in good if r.times]
    n_input = sum(r.n_prompt for r in good)
    n_output = sum(r.n_reply for r in good)
    return {"duration": duration, "completed": len(good), "failed": len(results) - len(good),
            "total_input_tokens": n_input, "total_output_tokens": n_output,
            "request_throughput": len(good) / duration, "output_throughput": n_output / duration,
            "total_token_throughput": (n_input + n_output) / duration,
            **spread("ttft", ttft), **spread("tpot", tpot), **spread("itl", itl),
            **spread("e2el", e2el)}


async def compare_with_alone(args, results):
    """Texts that differ from those of the same request alone: the first few, in words."""
    alone = {}
    wrong = []
    for index, result in enumerate(results):
        body = body_of(args, index)
        if body["prompt"] not in alone:
            alone[body["prompt"]] = (await stream(args, body)).text
        if not result.error and result.text != alone[body["prompt"]]:
            wrong.append(f"request {index}: {result.text[:60]!r}, alone "
                         f"{alone[body['prompt']][:60]!r}")
    return wrong


async def abort_many(args, draw):
    """Clients that leave in their head, body, queue, prompt or stream."""
    gate = asyncio.Semaphore(args.concurrency)

    async def one(index):
        async with gate:
            try:
                _, writer = await connect(args)
            except OSError:
                return
            body = dict(body_of(args, index), stream=index % 2 == 0,
                        prompt="word " * draw.choice([1, 1, 1, 30, 400]))
            data = request_bytes(args, "/v1/completions", body)
            writer.write(data if draw.random() < 0.9 else data[:draw.randrange(len(data))])
            await asyncio.sleep(draw.choice([0, 0.001, 0.01, 0.05, 0.2]) * draw.random())
            writer.transport.abort() if draw.random() < 0.5 else writer.close()

    start = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(args.aborts)))
    used = await wait_for_no_slots(args)
    return {"aborts": args.aborts, "duration": time.perf_counter() - start, "used_slots_after": used}


def server_rss_kib(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


async def soak(args):
    """The load again and again. Memory is compared from the first third on: caches fill before."""
    start = time.perf_counter()
    samples = []
    failed = 0
    while time.perf_counter() - start < args.soak:
        results, _ = await load(args)
        failed += sum(1 for r in results if r.error)
        samples.append(server_rss_kib(args.pid))
    settled = samples[len(samples) // 3:]
    growth = settled[-1] / settled[0] - 1 if settled else 0
    return {"soak_rounds": len(samples), "soak_failed": failed, "rss_kib": samples,
            "rss_growth": growth}


async def run(args):
    report = {}
    ok = True
    idle = []
    if args.idle > 0:
        for begin in range(0, args.idle, 500):
            idle += await asyncio.gather(
                *(connect(args) for _ in range(min(500, args.idle - begin))))
        report["idle_connections"] = len(idle)
        report["health_beside_idle"] = (await get(args, "/health")).decode()
        report["connections_before"] = await open_connections(args)
    if args.aborts > 0:
        report.update(await abort_many(args, random.Random(args.seed)))
        ok = ok and report["used_slots_after"] == 0
    elif args.soak > 0:
        report.update(await soak(args))
        ok = ok and report["soak_failed"] == 0 and report["rss_growth"] < 0.05
    else:
        results, duration = await load(args)
        report.update(summary(results, duration))
        errors = sorted({r.error for r in results if r.error})
        report["errors"] = errors[:5]
        wrong = await compare_with_alone(args, results) if args.compare else []
        report["different_from_alone"] = len(wrong)
        for line in wrong[:5]:
            print(line, file=sys.stderr)
        ok = ok and not errors and not wrong
    if idle:  # the server has them still: none was closed on either side
        report["connections_after"] = await open_connections(args)
        ok = ok and min(report["connections_before"], report["connections_after"]) >= len(idle)
    for _, writer in idle:
        writer.close()
    print(json.dumps(report, indent=2))
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--api-key", default=os.environ.get("STATEPACK_API_KEY", ""))
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--variants", type=int, default=8, help="different ends of every prompt")
    parser.add_argument("--no-compare", dest="compare", action="store_false",
                        help="do not ask every request again alone")
    parser.add_argument("--idle", type=int, default=0, help="connections to hold open meanwhile")
    parser.add_argument("--aborts", type=int, default=0, help="instead: clients that leave")
    parser.add_argument("--soak", type=float, default=0, help="instead: seconds of repeated load")
    parser.add_argument("--pid", type=int, default=0, help="of the server, for --soak")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.soak > 0 and args.pid == 0:
        parser.error("--soak needs the server's --pid")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    sys.exit(0 if asyncio.run(run(args)) else 1)


if __name__ == "__main__":
    main()
