"""Streamed data sets of Hugging Face's `datasets` as streams in lanes."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from trainer.data.shards import check_lanes
from trainer.errors import ConfigError


class HuggingFaceStream(IterableDataset[Any]):
    """A `datasets.IterableDataset` (`load_dataset(…, streaming=True)`), whose shards are dealt to
    the lanes. A resumed lane continues at the example that its `state_dict` names.

    `.shuffle(buffer_size=…)` loses its buffer on resume: use `ShuffledBlocks` instead. A `Dataset`
    that is not streamed needs no class: return it from the task.
    """

    def __init__(self, dataset: Any) -> None:
        if not isinstance(dataset, IterableDataset) or not hasattr(dataset, "num_shards"):
            raise ConfigError(f"HuggingFaceStream: {type(dataset).__name__} is no streamed data "
                              "set of Hugging Face; return it itself from dataset(), or stream it "
                              "by load_dataset(…, streaming=True) or .to_iterable_dataset().")
        self.dataset: Any = dataset
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def lane(self, number: int, lanes: int) -> Any:
        check_lanes("HuggingFaceStream", self.dataset.num_shards, lanes)
        lane = self.dataset.shard(num_shards=lanes, index=number)
        lane.set_epoch(self.epoch)
        return lane

    def __iter__(self) -> Any:
        self.dataset.set_epoch(self.epoch)
        return iter(self.dataset)
