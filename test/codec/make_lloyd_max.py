#!/usr/bin/env python3
"""Writes src/codec/rotated/lloyd_max.inc: the least-squares codebooks of N(0, 1) for 2 to 8 bits.

The codewords are part of the page format, so they are numbers in the source and not computed at
start-up, where libraries may differ in the last bit. Newton's method on the thresholds, in float64:
a threshold lies midway between its neighbouring codewords, a codeword at the mean of its cell. Run
from the repository root:

    python3 test/codec/make_lloyd_max.py
"""
import math
import pathlib

import numpy as np


def density(x):
    return 0.0 if math.isinf(x) else math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def centroid(a, b):
    """Mean of N(0, 1) on [a, b], 0 <= a < b <= inf, and its derivatives by a and b."""
    mass = 0.5 * (math.erfc(a / math.sqrt(2)) - (0.0 if math.isinf(b) else math.erfc(b / math.sqrt(2))))
    c = (density(a) - density(b)) / mass
    by_b = 0.0 if math.isinf(b) else density(b) * (b - c) / mass
    return c, density(a) * (c - a) / mass, by_b


def codebook(bits):
    n = 2 ** (bits - 1)  # positive codewords
    # Companding: thresholds of a high-rate quantiser are quantiles of N(0, 3).
    t = np.zeros(n - 1)
    for i in range(1, n):
        lo, hi = 0.0, 40.0
        for _ in range(200):
            mid = (lo + hi) / 2
            lo, hi = (mid, hi) if math.erf(mid / math.sqrt(6)) < i / n else (lo, mid)
        t[i - 1] = lo
    for _ in range(200):
        edges = [0.0, *t, math.inf]
        cells = [centroid(edges[i], edges[i + 1]) for i in range(n)]
        f, J = np.zeros(n - 1), np.zeros((n - 1, n - 1))
        for i in range(n - 1):
            f[i] = t[i] - (cells[i][0] + cells[i + 1][0]) / 2
            J[i, i] = 1 - (cells[i][2] + cells[i + 1][1]) / 2
            if i > 0:
                J[i, i - 1] = -cells[i][1] / 2
            if i + 2 < n:
                J[i, i + 1] = -cells[i + 1][2] / 2
        step = np.linalg.solve(J, f)
        while np.any(np.diff([0.0, *(t - step)]) <= 0):  # keep the thresholds in order
            step = step / 2
        t = t - step
        if np.max(np.abs(step)) < 1e-11:
            break
    else:
        raise RuntimeError(f"{bits} bits: not converged")
    edges = [0.0, *t, math.inf]
    words = [centroid(edges[i], edges[i + 1])[0] for i in range(n)]
    error = 1 - 2 * sum(w * (density(edges[i]) - density(edges[i + 1])) for i, w in enumerate(words))
    return words, error


def main():
    lines = ["// Made by test/codec/make_lloyd_max.py; do not edit.", ""]
    for bits in range(2, 9):
        words, error = codebook(bits)
        lines.append(f"// {bits} bits, mean squared error {error:.7g}")
        text = [f"{float(np.float32(w))!r}f" for w in words]
        for i in range(0, len(text), 6):
            lines.append("    " + ", ".join(text[i : i + 6]) + ",")
    path = pathlib.Path("src/codec/rotated/lloyd_max.inc")
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[:12]))


if __name__ == "__main__":
    main()
