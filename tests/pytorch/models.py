"""The trainer's models as PyTorch has them, with parameters in the trainer's order and under its names."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def bench_network(width=1024):
    """2.6 million parameters, 10 MB, unless the width is another."""
    return nn.Sequential(nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1000))


class Mlp(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, inputs, classes):
        for layer in self.layers[:-1]:
            inputs = F.relu(layer(inputs))
        return F.cross_entropy(self.layers[-1](inputs), classes, reduction="sum")


class Attention(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, stream):
        sequences, time, width = stream.shape
        parts = self.c_attn(stream).split(width, dim=2)
        query, key, value = (part.view(sequences, time, self.heads, -1).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(seen.transpose(1, 2).reshape(sequences, time, width))


class Block(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(heads, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, stream):
        stream = stream + self.attn(self.ln_1(stream))
        hidden = F.gelu(self.mlp["c_fc"](self.ln_2(stream)), approximate="tanh")
        return stream + self.mlp["c_proj"](hidden)


class Gpt(nn.Module):
    def __init__(self, vocabulary, context, layers, heads, width):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocabulary, width),
            "wpe": nn.Embedding(context, width),
            "h": nn.ModuleList(Block(heads, width) for _ in range(layers)),
            "ln_f": nn.LayerNorm(width),
        })

    def forward(self, tokens, targets):
        parts = self.transformer
        stream = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1], device=tokens.device))
        for block in parts["h"]:
            stream = block(stream)
        scores = F.linear(parts["ln_f"](stream), parts["wte"].weight)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
