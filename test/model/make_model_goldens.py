#!/usr/bin/env python3
"""Writes test/data/tiny/*: random checkpoints of every family, small enough to keep, and what they give.

An independent forward pass in numpy, float64, one token at a time in the order of the published
definitions: no chunks, no caches, no batching. Run from the repository's root:

    python3 test/model/make_model_goldens.py
"""
import json
import os
import struct

import numpy as np

OUT = "test/data/tiny"
T = 70  # one chunk of 64 and a piece


# ---- safetensors, with bf16 ------------------------------------------------------------------------

def to_stored(x, dtype):
    """Bytes as stored and the float64 values that they stand for."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    if dtype == "F32":
        return x.tobytes(), x.astype(np.float64)
    if dtype == "F16":
        h = x.astype(np.float16)
        return h.tobytes(), h.astype(np.float64)
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded.tobytes(), (rounded.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)"""
    header, at = {}, 0
    for name in sorted(tensors):
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            f.write(tensors[name][2])


class Checkpoint:
    def __init__(self, seed, dtype):
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.stored = {}
        self.w = {}

    def put(self, name, x, dtype=None):
        dtype = dtype or self.dtype
        data, values = to_stored(x, dtype)
        self.stored[name] = (dtype, np.shape(x), data)
        self.w[name] = values.reshape(np.shape(x))

    def matrix(self, name, *shape, gain=1.0, dtype=None):
        self.put(name, self.rng.normal(size=shape) * gain / np.sqrt(shape[-1]), dtype)

    def vector(self, name, *shape, mean=0.0, spread=0.2, dtype=None):
        self.put(name, mean + spread * self.rng.normal(size=shape), dtype)


# ---- the definitions -------------------------------------------------------------------------------

def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def rms(x, factor, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * factor


def l2(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def conv(u, w):
    """u [T, channels], w [channels, 1, kernel] -> SiLU of the causal depthwise convolution."""
    kernel = w.shape[-1]
    padded = np.concatenate([np.zeros((kernel - 1, u.shape[1])), u])
    return silu(sum(padded[j:j + len(u)] * w[:, 0, j] for j in range(kernel)))


def delta_rule(q, k, v, g, beta):
    """One head: q, k [T, K], v [T, V], g [T, K] log decay, beta [T] -> outputs [T, V], state [K, V]."""
    S = np.zeros((k.shape[1], v.shape[1]))
    out = []
    for t in range(len(q)):
        S = np.exp(g[t])[:, None] * S
        S = S + np.outer(k[t], beta[t] * (v[t] - S.T @ k[t]))
        out.append(S.T @ q[t])
    return np.array(out), S


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def causal_attention(q, k, v, scale):
    scores = q @ k.T * scale
    scores[np.triu_indices(len(q), 1)] = -np.inf
    return softmax(scores) @ v


def mlp(x, gate, up, down):
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def rope(x, rot, theta):
    half = rot // 2
    angle = np.arange(len(x))[:, None] * theta ** (-2.0 * np.arange(half) / rot)
    a, b = x[:, :half], x[:, half:rot]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle),
                           b * np.cos(angle) + a * np.sin(angle), x[:, rot:]], axis=1)


# ---- Qwen ------------------------------------------------------------------------------------------

