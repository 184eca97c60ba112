#!/usr/bin/env python3
"""Makes src/model/unicode_since_14.inc: what Unicode assigned after version 14, by category.

The categories come from the regex engine of the `tokenizers` package (the one that tokenizers were
trained with), asked character by character; version 14 comes from Python 3.11's `unicodedata`. Each
row is {first, last, stand-in}: the stand-in was assigned by version 14, has the same general category,
is Han exactly if the range is, and takes as many bytes in UTF-8.
"""
import pathlib
import sys
import unicodedata

from tokenizers import Regex, pre_tokenizers

CATEGORIES = ("Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Cf").split()
ALL = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def members(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    return {c for c in ALL if not split.pre_tokenize_str(chr(c))}


def n_bytes(c):
    return len(chr(c).encode())


def main():
    if unicodedata.unidata_version != "14.0.0":
        sys.exit(f"needs a Python with Unicode 14 (3.11), this one has {unicodedata.unidata_version}")
    han = members(r"\p{Han}")
    rows = []
    for category in CATEGORIES:
        now = members(r"\p{%s}" % category)
        before = {c for c in ALL if unicodedata.category(chr(c)) == category}
        for c in sorted(now - before):
            if unicodedata.category(chr(c)) != "Cn":
                continue  # moved between categories; version 14 already knew it
            key = (category, c in han, n_bytes(c))
            if rows and rows[-1][1] == c - 1 and rows[-1][2] == key:
                rows[-1][1] = c
            else:
                rows.append([c, c, key])
    lines = []
    for first, last, (category, is_han, length) in sorted(rows):
        stand_in = next(c for c in ALL if unicodedata.category(chr(c)) == category
                        and (c in han) == is_han and n_bytes(c) == length)
        lines.append(f"{{0x{first:X}, 0x{last:X}, 0x{stand_in:X}}},  // {category}")
    target = pathlib.Path(__file__).resolve().parents[2] / "src/model/unicode_since_14.inc"
    target.write_text("// Made by test/model/make_unicode_table.py.\n" + "\n".join(lines) + "\n")
    print(len(lines), "ranges")


if __name__ == "__main__":
    main()
