"""A small GPT: a causal transformer that predicts the next token at each position."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class GPT(nn.Module):
    """Pre-norm transformer with learned position embeddings and tied output weights (Radford et al.
    2019), for sequences of at most `context` of `tokens` different tokens; dropout after the
    embedding, in the attention, and after attention and MLP."""

    def __init__(self, *, tokens: int, context: int, layers: int, heads: int, width: int,
                 dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.places = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(_initialise)
        for name, values in self.named_parameters():
            if name.endswith(("project.weight", "mlp.2.weight")):
                # Scaled by depth, so that the residual sum over all blocks keeps its variance.
                nn.init.normal_(values, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits NxTxC of tokens NxT (int64)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embedding(tokens) + self.places(places))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)


class Block(nn.Module):
    """Causal self-attention and an MLP of four times the width, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(),
                                 nn.Linear(4 * width, width), nn.Dropout(dropout))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.attend(self.norm_1(x)).reshape(count, length, 3, self.heads,
                                                    width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        attended = attended.transpose(1, 2).reshape(count, length, width)
        x = x + self.drop(self.project(attended))
        return x + self.mlp(self.norm_2(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
