#!/usr/bin/env python3
"""Makes test/data/tokenizers/* (small tokenizers) and test/data/tokenizer_goldens.json.

The ids come from the packages that models are trained with: `tokenizers` for tokenizer.json files, and
`tiktoken` behind the vendor's cutting rules for tiktoken.model. test_tokenizer.cc compares.
Special parsing off is the same file without its added tokens.
"""
import base64
import itertools
import json
import pathlib
import random

import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "test/data/tokenizers"
MARKS_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
                 r"|\s*[\r\n]+|\s+(?!\S)|\s+")
KIMI_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join([
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}*{KIMI_LOWER}+{CONTRACTION}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}+{KIMI_LOWER}*{CONTRACTION}",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
MAX_CHARACTERS, MAX_RUN = 400_000, 25_000

SENTENCES = [
    "The state of a model is what it remembers; it's small, and they've packed it.",
    "I'm sure we'll see that he'd said it doesn't matter, they're done.", "don't DON'T Don't it'S IT'S",
    "Der Zustand ist klein; über Größen und Äpfel läßt sich reden.", "L'état c'est moi, déjà vu, garçon, cœur.",
    "Состояние модели мало, и это хорошо.", "状态很小，模型记住了它。今天天气很好。", "これは小さな状態です。カタカナとひらがな。",
    "상태는 작습니다. 한국어 문장입니다.", "हिन्दी में एक छोटा वाक्य है।", "هذه جملة قصيرة بالعربية.", "שלום עולם, משפט קצר.",
    "x = foo(bar[0], 3.14159); // comment\n\treturn x + 1;\n}\n\n\n", "1234567890 2024-11-29 0x1f 1e-5 100,000.00",
    "<html><body class=\"a\">text</body></html>", "    indented\n        more\n    less\n", "🙂 😀😀 👩‍👩‍👧 🇩🇪 ❤️", "Việt Nam, tiếng Việt có dấu.",
]


def train(pattern, use_regex, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = byte_level if pattern is None else pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(SENTENCES * 20, trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False))
    return json.loads(tokenizer.to_str())


def added(id, content, special, normalized=False):
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": normalized, "special": special}


