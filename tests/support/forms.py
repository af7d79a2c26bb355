"""One small decoder, written in the forms in which decoders are traced: the same products of the same numbers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu

from tests.support.models import Example

Form = Literal["batched", "flat", "einsum"]
FORMS: tuple[Form, ...] = ("batched", "flat", "einsum")
"""Activations of batch × tokens × width; of tokens × width; and the first with einsums in place of linears."""

BLOCKS, BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 2, 2, 8, 32, 4, 64


class Product(nn.Module):
    def __init__(self, width: int, out: int, form: Form) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) / width**0.5)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btw,vw->btv", x, self.weight) if self.form == "einsum" else linear(x, self.weight)


class Attention(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (Product(WIDTH, WIDTH, form) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (product(x).unflatten(-1, (HEADS, -1)) for product in (self.wq, self.wk, self.wv))
        q, k, v = (part.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for part in (rotary(q), rotary(k), v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(attended.transpose(1, 2).reshape(x.shape))


def rotary(x: Tensor) -> Tensor:
    """A sum of two products, of tokens × heads × width where activations are flat."""
    angles = torch.arange(LENGTH, dtype=torch.float32)[:, None, None] * torch.linspace(1, 0.1, x.shape[-1] // 2)
    cos, sin = (part.repeat(1, 1, 2) for part in (angles.cos(), angles.sin()))
    if x.ndim == 3:
        cos, sin = cos.repeat(BATCH, 1, 1), sin.repeat(BATCH, 1, 1)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class FeedForward(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.w1, self.w3 = Product(WIDTH, 2 * WIDTH, form), Product(WIDTH, 2 * WIDTH, form)
        self.w2 = Product(2 * WIDTH, WIDTH, form)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.attention, self.feed_forward = Attention(form), FeedForward(form)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Named as TorchTitan names its models' parts."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(form) for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens.flatten() if self.form == "flat" else tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def decoder(form: Form) -> Example:
    torch.manual_seed(0)
    model = Decoder(form)
    tokens, labels = torch.randint(VOCABULARY, (2, BATCH, LENGTH))

    def loss(logits: Tensor) -> Tensor:
        return cross_entropy(logits.view(-1, VOCABULARY), labels.flatten())

    return Example(model, (tokens,), loss)
