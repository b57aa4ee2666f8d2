"""A small language model of transformers, with a tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

from trainer import Outcome


@dataclasses.dataclass(frozen=True)
class Letters:
    """Predict the next letter; the embedding and the head have one weight."""

    adapters: bool = False

    @property
    def tokenizer(self) -> ByT5Tokenizer:
        return ByT5Tokenizer()

    def model(self) -> nn.Module:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=384, n_positions=16, n_embd=8, n_layer=1,
                                           n_head=2, bos_token_id=1, eos_token_id=1,
                                           attn_implementation="eager", output_attentions=True))
        if not self.adapters:
            return model
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"],
                                                fan_in_fan_out=True))

    def dataset(self, split: str) -> Any:
        ids = self.tokenizer(["abcdef", "bcdefg"] * 8, return_tensors="pt")["input_ids"]
        return [{"input_ids": row, "labels": row} for row in ids]

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        tokens = batch["labels"][:, 1:].numel()
        return Outcome(model(**batch).loss * tokens, tokens)
