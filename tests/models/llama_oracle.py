"""Computes a LLaMA's logits in float64 NumPy from the tensors of a checkpoint, one head a time."""

import numpy as np


def rms_norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rotate_half(x_TxE, theta):
    length, width = x_TxE.shape
    half = width // 2
    out = np.empty_like(x_TxE)
    for position in range(length):
        for i in range(half):
            angle = position * theta ** (-2 * i / width)
            a, b = x_TxE[position, i], x_TxE[position, i + half]
            out[position, i] = a * np.cos(angle) - b * np.sin(angle)
            out[position, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(x_TxD, tensors, prefix, described):
    heads, kv_heads = described["num_attention_heads"], described["num_key_value_heads"]
    width, length = described["head_dim"], len(x_TxD)
    q, k, v = (x_TxD @ tensors[f"{prefix}.{n}_proj.weight"].T for n in "qkv")
    mixed = []
    for head in range(heads):
        kv = head * kv_heads // heads
        q_head = rotate_half(q[:, head * width : (head + 1) * width], described["rope_theta"])
        k_head = rotate_half(k[:, kv * width : (kv + 1) * width], described["rope_theta"])
        scores = q_head @ k_head.T / np.sqrt(width)
        scores[np.triu_indices(length, 1)] = -np.inf
        mixed.append(softmax(scores) @ v[:, kv * width : (kv + 1) * width])
    return np.concatenate(mixed, -1) @ tensors[f"{prefix}.o_proj.weight"].T


def feed_forward(x_TxD, tensors, prefix):
    gate = x_TxD @ tensors[f"{prefix}.gate_proj.weight"].T
    up = x_TxD @ tensors[f"{prefix}.up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ tensors[f"{prefix}.down_proj.weight"].T


def logits(tokens_T, tensors, described):
    tensors = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
    eps = described["rms_norm_eps"]
    table = tensors["model.embed_tokens.weight"]
    x = table[tokens_T]
    for layer in range(described["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        normed = rms_norm(x, tensors[f"{prefix}.input_layernorm.weight"], eps)
        x = x + attention(normed, tensors, f"{prefix}.self_attn", described)
        normed = rms_norm(x, tensors[f"{prefix}.post_attention_layernorm.weight"], eps)
        x = x + feed_forward(normed, tensors, f"{prefix}.mlp")
    x = rms_norm(x, tensors["model.norm.weight"], eps)
    return x @ (table if described["tie_word_embeddings"] else tensors["lm_head.weight"]).T