def qwen(name, seed, dtype, c, root_config, prefix, fused=False, f32_extras=False, shards=1, mtp=False):
    ck = Checkpoint(seed, dtype)
    H, V_, nl = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    Hk, Hv = c["linear_num_key_heads"], c["linear_num_value_heads"]
    K, V = c["linear_key_head_dim"], c["linear_value_head_dim"]
    r, kernel = Hv // Hk, c["linear_conv_kernel_dim"]
    nh, nkv, hd = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    rot, theta, eps = c["_rot"], c["_theta"], 1e-6
    interleaved = c["model_type"] == "qwen3_next"
    E = c.get("num_experts", 0)
    extra = "F32" if f32_extras else None
    channels = 2 * Hk * K + Hv * V

    def is_moe(i):
        if E == 0:
            return False
        return not interleaved or i not in c.get("mlp_only_layers", [])

    full = [t == "full_attention" for t in c["layer_types"]] if "layer_types" in c else [
        (i + 1) % c["full_attention_interval"] == 0 for i in range(nl)]
    ck.matrix(prefix + "embed_tokens.weight", V_, H, gain=np.sqrt(H))
    ck.vector(prefix + "norm.weight", H)
    if not c["tie_word_embeddings"]:
        ck.matrix("lm_head.weight", V_, H)
    for i in range(nl):
        p = f"{prefix}layers.{i}."
        ck.vector(p + "input_layernorm.weight", H)
        ck.vector(p + "post_attention_layernorm.weight", H)
        if full[i]:
            a = p + "self_attn."
            ck.matrix(a + "q_proj.weight", 2 * nh * hd, H)
            ck.matrix(a + "k_proj.weight", nkv * hd, H)
            ck.matrix(a + "v_proj.weight", nkv * hd, H)
            ck.matrix(a + "o_proj.weight", H, nh * hd)
            ck.vector(a + "q_norm.weight", hd)
            ck.vector(a + "k_norm.weight", hd)
        else:
            a = p + "linear_attn."
            if interleaved:
                ck.matrix(a + "in_proj_qkvz.weight", 2 * Hk * K + 2 * Hv * V, H)
                ck.matrix(a + "in_proj_ba.weight", 2 * Hv, H)
            else:
                ck.matrix(a + "in_proj_qkv.weight", channels, H)
                ck.matrix(a + "in_proj_z.weight", Hv * V, H)
                ck.matrix(a + "in_proj_b.weight", Hv, H)
                ck.matrix(a + "in_proj_a.weight", Hv, H)
            ck.matrix(a + "conv1d.weight", channels, 1, kernel)
            ck.vector(a + "A_log", Hv, spread=1.0, dtype=extra)
            ck.vector(a + "dt_bias", Hv, mean=-2.0, spread=1.0)
            ck.vector(a + "norm.weight", V, mean=1.0, dtype=extra)
            ck.matrix(a + "out_proj.weight", H, Hv * V)
        m = p + "mlp."
        if not is_moe(i):
            for w, shape in (("gate", 0), ("up", 0), ("down", 1)):
                I = c["intermediate_size"]
                ck.matrix(f"{m}{w}_proj.weight", *((H, I) if shape else (I, H)))
            continue
        F, Fs = c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
        ck.matrix(m + "gate.weight", E, H, gain=2.0)
        if fused:
            ck.matrix(m + "experts.gate_up_proj", E, 2 * F, H)
            ck.matrix(m + "experts.down_proj", E, H, F)
        else:
            for e in range(E):
                ck.matrix(f"{m}experts.{e}.gate_proj.weight", F, H)
                ck.matrix(f"{m}experts.{e}.up_proj.weight", F, H)
                ck.matrix(f"{m}experts.{e}.down_proj.weight", H, F)
        ck.matrix(m + "shared_expert.gate_proj.weight", Fs, H)
        ck.matrix(m + "shared_expert.up_proj.weight", Fs, H)
        ck.matrix(m + "shared_expert.down_proj.weight", H, Fs)
        ck.matrix(m + "shared_expert_gate.weight", 1, H)
    if mtp:  # parts that a text model has no use for
        ck.matrix("mtp.fc.weight", H, 2 * H)
        ck.matrix("model.visual.patch_embed.weight", 8, 8)

    w, results = ck.w, {}

    def gdn(a, x, i):
        if interleaved:
            rows = x @ w[a + "in_proj_qkvz.weight"].T
            q, k, v, z = [], [], [], []
            width = 2 * K + 2 * r * V
            for j in range(Hk):  # literal: one key head after the other
                block = rows[:, j * width:(j + 1) * width]
                q.append(block[:, :K])
                k.append(block[:, K:2 * K])
                v.append(block[:, 2 * K:2 * K + r * V])
                z.append(block[:, 2 * K + r * V:])
            u = np.concatenate(q + k + v, axis=1)
            z = np.concatenate(z, axis=1)
            ba = (x @ w[a + "in_proj_ba.weight"].T).reshape(T, Hk, 2, r)
            b, aa = ba[:, :, 0].reshape(T, Hv), ba[:, :, 1].reshape(T, Hv)
        else:
            u = x @ w[a + "in_proj_qkv.weight"].T
            z = x @ w[a + "in_proj_z.weight"].T
            b, aa = x @ w[a + "in_proj_b.weight"].T, x @ w[a + "in_proj_a.weight"].T
        results[f"layer{i}.conv"] = u[-(kernel - 1):].T
        mixed = conv(u, w[a + "conv1d.weight"])
        q = l2(mixed[:, :Hk * K].reshape(T, Hk, K)) / np.sqrt(K)
        k = l2(mixed[:, Hk * K:2 * Hk * K].reshape(T, Hk, K))
        v = mixed[:, 2 * Hk * K:].reshape(T, Hv, V)
        g = -np.exp(w[a + "A_log"]) * softplus(aa + w[a + "dt_bias"])
        heads, states = [], []
        for h in range(Hv):
            o, S = delta_rule(q[:, h // r], k[:, h // r], v[:, h],
                              np.repeat(g[:, h:h + 1], K, axis=1), sigmoid(b[:, h]))
            states.append(S)
            act = sigmoid if c.get("output_gate_type") == "sigmoid" else silu
            heads.append(rms(o, w[a + "norm.weight"], eps) * act(z[:, h * V:(h + 1) * V]))
        results[f"layer{i}.state"] = np.array(states)
        return np.concatenate(heads, axis=1) @ w[a + "out_proj.weight"].T

    def attention(a, x):
        qg = (x @ w[a + "q_proj.weight"].T).reshape(T, nh, 2, hd)
        k = (x @ w[a + "k_proj.weight"].T).reshape(T, nkv, hd)
        v = (x @ w[a + "v_proj.weight"].T).reshape(T, nkv, hd)
        out = []
        for h in range(nh):
            j = h * nkv // nh
            qh = rope(rms(qg[:, h, 0], 1 + w[a + "q_norm.weight"], eps), rot, theta)
            kh = rope(rms(k[:, j], 1 + w[a + "k_norm.weight"], eps), rot, theta)
            out.append(causal_attention(qh, kh, v[:, j], hd ** -0.5) * sigmoid(qg[:, h, 1]))
        return np.concatenate(out, axis=1) @ w[a + "o_proj.weight"].T

    def moe(m, x):
        F = c["moe_intermediate_size"]
        y = np.zeros_like(x)
        p = softmax(x @ w[m + "gate.weight"].T)
        for t in range(T):
            chosen = np.argsort(-p[t], kind="stable")[:c["num_experts_per_tok"]]
            total = p[t, chosen].sum() if c.get("norm_topk_prob", True) else 1.0
            for e in chosen:
                if fused:
                    gu = w[m + "experts.gate_up_proj"][e]
                    gate, up, down = gu[:F], gu[F:], w[m + "experts.down_proj"][e]
                else:
                    gate, up, down = (w[f"{m}experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down"))
                y[t] += p[t, e] / total * mlp(x[t], gate, up, down)
        shared = mlp(x, *(w[f"{m}shared_expert.{n}_proj.weight"] for n in ("gate", "up", "down")))
        return y + sigmoid(x @ w[m + "shared_expert_gate.weight"].T) * shared

    tokens = ck.rng.integers(0, V_, T)
    h = w[prefix + "embed_tokens.weight"][tokens]
    for i in range(nl):
        p = f"{prefix}layers.{i}."
        x = rms(h, 1 + w[p + "input_layernorm.weight"], eps)
        h = h + (attention(p + "self_attn.", x) if full[i] else gdn(p + "linear_attn.", x, i))
        x = rms(h, 1 + w[p + "post_attention_layernorm.weight"], eps)
        if is_moe(i):
            h = h + moe(p + "mlp.", x)
        else:
            h = h + mlp(x, *(w[f"{p}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")))
    head = w[prefix + "embed_tokens.weight"] if c["tie_word_embeddings"] else w["lm_head.weight"]
    results["logits"] = rms(h, 1 + w[prefix + "norm.weight"], eps) @ head.T
    save(name, ck, root_config, tokens, results, shards)


# ---- Kimi ------------------------------------------------------------------------------------------

def kimi(name, seed, c):
    ck = Checkpoint(seed, "BF16")
    H, V_, nl, eps = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"], c["rms_norm_eps"]
    lin = c["linear_attn_config"]
    n, D, kernel = lin["num_heads"], lin["head_dim"], lin["short_conv_kernel_size"]
    nh, rank = c["num_attention_heads"], c["kv_lora_rank"]
    nope, rp, vd = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    E, F = c["num_experts"], c["moe_intermediate_size"]
    Fs = F * c["num_shared_experts"]
    kda_layer = [i + 1 in lin["kda_layers"] for i in range(nl)]
    moe_layer = [i >= c["first_k_dense_replace"] and i % c["moe_layer_freq"] == 0 for i in range(nl)]
    ck.matrix("model.embed_tokens.weight", V_, H, gain=np.sqrt(H))
    ck.vector("model.norm.weight", H, mean=1.0)
    ck.matrix("lm_head.weight", V_, H)
    for i in range(nl):
        p = f"model.layers.{i}."
        ck.vector(p + "input_layernorm.weight", H, mean=1.0)
        ck.vector(p + "post_attention_layernorm.weight", H, mean=1.0)
        a = p + "self_attn."
        if kda_layer[i]:
            for x in "qkv":
                ck.matrix(f"{a}{x}_proj.weight", n * D, H)
                ck.matrix(f"{a}{x}_conv1d.weight", n * D, 1, kernel)
            ck.vector(a + "A_log", 1, 1, n, 1, spread=1.0, dtype="F32")
            ck.vector(a + "dt_bias", n * D, mean=-2.0, spread=1.0, dtype="F32")
            for x in "fg":
                ck.matrix(f"{a}{x}_a_proj.weight", D, H)
                ck.matrix(f"{a}{x}_b_proj.weight", n * D, D)
            ck.matrix(a + "b_proj.weight", n, H)
            ck.vector(a + "o_norm.weight", D, mean=1.0)
            ck.matrix(a + "o_proj.weight", H, n * D)
        else:
            ck.matrix(a + "q_proj.weight", nh * (nope + rp), H)
            ck.matrix(a + "kv_a_proj_with_mqa.weight", rank + rp, H)
            ck.vector(a + "kv_a_layernorm.weight", rank, mean=1.0)
            ck.matrix(a + "kv_b_proj.weight", nh * (nope + vd), rank)
            ck.matrix(a + "o_proj.weight", H, nh * vd)
        if not moe_layer[i]:
            I = c["intermediate_size"]
            ck.matrix(p + "mlp.gate_proj.weight", I, H)
            ck.matrix(p + "mlp.up_proj.weight", I, H)
            ck.matrix(p + "mlp.down_proj.weight", H, I)
            continue
        m = p + "block_sparse_moe."
        ck.matrix(m + "gate.weight", E, H, gain=2.0)
        ck.vector(m + "gate.e_score_correction_bias", E, spread=0.3, dtype="F32")
        for e in range(E):
            ck.matrix(f"{m}experts.{e}.w1.weight", F, H)
            ck.matrix(f"{m}experts.{e}.w3.weight", F, H)
            ck.matrix(f"{m}experts.{e}.w2.weight", H, F)
        if Fs > 0:
            ck.matrix(m + "shared_experts.gate_proj.weight", Fs, H)
            ck.matrix(m + "shared_experts.up_proj.weight", Fs, H)
            ck.matrix(m + "shared_experts.down_proj.weight", H, Fs)

    w, results = ck.w, {}

    def kda(a, x, i):
        u = [x @ w[f"{a}{j}_proj.weight"].T for j in "qkv"]
        results[f"layer{i}.conv"] = np.concatenate([y[-(kernel - 1):].T for y in u])
        q, k, v = (conv(y, w[f"{a}{j}_conv1d.weight"]).reshape(T, n, D) for y, j in zip(u, "qkv"))
        q, k = l2(q) * D ** -0.5, l2(k)
        f = (x @ w[a + "f_a_proj.weight"].T @ w[a + "f_b_proj.weight"].T + w[a + "dt_bias"]).reshape(T, n, D)
        rate = np.exp(w[a + "A_log"].reshape(n, 1))
        lb = lin.get("gate_lower_bound")
        g = lb * sigmoid(rate * f) if lb else -rate * softplus(f)
        beta = sigmoid(x @ w[a + "b_proj.weight"].T)
        gate = (x @ w[a + "g_a_proj.weight"].T @ w[a + "g_b_proj.weight"].T).reshape(T, n, D)
        heads, states = [], []
        for h in range(n):
            o, S = delta_rule(q[:, h], k[:, h], v[:, h], g[:, h], beta[:, h])
            states.append(S)
            heads.append(rms(o, w[a + "o_norm.weight"], eps) * sigmoid(gate[:, h]))
        results[f"layer{i}.state"] = np.array(states)
        return np.concatenate(heads, axis=1) @ w[a + "o_proj.weight"].T

    def mla(a, x):
        q = (x @ w[a + "q_proj.weight"].T).reshape(T, nh, nope + rp)
        latent = x @ w[a + "kv_a_proj_with_mqa.weight"].T
        kv = (rms(latent[:, :rank], w[a + "kv_a_layernorm.weight"], 1e-6) @ w[a + "kv_b_proj.weight"].T)
        kv = kv.reshape(T, nh, nope + vd)
        out = []
        for h in range(nh):
            k = np.concatenate([kv[:, h, :nope], latent[:, rank:]], axis=1)
            out.append(causal_attention(q[:, h], k, kv[:, h, nope:], (nope + rp) ** -0.5))
        return np.concatenate(out, axis=1) @ w[a + "o_proj.weight"].T

    def moe(m, x):
        y = np.zeros_like(x)
        s = sigmoid(x @ w[m + "gate.weight"].T)
        ranked = s + w[m + "gate.e_score_correction_bias"]
        for t in range(T):
            chosen = np.argsort(-ranked[t], kind="stable")[:c["num_experts_per_token"]]
            total = s[t, chosen].sum() + 1e-20 if c["moe_renormalize"] else 1.0
            for e in chosen:
                y[t] += s[t, e] / total * c["routed_scaling_factor"] * mlp(
                    x[t], *(w[f"{m}experts.{e}.{j}.weight"] for j in ("w1", "w3", "w2")))
        if Fs > 0:
            y += mlp(x, *(w[f"{m}shared_experts.{j}_proj.weight"] for j in ("gate", "up", "down")))
        return y

    tokens = ck.rng.integers(0, V_, T)
    h = w["model.embed_tokens.weight"][tokens]
    for i in range(nl):
        p = f"model.layers.{i}."
        x = rms(h, w[p + "input_layernorm.weight"], eps)
        h = h + (kda(p + "self_attn.", x, i) if kda_layer[i] else mla(p + "self_attn.", x))
        x = rms(h, w[p + "post_attention_layernorm.weight"], eps)
        if moe_layer[i]:
            h = h + moe(p + "block_sparse_moe.", x)
        else:
            h = h + mlp(x, *(w[f"{p}mlp.{j}_proj.weight"] for j in ("gate", "up", "down")))
    results["logits"] = rms(h, w["model.norm.weight"], eps) @ w["lm_head.weight"].T
    save(name, ck, c, tokens, results, 1)


def save(name, ck, config, tokens, results, shards):
    folder = f"{OUT}/{name}"
    os.makedirs(folder, exist_ok=True)
    public = {k: v for k, v in config.items() if not k.startswith("_")}
    if "text_config" in public:
        public["text_config"] = {k: v for k, v in public["text_config"].items() if not k.startswith("_")}
    with open(f"{folder}/config.json", "w") as f:
        json.dump(public, f, indent=1, sort_keys=True)
        f.write("\n")
    if shards == 1:
        write_safetensors(f"{folder}/model.safetensors", ck.stored)
    else:
        weight_map = {n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors"
                      for i, n in enumerate(sorted(ck.stored))}
        for shard in sorted(set(weight_map.values())):
            write_safetensors(f"{folder}/{shard}", {n: ck.stored[n] for n in ck.stored if weight_map[n] == shard})
        with open(f"{folder}/model.safetensors.index.json", "w") as f:
            json.dump({"metadata": {}, "weight_map": weight_map}, f, indent=1)
            f.write("\n")
    golden = {"tokens": ("I32", (T,), tokens.astype(np.int32).tobytes())}
    for key, x in results.items():
        golden[key] = ("F32", x.shape, np.ascontiguousarray(x, np.float32).tobytes())
    write_safetensors(f"{folder}/golden.safetensors", golden)


def main():
    base = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
            "linear_conv_kernel_dim": 4, "intermediate_size": 40, "hidden_size": 48, "vocab_size": 64,
            "max_position_embeddings": 512, "eos_token_id": 1}
    # Interleaved projections, experts one by one, one dense layer, unnormalised routing, f16, own head.
    c = dict(base, model_type="qwen3_next", num_hidden_layers=4, full_attention_interval=2,
             linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
             linear_value_head_dim=24, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
             shared_expert_intermediate_size=28, mlp_only_layers=[1], norm_topk_prob=False,
             tie_word_embeddings=False, rope_theta=10000.0, partial_rotary_factor=0.5, _rot=8, _theta=1e4)
    qwen("next", 1, "F16", c, c, "model.")
    # Nested config, fused experts, three value heads a key head, sigmoid gate, bf16 and F32, shards.
    c = dict(base, model_type="qwen3_5_moe_text", num_hidden_layers=3,
             layer_types=["linear_attention", "full_attention", "linear_attention"],
             linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=24,
             linear_value_head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20,
             shared_expert_intermediate_size=12, output_gate_type="sigmoid", tie_word_embeddings=False,
             rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                              "mrope_section": [1, 1, 0], "mrope_interleaved": True}, _rot=4, _theta=1e7)
    root = {"model_type": "qwen3_5_moe", "text_config": c, "tie_word_embeddings": False}
    qwen("moe", 2, "BF16", c, root, "model.language_model.", fused=True, f32_extras=True, shards=2, mtp=True)
    # Dense, f32, tied, a convolution of 3, as many key heads as value heads.
    c = dict(base, model_type="qwen3_5_text", num_hidden_layers=2, full_attention_interval=2,
             linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32,
             linear_value_head_dim=32, linear_conv_kernel_dim=3, tie_word_embeddings=True,
             rope_parameters={"rope_theta": 1e5, "partial_rotary_factor": 1.0}, _rot=16, _theta=1e5)
    qwen("dense", 3, "F32", c, c, "model.")

    k = {"model_type": "kimi_linear", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 40,
         "moe_intermediate_size": 20, "num_hidden_layers": 4, "num_attention_heads": 3,
         "num_key_value_heads": 3, "head_dim": 8, "q_lora_rank": None, "kv_lora_rank": 24,
         "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 20, "mla_use_nope": True,
         "rms_norm_eps": 1e-5, "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 2,
         "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 2.446,
         "num_expert_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
         "tie_word_embeddings": False, "model_max_length": 512, "eos_token_id": 1,
         "linear_attn_config": {"head_dim": 20, "num_heads": 3, "short_conv_kernel_size": 4,
                                "kda_layers": [1, 3], "full_attn_layers": [2, 4]}}
    kimi("kimi", 4, k)
    # The bounded decay of newer models, no shared expert, weights not renormalised.
    k = dict(k, num_hidden_layers=2, num_shared_experts=0, moe_renormalize=False,
             linear_attn_config=dict(k["linear_attn_config"], kda_layers=[1], full_attn_layers=[2],
                                     gate_lower_bound=-5.0))
    kimi("kimi_bounded", 5, k)


main()
