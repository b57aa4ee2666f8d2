"""The small CNN with Lightning, which torchrun restarts from its last checkpoint.

Each rank appends a line to FOLDER/steps.jsonl when it starts, when the training begins and after
each step. In the step of a death its rank writes a line and waits to be killed from outside.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks import reporting
from trainer.storage.jsonl import read_records

STEPS = "steps.jsonl"
GLOBAL_BATCH = 128
PATIENCE_S = 60.0
"""How long a rank waits to be killed."""


def say(folder: Path, event: str, step: int) -> None:
    """Append a line, in one write: the ranks share the file."""
    line = {"event": event, "step": step, "rank": int(os.environ["RANK"]), "pid": os.getpid(),
            "time": time.time(), "cpu_s": time.process_time()}
    with (folder / STEPS).open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def train(folder: Path, steps: int, every: int, deaths: list[list[int]]) -> None:
    """Train to the end, or to the next (step, rank) of `deaths`."""
    import pytorch_lightning as pl
    import torch
    from pytorch_lightning.callbacks import ModelCheckpoint
    from torch.nn import functional
    from torch.utils.data import DataLoader

    from trainer.tasks.image_models import SmallCNN
    from trainer.tasks.images import Images

    been = {line["step"] for line in read_records(folder / STEPS) if line["event"] == "stand"}
    due = next((death for death in deaths if death[0] not in been), None)

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = SmallCNN()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, labels = batch
            return functional.cross_entropy(self.net(images), labels, label_smoothing=0.1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.01, fused=True)

    class Witness(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            say(folder, "train", trainer.global_step)

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if due == [trainer.global_step + 1, trainer.global_rank]:
                say(folder, "stand", trainer.global_step + 1)
                time.sleep(PATIENCE_S)
                raise SystemExit("this rank was not killed")

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            say(folder, "step", trainer.global_step)

    ranks = int(os.environ["WORLD_SIZE"])
    # The data set reads a whole batch at once.
    loader = DataLoader(Images(augment="none").dataset("train"), batch_size=GLOBAL_BATCH // ranks,
                        shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
    saves = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=every)
    pl.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=-1, max_steps=steps,
        gradient_clip_val=5.0, callbacks=[Witness(), saves], default_root_dir=folder,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Classifier(), loader, ckpt_path="last")  # fmt: skip


def main() -> None:
    parser = reporting.parser("lightning_peer", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=10, help="steps from save to save (10)")
    parser.add_argument("--deaths", type=json.loads, required=True,
                        help="[STEP, RANK] of each")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    say(options.folder, "start", 0)
    train(options.folder, options.steps, options.every, options.deaths)


if __name__ == "__main__":
    reporting.finish(main)