def make_tokenizers():
    """name -> (encode(text, special) -> ids, path below the repository)"""
    DATA.mkdir(parents=True, exist_ok=True)

    marks = train(MARKS_PATTERN, False, 700)
    marks["normalizer"] = {"type": "NFC"}
    n = len(marks["model"]["vocab"])
    marks["added_tokens"] = [added(n, "<|im_start|>", True), added(n + 1, "<|im_end|>", True),
                             added(n + 2, "<think>", False), added(n + 3, "</think>", False),
                             added(n + 4, "<|im_start|><think>", False), added(n + 5, "Cafe\u0301", False, True),
                             added(n + 6, "<tool>", False, True)]
    (DATA / "marks.json").write_text(json.dumps(marks, ensure_ascii=False, indent=0) + "\n")

    gpt2 = train(None, True, 500)
    gpt2["model"]["ignore_merges"] = True
    gpt2["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in gpt2["model"]["merges"]]
    # A token that no merge makes: only ignore_merges can find it.
    n = len(gpt2["model"]["vocab"])
    gpt2["model"]["vocab"]["Ġunmergeable"] = n
    gpt2["added_tokens"] = [added(n + 1, "<|endoftext|>", True)]
    (DATA / "gpt2.json").write_text(json.dumps(gpt2, ensure_ascii=False, indent=0) + "\n")

    (DATA / "kimi").mkdir(exist_ok=True)
    byte_of = dict(zip(map(ord, bytes_to_characters()), range(256)))
    ranks = {}
    trained = train(None, True, 600)["model"]
    singles = sorted((t for t in trained["vocab"] if len(t) == 1), key=lambda t: byte_of[ord(t)])
    for token in singles + [m if isinstance(m, str) else "".join(m) for m in trained["merges"]]:
        ranks.setdefault(bytes(byte_of[ord(c)] for c in token.replace(" ", "")), len(ranks))
    (DATA / "kimi/tiktoken.model").write_text(
        "".join(f"{base64.b64encode(t).decode()} {r}\n" for t, r in ranks.items()))
    named = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 255: "[PAD]"}
    (DATA / "kimi/tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {
        str(len(ranks) + i): {"content": c, "special": True} for i, c in named.items()}}, indent=0) + "\n")
    specials = {named.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(256)}
    kimi = tiktoken.Encoding("kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=specials)

    def encode_kimi(text, special):
        ids = []
        for part in kimi_parts(text):
            ids += kimi.encode(part, allowed_special="all" if special else set(), disallowed_special=())
        return ids

    result = {"kimi": (encode_kimi, "test/data/tokenizers/kimi")}
    for name, path in [("gdn", "models/statepack-gdn/tokenizer.json"), ("marks", "test/data/tokenizers/marks.json"),
                       ("gpt2", "test/data/tokenizers/gpt2.json")]:
        text = (ROOT / path).read_text()
        whole, plain = Tokenizer.from_str(text), Tokenizer.from_str(json.dumps({**json.loads(text), "added_tokens": []}))
        result[name] = (lambda t, special, w=whole, p=plain: (w if special else p).encode(t, add_special_tokens=False).ids,
                        path)
    return result


def bytes_to_characters():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = itertools.count(0x100)
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def kimi_parts(text):
    for begin in range(0, len(text), MAX_CHARACTERS):
        part = text[begin:begin + MAX_CHARACTERS]
        start = run = 0
        is_space = part[0].isspace()
        for i, c in enumerate(part):
            if c.isspace() != is_space:
                run, is_space = 1, c.isspace()
            else:
                run += 1
                if run > MAX_RUN:
                    yield part[start:i]
                    start, run = i, 1
        yield part[start:]


def hostile_texts():
    texts = list(SENTENCES) + [
        "", " ", "  ", "\n", "\r\n", "\t", "\0", "a\0b", " a", "a ", " a ", "  a  ", "a  b", "a   b   ", "\n\n\n", " \n", "\n ",
        " \n \n ", "a\n", "a\r\n\r\nb", "\r\r\n\n\r", "a \r\n b\t\r\n\tc", "x\n\n  y", "!\n\n", "!!\r\n?", " !\n", "\u00a0a\u00a0 b", "\u0085a \u0085",
        "\u180ea \u180e\u180e b", "\u2028\u2029a\u2028 b", "\u3000全角\u3000空白", "\u200ba\u200b \u200d", "\ufeffBOM", "a\u00ad-b", "\u1680x \u2003y\u2009z",
        "e\u0301", "e\u0301a\u0300o\u0302", "\u1112\u1161\u11ab", "q\u0323\u0307 vs q\u0307\u0323", "\u0301start", "a \u0301b", "1\u0301", "!\u0301",
        "\u212b \u2126 \u212a", "\u0958 \u09cb \u09c7\u09be", "\u0f77 \u0f73", "\u2adc", "\u03d3\u03d4", "\ufb01 \ufb00", "ﷺ", "Å Å Å", "ḍ̇", "क़ क़",
        "don't", "DON'T", "Don'T we'LL They'Re I'M he'D it'S", "'s 's's", "'ſ x'ſ 'S", "it'ſ okay", "'K 'k", "'\u212a", "'re'VE'll", "''s", "' s", "'st", "x's1's",
        "123", "1 2 3", "12345678901234567890", "१२३", "٣٤٥", "½ ² ③ Ⅷ", "1a2b", "3.14", "1,000", "𝟘𝟙𝟚",
        "hello世界", "世界hello", "世 界", "東京tower123", "你好，世界！", "㐀𠀀𪚥", "\U0002ebf0\U00031350\U0003134f x", "々〆〇ヶ", "カタカナｶﾀｶﾅ", "한국어abc", "ㄱㄴㄷ",
        "😀", "😀😀 😀", "👩‍👩‍👧‍👦", "🏳️‍🌈!", "🇩🇪🇫🇷", "a😀b", "❤️ ☺︎", "👍🏽", "#️⃣",
        "שלום", "مرحبا 123", "abc אבג def", "\u202eRTL\u202c", "\u0600\u0627\u064b\u064c\u064d", "ไทยไม่มีวรรค", "བོད་ཡིག", "မြန်မာ", "\u0d4d\u0d3e",
        "_", "__init__", "a_b", "snake_case_name", "CamelCaseName", "HTTPServer", "iPhone", "ÄÖÜäöü", "ǅ ǈ", "ʰʱʲ", "ªº", "ǅungla", "ЁЖИК ёжик", "ΑΒΓ αβγς", "İıſß",
        "a+b=c", "!@#$%^&*()", "...", "--- ---", "\"quoted\"", "(a)[b]{c}", "a/b\\c", "http://x.y/z?q=1&r=2#f", "user@example.com", "C++ C# F*", "$100 €20 ¥5",
        "\x01\x02\x7f\x80\x9f", "\ufffd\ufffe\uffff", "\ue000\U000f0000\U0010ffff", "\u0378\u0379 unassigned", "\U0001f8ff",
        "\u0897a \u10d70", "\U00010d50\U00010d70 \U00010d40", "\u1c89\u1c8a", "\u0ece\u0cf3x", "\U0001e030a", "\u2ffc\u31ef",
        "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>", "<|im_end|><|im_end|>", "a<|im_end|>b", "<|im_start", "|im_start|>", "<|im_<|im_end|>start|>",
        "<|IM_START|>", "< |im_start|>", " <|im_start|> ", "<|endoftext|>x<|endoftext|>", "<think>\nhm\n</think>\n\n", "<|im_start|><think>x", "<<think>>", "<thin<think>k>",
        "Café Cafe\u0301 Caf\u00e9s <tool><tool>", "e\u0301<tool>\u0301", "e<|im_start|>\u0301", "[BOS]hi[EOS][PAD]<|im_user|>x<|im_end|>", "<|reserved_token_604|><|reserved_token_9999|>",
        " unmergeable unmergeables unmergeable", "unmergeable",
    ]
    rng = random.Random(7)
    pools = ["abcXYZ 0123'stl.,!\n\r\t", "äöüßé e\u0301\u0300\u0323o\u0308 ", "中文字符 hello日本語かな한국", "\u0300\u0301\u0316\u0327\u0345\u093c\u094d\u0f71aeiou ",
             "אבגدهو123 ()[]", "😀👩\u200d\u2640\ufe0f🏽 a", " \t\n\r\u00a0\u2003\u3000\u0085\u2028x", "'sStTrReEvVmMlLdDſK ", "<|im_start|><|im_end|><think> ", "ABCabcΑαЖжǅʰª中 12'"]
    for pool in pools:
        for _ in range(16):
            texts.append("".join(rng.choice(pool) for _ in range(rng.randint(2, 30))))
    for _ in range(60):
        texts.append("".join(chr(rng.choice([rng.randrange(0x20, 0x250), rng.randrange(0x250, 0x3000), rng.randrange(0x3000, 0xD800),
                                             rng.randrange(0xE000, 0x10000), rng.randrange(0x10000, 0x32000)])) for _ in range(rng.randint(1, 12))))
    return texts


RUNS = [("a", 5000), (" ", 3000), ("\n", 3000), (" \n", 1500), ("ab", 2500), ("'s", 1000), ("1", 2000), ("!", 3000), ("中", 2000), ("é", 2000), ("e\u0301", 1000), ("\u0301", 1500),
        ("a\u0316\u0301", 800), ("\u0301\u0316", 800), ("<|im_end|>", 300), ("A", 3000), ("aA", 2000), ("😀", 700), (" a", 1500), ("\r\n", 1500), ("x ", 1500), ("<", 3000)]
# Longer than the vendor's cuts.
KIMI_RUNS = [("a", 60_001), (" ", 60_001), ("small ", 70_000), ("中", 30_000), ("x", 25_000), ("x", 25_001)]


def run_lengths(ids):
    return [[i, len(list(g))] for i, g in itertools.groupby(ids)]


def main():
    tokenizers = make_tokenizers()
    texts = hostile_texts()
    out = {"texts": texts, "runs": [], "tokenizers": {}, "decodes": []}
    n = 0
    for name, (encode, path) in sorted(tokenizers.items()):
        cases = []
        for text in texts:
            ids = {special: encode(text, special) for special in (False, True)}
            cases.append([ids[False]] if ids[False] == ids[True] else [ids[False], ids[True]])
        runs = [[unit, count, run_lengths(encode(unit * count, True))]
                for unit, count in RUNS + (KIMI_RUNS if name == "kimi" else [])]
        # Long alternations do not shorten as run lengths; only their count and sum are kept.
        for run in runs:
            if len(run[2]) > 60:
                ids = [i for i, k in run[2] for _ in range(k)]
                run[2] = {"n": len(ids), "weighted_sum": sum((k + 1) * i for k, i in enumerate(ids))}
        out["tokenizers"][name] = {"path": path, "ids": cases, "runs": runs}
        n += len(texts) * 2 + len(runs)
    del out["runs"]
    gdn = Tokenizer.from_file(str(ROOT / tokenizers["gdn"][1]))
    rng = random.Random(11)
    for _ in range(40):
        ids = [rng.choice([rng.randrange(0, 256), rng.randrange(0, 8189), 8189, 8190, 8191]) for _ in range(rng.randint(1, 12))]
        out["decodes"].append([ids, gdn.decode(ids, skip_special_tokens=False), gdn.decode(ids, skip_special_tokens=True)])
    target = ROOT / "test/data/tokenizer_goldens.json"
    target.write_text(json.dumps(out, separators=(",", ":")) + "\n")
    print(n, "encodings,", target.stat().st_size, "bytes")
    for path in sorted(DATA.rglob("*")):
        print(path.relative_to(ROOT), path.stat().st_size if path.is_file() else "")


if __name__ == "__main__":
    main()
