"""Processes with Lightning: one that torchrun restarts, and one that saves on request.

    torchrun … -m benchmarks.lightning_peer train FOLDER --steps N --deaths [[STEP, RANK], …]
    python -m benchmarks.lightning_peer save URL MEGABYTES

train  The small CNN. Each rank appends a line to FOLDER/steps.jsonl when it starts, when the
       training begins and after each step. In the step of a death its rank writes a line and waits
       to be killed from outside.
save   `Trainer(default_root_dir="s3://…")`. Prints "ready"; for each line on stdin it saves, and
       prints the seconds for which that holds the training: the checkpoint is durable then.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks import reporting
from trainer.storage.jsonl import read_records

STEPS = "steps.jsonl"
GLOBAL_BATCH = 128
PATIENCE_S = 60.0
"""How long a rank waits to be killed."""
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False,
         "enable_model_summary": False}


def module(net: Any, loss: Any, make_optimizer: Any) -> Any:
    """A LightningModule."""
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss(self.net, batch)

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters())

    return Module()


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
    classifier = module(
        SmallCNN(), lambda net, batch: functional.cross_entropy(net(batch[0]), batch[1],
                                                                label_smoothing=0.1),
        lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.01, fused=True))
    saves = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=every)
    pl.Trainer(devices=ranks, strategy="ddp", max_epochs=-1, max_steps=steps, gradient_clip_val=5.0,
               callbacks=[Witness(), saves], default_root_dir=folder,
               **QUIET).fit(classifier, loader, ckpt_path="last")


def save(url: str, megabytes: float) -> None:
    """Save a state of this size whenever a line arrives."""
    import pytorch_lightning as pl
    import s3fs  # noqa: F401  (fsspec finds it by the URL)
    import torch
    from torch.utils.data import DataLoader

    from benchmarks.synthetic_state import make_subject

    warnings.simplefilter("ignore")
    subject = make_subject(megabytes)
    trainer = pl.Trainer(default_root_dir=url, max_steps=1, enable_checkpointing=False, **QUIET)
    trainer.fit(module(subject.model, lambda net, batch: net(batch).square().mean(),
                       torch.optim.AdamW), DataLoader(torch.randn(8, subject.width), batch_size=8))
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        trainer.save_checkpoint(f"{url}/last.ckpt")
        print(time.perf_counter() - began, flush=True)


def main() -> None:
    parser = reporting.parser("lightning_peer", __doc__)
    parser.add_argument("what", choices=("train", "save"))
    parser.add_argument("where")
    parser.add_argument("megabytes", type=float, nargs="?")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int, default=10, help="steps from save to save (10)")
    parser.add_argument("--deaths", type=json.loads, help="[STEP, RANK] of each")
    options = parser.parse_args()
    if options.what == "save":
        return save(options.where, options.megabytes)
    folder = Path(options.where)
    folder.mkdir(parents=True, exist_ok=True)
    say(folder, "start", 0)
    return train(folder, options.steps, options.every, options.deaths)


if __name__ == "__main__":
    reporting.finish(main)
