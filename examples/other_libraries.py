"""Tasks for models of other libraries: transformers, peft, timm, torch.ao, and batches of graphs.

    python -m launch --nproc-per-node 2 -- --task examples.other_libraries:Bert --steps 8

Small models made from configurations, without a download, as the libraries' documentation trains
them. `python -m benchmarks.zoo` trains each, kills it and compares the bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from trainer import Outcome

WORDS, CLASSES = 60, 3
PAD, IGNORED = 0, -100


def _generator(split: str) -> torch.Generator:
    return torch.Generator().manual_seed({"train": 0, "validation": 1, "test": 2}[split])


@dataclasses.dataclass(frozen=True)
class Gpt2:
    """A causal language model with tied embeddings, on sequences of one length."""

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(
            vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=PAD, eos_token_id=PAD))

    def dataset(self, split: str) -> Dataset | None:
        return TensorDataset(torch.randint(WORDS, (70, 16), generator=_generator(split)))

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        (ids,) = batch
        count = ids[:, 1:].numel()
        return Outcome(model(input_ids=ids, labels=ids).loss * count, count)


@dataclasses.dataclass(frozen=True)
class Gpt2Checkpointing(Gpt2):
    """The same with `gradient_checkpointing_enable`."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        model.gradient_checkpointing_enable()
        return model


@dataclasses.dataclass(frozen=True)
class Gpt2Lora(Gpt2):
    """The same with low-rank adapters by peft."""

    def model(self) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        model: Any = super().model()
        return get_peft_model(model, LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True))


@dataclasses.dataclass(frozen=True)
class Bert:
    """Classification of sequences that a collate function pads."""

    def model(self) -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        return BertForSequenceClassification(BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=16, num_labels=CLASSES))

    def dataset(self, split: str) -> Dataset | None:
        generator = _generator(split)
        return _Sequences([torch.randint(1, WORDS, (4 + i % 9,), generator=generator)
                           for i in range(70)])

    def collate(self, samples: Sequence[Tensor]) -> dict[str, Tensor]:
        ids = pad_sequence(list(samples), batch_first=True, padding_value=PAD)
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(),
                "labels": torch.stack([sample[0] % CLASSES for sample in samples])}

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        out, count = model(**batch), len(batch["labels"])
        correct = (out.logits.argmax(-1) == batch["labels"]).sum()
        return Outcome(out.loss * count, count, {"accuracy": (correct, count)})


@dataclasses.dataclass(frozen=True)
class T5(Bert):
    """A sequence to its reverse, with shared embeddings; padding is no target."""

    def model(self) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        return T5ForConditionalGeneration(T5Config(
            vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
            decoder_start_token_id=PAD))

    def collate(self, samples: Sequence[Tensor]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        return {**batch, "labels": pad_sequence([sample.flip(0) for sample in samples],
                                                batch_first=True, padding_value=IGNORED)}

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        count = (batch["labels"] != IGNORED).sum()
        return Outcome(model(**batch).loss * count, count)


class _Sequences(Dataset):
    def __init__(self, sequences: Sequence[Tensor]) -> None:
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> Tensor:
        return self._sequences[index]


@dataclasses.dataclass(frozen=True)
class ResNet18:
    """timm's ResNet-18: batch norms."""

    def model(self) -> nn.Module:
        import timm

        return timm.create_model("resnet18", pretrained=False, num_classes=CLASSES)

    def dataset(self, split: str) -> Dataset | None:
        generator = _generator(split)
        return TensorDataset(torch.randn(70, 3, 32, 32, generator=generator),
                             torch.randint(CLASSES, (70,), generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        images, labels = batch
        total = functional.cross_entropy(model(images), labels, reduction="sum")
        return Outcome(total, len(labels))


@dataclasses.dataclass(frozen=True)
class VitTiny(ResNet18):
    """timm's vision transformer, with stochastic depth."""

    def model(self) -> nn.Module:
        import timm

        return timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=CLASSES,
                                 img_size=32, patch_size=8, depth=4, drop_path_rate=0.1)


@dataclasses.dataclass(frozen=True)
class Quantized(ResNet18):
    """Quantisation-aware training with torch.ao's default qconfig: observers in buffers."""

    def model(self) -> nn.Module:
        from torch.ao import quantization

        model: Any = nn.Sequential(
            quantization.QuantStub(), nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Flatten(),
            nn.Linear(8 * 8 * 8, CLASSES), quantization.DeQuantStub())
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        return quantization.prepare_qat(model.train())


class GraphBatch:
    """A batch as graph libraries make it: an object that only its own methods can read."""

    def __init__(self, graphs: Sequence[tuple[Tensor, Tensor]]) -> None:
        sizes = torch.tensor([len(nodes) for nodes, _ in graphs])
        starts = sizes.cumsum(0) - sizes
        self.nodes = torch.cat([nodes for nodes, _ in graphs])
        self.edges = torch.cat([edges + start for (_, edges), start
                                in zip(graphs, starts, strict=True)], dim=1)
        self.graph = torch.arange(len(graphs)).repeat_interleave(sizes)
        self.num_graphs = len(graphs)

    def to(self, device: torch.device, non_blocking: bool = False) -> GraphBatch:
        for name in ("nodes", "edges", "graph"):
            setattr(self, name, getattr(self, name).to(device, non_blocking=non_blocking))
        return self


class _GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.update = nn.Linear(8, 16), nn.GRUCell(16, 16)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, batch: GraphBatch) -> Tensor:
        nodes, (source, target) = self.embed(batch.nodes), batch.edges
        for _ in range(2):
            nodes = self.update(torch.zeros_like(nodes).index_add(0, target, nodes[source]), nodes)
        pooled = nodes.new_zeros(batch.num_graphs, 16).index_add(0, batch.graph, self.norm(nodes))
        return self.head(pooled).squeeze(1)


@dataclasses.dataclass(frozen=True)
class Graphs:
    """A graph network whose batches are objects, with a batch norm over nodes."""

    def model(self) -> nn.Module:
        return _GraphNet()

    def dataset(self, split: str) -> Any:
        generator = _generator(split)
        return [(torch.randn(n, 8, generator=generator),
                 torch.randint(n, (2, 2 * n), generator=generator))
                for n in (3 + i % 5 for i in range(70))]

    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> GraphBatch:
        return GraphBatch(samples)

    def loss(self, model: nn.Module, batch: GraphBatch) -> Outcome:
        wanted = batch.nodes.new_zeros(batch.num_graphs).index_add(
            0, batch.graph, batch.nodes.sum(1))
        return Outcome((model(batch) - wanted).square().sum(), batch.num_graphs)
