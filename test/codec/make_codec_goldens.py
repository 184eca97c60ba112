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

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import make_lloyd_max  # noqa: E402

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


def philox(counter, key):
    """Philox 4x32 in ten rounds, from the paper's definition."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


PLACE = {"seed": 2**33 + 5, "layer": 3, "step": 2**32 + 7}  # of stochastic roundings; head 1


def drawn(X):
    """The number of every element of a head, [K][V]."""
    n = [
        philox((e // 4, PLACE["layer"] << 16 | 1, PLACE["step"] & 0xFFFFFFFF, PLACE["step"] >> 32),
               (PLACE["seed"] & 0xFFFFFFFF, PLACE["seed"] >> 32))[e % 4]
        for e in range(X.size)
    ]
    return np.reshape(n, X.shape)


def stored(x, kind, floor=True):
    """(bytes, value) of a scale, or without `floor` of any value, in f16 or f32."""
    if kind == "f16":
        x = max(F(x), F(2.0**-24)) if floor else F(x)
        h = np.float16(min(max(x, F(-65504)), F(65504)))
        return h.tobytes(), F(h)
    x = F(min(max(F(x), F(1e-8)), F(2.0**120))) if floor else F(x)
    return x.tobytes(), x


def tiles(X, options):
    """Slices of the tiles that share a scale, row-major."""
    K, V = X.shape
    group = int(options["group"]) if options["group"] != "none" else 0
    rows, cols = {
        "row": (1, V),
        "column": (K, 1),
        "tensor": (K, V),
        "tile": (K, min(32, V)),
        "group": (1, group) if options["axis"] == "value" else (group, 1),
    }[options["layout"]]
    return [np.s_[i : i + rows, j : j + cols] for i in range(0, K, rows) for j in range(0, V, cols)]


def general_int_page(X, bits, options, rounding, before=None):
    """Integers with everything but what int_page() knows. Returns page, restored and residual."""
    affine, kind = options["code"] == "affine", options["scale"]
    L = 2**bits - 1 if affine else 2 ** (bits - 1) - 1
    T = X if before is None or options["reads"] == "sum" else X + before
    codes, restored = np.zeros(X.shape, int), np.zeros(X.shape, F)
    scales, minima, steps = b"", b"", {}
    numbers = drawn(X) if rounding == "stochastic" else None
    for at, where in enumerate(tiles(X, options)):
        t = T[where]
        if affine:
            lo = F(min(t.flat)) + F(0)
            raw, s = stored((F(max(t.flat)) + F(0) - lo) / F(L), kind)
            raw_lo, lo = stored(lo, kind, floor=False)
            minima += raw_lo
            c = [rne(clamp((v - lo) / s, 0, L)) for v in t.flat]
            r = [s * F(v) + lo for v in c]
        else:
            raw, s = stored(max(abs(v) for v in t.flat) / F(L), kind)
            if numbers is None:
                c = [rne(clamp(v / s, -L, L)) for v in t.flat]
            else:
                c = [
                    clamp(int(np.floor(clamp(v / s, F(-L - 1), F(L)) + F(int(u) >> 8) * F(2.0**-24))), -L, L)
                    for v, u in zip(t.flat, numbers[where].flat)
                ]
            r = [s * F(v) for v in c]
        scales += raw
        steps[at] = s
        codes[where], restored[where] = np.reshape(c, t.shape), np.reshape(r, t.shape)
    page = pack([int(c) for c in codes.flat], bits) + scales + minima
    if rounding != "feedback":
        return page, restored, None
    rho, residual = T - restored, options["residual"]
    if residual in ("f32", "f16"):
        kept = np.array([stored(v, residual, floor=False)[1] for v in rho.flat], F).reshape(X.shape)
        page += b"".join(stored(v, residual, floor=False)[0] for v in rho.flat)
    else:
        kept, back, scales = np.zeros(X.shape, int), np.zeros(X.shape, F), b""
        for at, where in enumerate(tiles(X, options)):
            lo, hi = {"int8": (-127, 127), "int4": (-7, 7), "implied": (-8, 7)}[residual]
            if residual == "implied":
                s = steps[at] / F(16)
            else:
                raw, s = stored(max(abs(v) for v in rho[where].flat) / F(hi), kind)
                scales += raw
            c = [rne(clamp(v / s, lo, hi)) for v in rho[where].flat]
            kept[where] = np.reshape(c, rho[where].shape)
            back[where] = np.reshape([s * F(v) for v in c], rho[where].shape)
        page += pack([int(c) for c in kept.flat], 8 if residual == "int8" else 4) + scales
        kept = back
    if options["reads"] == "sum":
        restored = restored + kept
    return page, restored, kept


def positive_grid(exponent_bits, mantissa_bits, bias, largest):
    """Every magnitude of a float format up to `largest`, in the order of its codes."""
    grid = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        e, m = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        value = m * 2.0 ** (1 - bias - mantissa_bits)
        if e > 0:
            value = (2**mantissa_bits + m) * 2.0 ** (e - bias - mantissa_bits)
        if value <= largest:
            grid.append(value)
    return grid


FORMATS = {  # grid, bits, largest, floor(log2 largest), mantissa bits
    "e4m3": (positive_grid(4, 3, 7, 448), 8, 448, 8, 3),
    "e5m2": (positive_grid(5, 2, 15, 57344), 8, 57344, 15, 2),
    "e2m3": (positive_grid(2, 3, 1, 7.5), 6, 7.5, 2, 3),
    "e2m1": (positive_grid(2, 1, 1, 6), 4, 6, 2, 1),
    "f16": (positive_grid(5, 10, 15, 65504), 16, 65504, 15, 10),
}


def to_format(x, name, number=None):
    """Code of x: the nearest value of the grid, of two as near the even code; or by chance."""
    grid, bits, largest, _, mantissa = FORMATS[name]
    a = min(abs(float(x)), float(largest))
    sign = int(np.signbit(x)) << (bits - 1)
    above = int(np.searchsorted(grid, a))
    if grid[above] == a:
        return sign | above
    lo, hi = grid[above - 1], grid[above]
    if number is None:
        nearer = above if a - lo > hi - a else above - 1
        return sign | (nearer if a - lo != hi - a else above - above % 2)
    # (x - lo) / (hi - lo) + u >= 1 takes hi; u has as many bits as f32 has behind the mantissa, and
    # f32 adds them in units of the last place.
    n_bits = 23 - mantissa
    u = F((int(number) >> (32 - n_bits)) * 2.0**-n_bits)
    return sign | (above if np.floor(F(a / (hi - lo)) + u) > np.floor(a / (hi - lo)) else above - 1)


def from_format(code, name):
    grid, bits = FORMATS[name][:2]
    value = F(grid[code & (2 ** (bits - 1) - 1)])
    return -value if code >> (bits - 1) else value


def float_page(X, name, scaling, options, rounding):
    """fp8, mxfp and nvfp: x^ = step * element(x / step)."""
    _, bits, largest, exponent, _ = FORMATS[name]
    codes, restored, scales, tail = np.zeros(X.shape, int), np.zeros(X.shape, F), b"", b""
    numbers = drawn(X) if rounding == "stochastic" else None
    if scaling == "two-level":
        tail, t = stored(max(abs(v) for v in X.flat) / F(448 * largest), "f32")
    for where in tiles(X, options):
        peak = F(max(abs(v) for v in X[where].flat))
        if scaling == "power":
            e = -127 if peak == 0 else max(int(np.floor(np.log2(np.float64(peak)))) - exponent, -127)
            scales += bytes([e + 127])
            step = F(2.0**e)
        elif scaling == "two-level":
            code = to_format(peak / (F(largest) * t), "e4m3")
            scales += bytes([code])
            step = from_format(code, "e4m3") * t
        else:
            target = 240 if options["layout"] == "tile" else largest
            raw, step = stored(peak / F(target), scaling)
            scales += raw
        for i, v in np.ndenumerate(X[where]):
            number = None if numbers is None else numbers[where][i]
            code = to_format(v / (step if step > 0 else F(np.inf)), name, number)
            codes[where][i] = code
            restored[where][i] = step * from_format(code, name)
    return pack([int(c) for c in codes.flat], bits) + scales + tail, restored


def chance_cast_page(X, name):
    """bf16 or fp16 with stochastic rounding."""
    numbers = drawn(X)
    if name == "fp16":
        codes = [to_format(v, "f16", u) for v, u in zip(X.flat, numbers.flat)]
        h = np.array(codes, np.uint16).view(np.float16).reshape(X.shape)
        return h.tobytes(), h.astype(F)
    u = X.view(np.uint32).astype(np.uint64)
    u = (u + (numbers.astype(np.uint64) >> np.uint64(16))) >> np.uint64(16)
    u = u.astype(np.uint16)
    return u.tobytes(), (u.astype(np.uint32) << 16).view(F)


def hadamard(x):
    """Blocks of the largest power of two that divides the length, butterflies narrow to wide."""
    x = [F(v) for v in x]
    block = len(x) & -len(x)
    width = 1
    while width < block:
        for i in range(0, len(x), 2 * width):
            for j in range(i, i + width):
                x[j], x[j + width] = x[j] + x[j + width], x[j] - x[j + width]
        width *= 2
    return [v * F(1 / np.sqrt(np.float64(block))) for v in x]


def signs_of(n, head):
    seed = 0x526F746174653031
    key = (seed & 0xFFFFFFFF, seed >> 32)
    return [F(-1 if philox((j // 32, head, 0, 0), key)[0] >> (j % 32) & 1 else 1) for j in range(n)]


def lane_sum(values):
    """16 interleaved sums, then halves added to halves."""
    lane = [F(0)] * 16
    for j, v in enumerate(values):
        lane[j % 16] = lane[j % 16] + v
    while len(lane) > 1:
        half = len(lane) // 2
        lane = [lane[k] + lane[k + half] for k in range(half)]
    return lane[0]


def bounded(x):
    return [F(clamp(v, F(-(2.0**100)), F(2.0**100))) for v in x]


def rotated_page(X, codec, bits):
    K, V = X.shape
    signs = signs_of(V, 1)
    words, _ = make_lloyd_max.codebook(bits)
    words = [F(w) for w in words]
    codes, scales, restored = [], [], np.zeros(X.shape, F)
    for i in range(K):
        y = [s * v for s, v in zip(signs, bounded(X[i]))]
        if codec == "turboquant":
            h = np.float16(min(np.sqrt(lane_sum([v * v for v in y])), F(65504)))
            y = [v / F(h) for v in y] if h > 0 else y
            y = [v * np.sqrt(F(V)) for v in hadamard(y)]
            c = []
            for v in y:
                index = sum(abs(v) >= F(0.5) * (words[k] + words[k + 1]) for k in range(len(words) - 1))
                c.append(int(index) + (int(np.signbit(v)) << (bits - 1)))
            size = [words[k & (2 ** (bits - 1) - 1)] / np.sqrt(F(V)) for k in c]
            back = hadamard([-w if k >> (bits - 1) else w for w, k in zip(size, c)])
            restored[i] = [s * v * F(h) for s, v in zip(signs, back)]
            scales.append(int(h.view(np.uint16)))
        else:
            c, bits_of_scale, back = symmetric(hadamard(y), bits)
            restored[i] = [s * v for s, v in zip(signs, hadamard(back))]
            scales.append(bits_of_scale)
        codes += c
    return pack(codes, bits) + le16(scales), restored


def damp_page(X, arg, protected):
    K, V = X.shape
    bits, lean = int(arg[0]), arg.endswith("lean")
    L = 2**bits - 1
    halves, codes, scales, zeros, restored = b"", [], b"", b"", np.zeros(X.shape, F)
    for i in range(K):
        if i in protected:
            h = np.clip(X[i], F(-65504), F(65504)).astype(np.float16)
            halves += h.tobytes()
            restored[i] = h.astype(F)
            continue
        y, back = hadamard(bounded(X[i])), []
        for j in range(0, V, V if lean else 32):
            group = y[j : j + (V if lean else 32)]
            if lean:
                c, bits_of_scale, z, r = affine(group, bits)
                scales += le16([bits_of_scale])
                zeros += bytes([z])
            else:
                lo = min(group) + F(0)
                raw, s = stored((max(group) + F(0) - lo) / F(L), "f16")
                raw_lo, lo = stored(lo, "f16", floor=False)
                c = [rne(clamp((v - lo) / s, 0, L)) for v in group]
                r = [s * F(v) + lo for v in c]
                scales += raw
                zeros += raw_lo
            codes += c
            back += r
        restored[i] = hadamard(back)
    return halves + pack(codes, bits) + scales + zeros, restored


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


# States of the later configurations: few, so that the file stays small.
LATER = ("mixed magnitudes", "one row", "one column", "zeros", "one hot row", "beyond the largest scale")


def later_configurations():
    """(codec, arg, options, extra keys of the case, encode)"""
    plain = {"layout": "row", "group": "none", "axis": "value", "code": "symmetric", "scale": "f16"}

    def ints(rounding, before=None, **options):
        o = {**plain, "residual": "none", "reads": "code", **options}
        def encode(X, bits):
            rho = None if before is None else general_int_page(before(X), bits, o, rounding)[2]
            return general_int_page(X, bits, o, rounding, rho)[:2]
        return o, encode

    for bits in (8, 4):
        for layout in ({"layout": "row"}, {"layout": "column"}, {"layout": "group", "group": "7"}):
            for more in ({"code": "affine"}, {"code": "affine", "scale": "f32"}, {"scale": "f32"}):
                o, encode = ints("nearest", **layout, **more)
                yield f"int{bits}", "", o, {}, lambda X, b=bits, e=encode: e(X, b)
        o, encode = ints("stochastic")
        yield f"int{bits}", "", o, {"rounding": "stochastic"}, lambda X, b=bits, e=encode: e(X, b)
    half = lambda X: X * F(0.4375)  # what was packed before
    for bits, residual, reads, scale, layout in (
        (8, "int4", "code", "f32", "column"),
        (8, "int8", "code", "f32", "column"),
        (8, "implied", "code", "f32", "column"),
        (8, "f16", "code", "f32", "row"),
        (6, "f32", "code", "f16", "column"),
        (8, "int4", "sum", "f32", "column"),
    ):
        o, encode = ints("feedback", half, layout=layout, scale=scale, residual=residual, reads=reads)
        extra = {"rounding": "feedback", "before": 0.4375}
        yield f"int{bits}", "", o, extra, lambda X, b=bits, e=encode: e(X, b)

    for name in ("bf16", "fp16"):
        yield name, "", {}, {"rounding": "stochastic"}, lambda X, n=name: chance_cast_page(X, n)

    for form in ("e4m3", "e5m2"):
        for layout, group, axis, scale in (
            ("tile", "none", "value", "f32"),
            ("row", "none", "value", "f16"),
            ("column", "none", "value", "f32"),
            ("tensor", "none", "value", "f32"),
            ("group", "5", "value", "f16"),
            ("group", "4", "key", "f16"),
        ):
            if layout == "tile" and form == "e5m2":
                continue
            o = {"layout": layout, "group": group, "axis": axis, "format": form, "scale": scale}
            yield "fp8", "", o, {}, lambda X, f=form, s=scale, o=o: float_page(X, f, s, o, "nearest")
    o = {"layout": "row", "group": "none", "axis": "value", "format": "e4m3", "scale": "f16"}
    yield "fp8", "", o, {"rounding": "stochastic"}, lambda X, o=o: float_page(X, "e4m3", "f16", o, "stochastic")
    for codec, form, scaling, width in (
        ("mxfp8", "e4m3", "power", "32"),
        ("mxfp6", "e2m3", "power", "32"),
        ("mxfp4", "e2m1", "power", "32"),
        ("nvfp6", "e2m3", "two-level", "16"),
        ("nvfp4", "e2m1", "two-level", "16"),
    ):
        for group, axis in ((width, "value"), ("4", "value"), ("3", "key")):
            o = {"group": group, "axis": axis}
            t = {**o, "layout": "group"}
            yield codec, "", o, {}, lambda X, f=form, s=scaling, t=t: float_page(X, f, s, t, "nearest")
    for bits in (2, 3, 4, 5, 6, 8):
        yield "turboquant", str(bits), {}, {}, lambda X, b=bits: rotated_page(X, "turboquant", b)
    for bits in (4, 8):
        yield "quarot", str(bits), {}, {}, lambda X, b=bits: rotated_page(X, "quarot", b)
    for arg in ("8", "4", "4-lean"):
        for rows in ((0, 3, 7), ()):
            yield "damp", arg, {}, {"protected": rows}, lambda X, a=arg, r=rows: damp_page(X, a, r)


def main():
    named = list(states())
    cases = []
    for codec, arg, options, extra, encode in later_configurations():
        for index, (state_name, X) in enumerate(named):
            if state_name not in LATER:
                continue
            page, restored = encode(X)
            cases.append({"codec": codec, "arg": arg, "options": options, "state": index, **extra,
                          "page": page.hex(),
                          "restored": np.ascontiguousarray(restored, "<f4").tobytes().hex()})
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
        "place": PLACE,
        "states": [{"name": n, "K": X.shape[0], "V": X.shape[1], "values": X.astype("<f4").tobytes().hex()}
                   for n, X in named],
        "cases": cases,
    }
    path = pathlib.Path("test/data/codec_goldens.json")
    path.write_text(json.dumps(document, indent=0) + "\n")
    print(f"{path}: {len(cases)} cases, {path.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    np.seterr(over="ignore", divide="ignore", invalid="ignore")
    main()
