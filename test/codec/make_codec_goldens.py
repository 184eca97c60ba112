#!/usr/bin/env python3
"""Writes test/data/codec_goldens.json: pages of small states, computed without the library.

Every codec is written here from its definition, one value at a time, in numpy float32 scalars;
halves are numpy's float16 and runs of codes are packed through one big integer. Run from the
repository root after a format changed on purpose:

    python3 test/codec/make_codec_goldens.py
"""
import json
import pathlib
import sys

import numpy as np

F = np.float32


def f16_bits(x):
    return int(np.float16(x).view(np.uint16))


def scale(x):
    """(stored bits, value) of a scale: clamped to [2^-24, 65504], rounded to half."""
    x = min(max(F(x), F(2.0**-24)), F(65504))
    h = np.float16(x)
    return int(h.view(np.uint16)), F(h)


def rne(x):
    return int(np.rint(np.float64(x)))  # numpy rounds ties to even


def clamp(x, lo, hi):
    return min(max(x, lo), hi)


def pack(codes, bits):
    run = 0
    for e, c in enumerate(codes):
        run |= (c & ((1 << bits) - 1)) << (e * bits)
    return run.to_bytes((len(codes) * bits + 7) // 8, "little")


def le16(values):
    return b"".join(int(v).to_bytes(2, "little") for v in values)


def symmetric(values, bits):
    """Codes, stored scale and restored values of one group."""
    L = 2 ** (bits - 1) - 1
    stored, s = scale(max(abs(v) for v in values) / F(L))
    codes = [rne(clamp(v / s, -L, L)) for v in values]
    return codes, stored, [s * F(c) for c in codes]


def affine(values, bits):
    L = 2**bits - 1
    lo, hi = min([F(0), *values]), max([F(0), *values])
    stored, s = scale((hi - lo) / F(L))
    z = rne(clamp(-lo / s, 0, L))
    codes = [clamp(rne(clamp(v / s, -1000, 1000)) + z, 0, L) for v in values]
    return codes, stored, z, [s * F(c - z) for c in codes]


def int_page(X, bits, options):
    K, V = X.shape
    group = int(options["group"]) if options["group"] != "none" else 0
    rows, cols = {
        "row": (1, V),
        "column": (K, 1),
        "tensor": (K, V),
        "group": (1, group) if options["axis"] == "value" else (group, 1),
    }[options["layout"]]
    codes, restored, scales = np.zeros((K, V), int), np.zeros((K, V), F), []
    for i in range(0, K, rows):
        for j in range(0, V, cols):
            tile = X[i : i + rows, j : j + cols]
            c, stored, r = symmetric(list(tile.flat), bits)
            codes[i : i + rows, j : j + cols] = np.reshape(c, tile.shape)
            restored[i : i + rows, j : j + cols] = np.reshape(r, tile.shape)
            scales.append(stored)
    return pack([int(c) for c in codes.flat], bits) + le16(scales), restored


def dsq_page(X, bits, options):
    swapped = options["axes"] == "column-row"
    A = X.T if swapped else X
    n, m = A.shape
    L = 2 ** (bits - 1) - 1
    r = []
    for i in range(n):
        total = F(0)
        if swapped:  # one running sum down the column
            for v in A[i]:
                total = total + abs(v)
        else:  # 16 interleaved sums, then halves added to halves
            lane = [F(0)] * 16
            for j, v in enumerate(A[i]):
                lane[j % 16] = lane[j % 16] + abs(v)
            while len(lane) > 1:
                half = len(lane) // 2
                lane = [lane[k] + lane[k + half] for k in range(half)]
            total = lane[0]
        r.append(scale(np.sqrt(total / F(m))))
    c = [scale(max(abs(A[i, j]) / r[i][1] for i in range(n)) / F(L)) for j in range(m)]
    codes, restored = np.zeros((n, m), int), np.zeros((n, m), F)
    for i in range(n):
        for j in range(m):
            step = r[i][1] * c[j][1]
            codes[i, j] = rne(clamp(A[i, j] / step, -L, L))
            restored[i, j] = step * F(codes[i, j])
    if swapped:
        codes, restored, r, c = codes.T, restored.T, c, r
    page = pack([int(x) for x in codes.flat], bits) + le16(s for s, _ in r) + le16(s for s, _ in c)
    return page, restored


def pace_page(X, arg, options, high):
    K, V = X.shape
    group = int(options["group"])
    bits = 8 if high else 4
    restored, page = np.zeros((K, V), F), b""
    for j in range(V):
        codes, scales, zeros = [], [], []
        for i in range(0, K, group):
            values = list(X[i : i + group, j])
            if arg == "4":
                c, stored, back = symmetric(values, bits)
            else:
                c, stored, z, back = affine(values, bits)
                zeros.append(z)
            codes += c
            scales.append(stored)
            restored[i : i + group, j] = back
        page += pack(codes, bits) + le16(scales) + pack(zeros, bits)
    return page, restored


def cast_page(X, name):
    if name == "fp32":
        return X.tobytes(), X
    if name == "fp16":
        h = np.clip(X, F(-65504), F(65504)).astype(np.float16)
        return h.tobytes(), h.astype(F)
    u = X.view(np.uint32).astype(np.uint64)
    u = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    u = np.where((u & 0x7FFF) == 0x7F80, u - 1, u).astype(np.uint16)
    return u.tobytes(), (u.astype(np.uint32) << 16).view(F)


def lcg(seed, K, V):
    """The state of golden G8."""
    s, X = seed, np.zeros((K, V), F)
    for i in range(K):
        for j in range(V):
            s = (1664525 * s + 1013904223) % 2**32
            X[i, j] = F((s >> 8) * 2.0**-24 - 0.5) * F(2.0 ** (i % 5 - 2)) * F(2.0 ** (j % 7 - 3))
    return X


def states():
    yield "mixed magnitudes", lcg(1, 19, 21)
    yield "one row", lcg(3, 1, 18)
    yield "one column", lcg(4, 17, 1)
    ties = np.array([[7, 0.5, 1.5, 2.5], [-7, -0.5, -1.5, -2.5], [127, 3.5, 4.5, 0], [15, 0, 0.5, 31]], F)
    yield "ties, rounded to even", ties
    yield "zeros", np.zeros((6, 5), F)
    hot = lcg(5, 8, 8)
    hot[3] *= F(1000)
    yield "one hot row", hot
    yield "beyond the largest scale", lcg(6, 5, 6) * F(2.0**120)
    yield "below the smallest scale", lcg(7, 5, 6) * F(2.0**-24)
    yield "subnormal scales", lcg(8, 9, 6) * F(2.0**-14)
    yield "positive only: the zero point is 0", abs(lcg(9, 8, 3)) + F(1)
    yield "negative only: the zero point is the largest code", -abs(lcg(10, 8, 3)) - F(1)


def configurations():
    for name in ("fp32", "bf16", "fp16"):
        yield name, "", {}, lambda X, name=name: cast_page(X, name)
    for bits in (8, 6, 5, 4):
        for layout, group, axis in (
            ("row", "none", "value"),
            ("column", "none", "value"),
            ("tensor", "none", "value"),
            ("group", "4", "value"),
            ("group", "7", "value"),
            ("group", "4", "key"),
            ("group", "5", "key"),
        ):
            o = {"layout": layout, "group": group, "axis": axis}
            yield f"int{bits}", "", o, lambda X, b=bits, o=o: int_page(X, b, o)
    for bits in (8, 6, 4):
        for axes in ("row-column", "column-row"):
            o = {"axes": axes}
            yield "dsq", str(bits), o, lambda X, b=bits, o=o: dsq_page(X, b, o)
    for group in ("64", "4", "3"):
        o = {"group": group}
        yield "pace", "4", o, lambda X, o=o: pace_page(X, "4", o, False)
    for group in ("32", "4", "3"):
        for high in (False, True):
            o = {"group": group}
            yield "pace", "4/8", o, lambda X, o=o, h=high: pace_page(X, "4/8", o, h)


def main():
    named = list(states())
    cases = []
    for codec, arg, options, encode in configurations():
        for index, (_, X) in enumerate(named):
            page, restored = encode(X)
            case = {"codec": codec, "arg": arg, "options": options, "state": index,
                    "page": page.hex(), "restored": np.ascontiguousarray(restored, "<f4").tobytes().hex()}
            if arg == "4/8":
                case["high"] = encode.__defaults__[1]
            cases.append(case)
    document = {
        "made_by": "test/codec/make_codec_goldens.py",
        "states": [{"name": n, "K": X.shape[0], "V": X.shape[1], "values": X.astype("<f4").tobytes().hex()}
                   for n, X in named],
        "cases": cases,
    }
    path = pathlib.Path("test/data/codec_goldens.json")
    path.write_text(json.dumps(document, indent=0) + "\n")
    print(f"{path}: {len(cases)} cases, {path.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    np.seterr(over="ignore")
    main()
