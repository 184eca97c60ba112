#!/usr/bin/env python3
"""Writes test/data/klt_goldens.json: pages of klt of small states, computed without the library.

One value at a time, in numpy float32 scalars, from the definition in docs/klt.md. Run from the
repository root after the format changed on purpose:

    python3 test/codec/make_klt_goldens.py
"""
import json
import pathlib
import sys

import numpy as np

from make_codec_goldens import F, clamp, lcg, le16, pack, states

STEP = {2: 0.9957, 3: 0.586, 4: 0.3352, 5: 0.1881, 6: 0.1041, 8: 0.0308}


def column_half(x):
    """(stored bits, value) of a column scale: at most 65504, may be 0."""
    h = np.float16(clamp(F(x), F(0), F(65504)))
    return int(h.view(np.uint16)), F(h)


FACTORS = [F(0.5), F(0.75), F(1), F(1.5)]


def by_parts(values):
    """Column j into part j mod 16, parts as a tree."""
    p = [F(0)] * 16
    for j, x in enumerate(values):
        p[j % 16] = p[j % 16] + x
    s = [(p[l] + p[l + 8]) + (p[l + 4] + p[l + 12]) for l in range(4)]
    return (s[0] + s[1]) + (s[2] + s[3])


def klt_page(Z, bits, r):
    K, V = Z.shape
    kept = [i for i in range(K) if bits[i] > 0]
    if not kept:
        return b"", np.zeros((K, V), F)
    codes, restored = np.zeros((K, V), int), np.zeros((K, V), F)
    reach = {i: F(0.5) * F(2 ** bits[i] - 1) * F(STEP[bits[i]]) for i in kept}
    y = {i: [F(Z[i, j]) * (F(1) / F(r[i])) for j in range(V)] for i in kept}
    c0 = []
    for j in range(V):
        total = most = F(0)
        for i in kept:
            total = total + y[i][j] * y[i][j]
            limit = max(reach[i] / F(0.65), F(3.8))
            most = max(most, np.abs(y[i][j]) * (F(1) / limit))
        c0.append(column_half(max(np.sqrt(total / F(len(kept))), most))[1])
    inverse = [F(1) / c if c > 0 else F(0) for c in c0]
    c_squares = by_parts([c * c for c in c0])
    factor = {}
    for i in kept:
        errors = []
        for f in FACTORS:
            over = [max(np.abs(y[i][j]) - f * reach[i] * c0[j], F(0)) for j in range(V)]
            step = f * F(STEP[bits[i]])
            errors.append(by_parts([x * x for x in over]) + step * step / F(12) * c_squares)
        factor[i] = int(np.argmin(errors))
    columns = []
    for j in range(V):
        num = den = F(0)
        for i in kept:
            b, step = bits[i], FACTORS[factor[i]] * F(STEP[bits[i]])
            middle = F(2 ** (b - 1))
            place = y[i][j] * inverse[j] * (F(1) / step) + middle
            codes[i, j] = int(clamp(place, F(0), F(2**b - 1)))
            v = (F(codes[i, j]) - (middle - F(0.5))) * step
            wv = F(r[i]) * F(r[i]) * v
            num = num + wv * y[i][j]
            den = den + wv * v
        stored, c = column_half(num / den)
        columns.append(stored)
        for i in kept:
            b = bits[i]
            f = FACTORS[factor[i]] * (F(r[i]) * F(STEP[b]))
            restored[i, j] = f * c * (F(codes[i, j]) - F(2**b - 1) / F(2))
    page = b""
    for b in (8, 6, 5, 4, 3, 2):
        rows = [i for i in range(K) if bits[i] == b]
        for begin in range(0, V, 16):
            for i in rows:
                page += pack([int(c) for c in codes[i, begin : begin + 16]], b)
    ordered = [factor[i] for b in (8, 6, 5, 4, 3, 2) for i in range(K) if bits[i] == b]
    return page + le16(columns) + pack(ordered, 2), restored


def main():
    named = list(states()) + [("tiles of 16 and one of 5 columns", lcg(21, 24, 37))]
    widths = {"mixed": [4, 0, 3, 8, 5, 2, 6, 4, 3, 0, 2], "all 2": [2], "none": [0], "0 and 8": [0, 8]}
    cases = []
    for index, (_, X) in enumerate(named):
        for name, cycle in widths.items():
            K = X.shape[0]
            bits = [cycle[i % len(cycle)] for i in range(K)]
            r = [float(F(2.0 ** (i % 5 - 2)) * F(1 + 0.125 * (i % 3))) for i in range(K)]
            page, restored = klt_page(X, bits, r)
            cases.append({"widths": name, "state": index, "bits": bits, "row_scale": r, "page": page.hex(),
                          "restored": np.ascontiguousarray(restored, "<f4").tobytes().hex()})
    document = {
        "made_by": "test/codec/make_klt_goldens.py",
        "states": [{"name": n, "K": X.shape[0], "V": X.shape[1], "values": X.astype("<f4").tobytes().hex()}
                   for n, X in named],
        "cases": cases,
    }
    path = pathlib.Path("test/data/klt_goldens.json")
    path.write_text(json.dumps(document, indent=0) + "\n")
    print(f"{path}: {len(cases)} cases, {path.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    np.seterr(over="ignore")
    main()
