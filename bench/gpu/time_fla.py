#!/usr/bin/env python3
"""Times the fused recurrent kernels of flash-linear-attention (PyPI: fla-core, MIT) on the shapes of
bench_gpu: one token of a batch, f32 states, launches replayed from a CUDA graph over cold states.

    python3 bench/gpu/time_fla.py [--out FILE.json]        needs torch, triton and fla-core
"""

import argparse
import json
import statistics

import torch
from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
from fla.ops.kda import fused_recurrent_kda

WORKING_SET = 512 << 20  # bytes of all states together: several times the L2 cache
BATCHES = (1, 8, 32, 64, 128, 256, 512, 1024)
SHAPES = (("scalar", 16, 32), ("channel", 32, 32))
K = V = 128


def time_step(gate, heads, value_heads, batch):
    """Median microseconds of one launch."""
    state_bytes = batch * value_heads * K * V * 4
    sets = max(2, min(64, WORKING_SET // state_bytes))
    torch.manual_seed(0)

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, dtype=dtype, device="cuda")

    q, k = draw(batch, 1, heads, K), draw(batch, 1, heads, K)
    v = draw(batch, 1, value_heads, V)
    beta = draw(batch, 1, value_heads).sigmoid()
    gate_shape = (batch, 1, value_heads) if gate == "scalar" else (batch, 1, value_heads, K)
    g = -torch.rand(*gate_shape, dtype=torch.float32, device="cuda") * 0.05
    states = [draw(batch, value_heads, K, V, dtype=torch.float32) for _ in range(sets)]
    step = fused_recurrent_gated_delta_rule if gate == "scalar" else fused_recurrent_kda

    def run():
        for state in states:
            step(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
                 use_qk_l2norm_in_kernel=True)

    with torch.no_grad():
        run()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / sets)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}")
    rows = []
    for gate, heads, value_heads in SHAPES:
        for batch in BATCHES:
            micros = time_step(gate, heads, value_heads, batch)
            rows.append({"gate": gate, "heads": f"{heads}/{value_heads}", "batch": batch,
                         "us": micros})
            print(f"fla f32 {gate:8} {heads}/{value_heads} batch {batch:5} {micros:9.2f} us")
            torch.cuda.empty_cache()
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"device": device, "torch": torch.__version__, "cases": rows}, file, indent=1)


if __name__ == "__main__":
    main()
