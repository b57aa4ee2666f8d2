"""Lightning with `Trainer(default_root_dir="s3://…")`: saves a state when a line arrives on stdin.

    python -m benchmarks.mirror_peer URL MEGABYTES

Prints "ready", and after each save its seconds, for which the training is held: the checkpoint is
durable then.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

from benchmarks import reporting


def main() -> None:
    parser = reporting.parser("mirror_peer", __doc__)
    parser.add_argument("url", metavar="URL", help="where to save")
    parser.add_argument("megabytes", metavar="MEGABYTES", type=float, help="size of a save")
    options = parser.parse_args()
    import pytorch_lightning as pl
    import s3fs  # noqa: F401  (fsspec finds it by the URL)
    import torch
    from torch.utils.data import DataLoader

    from benchmarks.synthetic_state import make_subject

    warnings.simplefilter("ignore")
    url, subject = options.url, make_subject(options.megabytes)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = subject.model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = pl.Trainer(default_root_dir=url, max_steps=1, accelerator="cpu", logger=False,
                         enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False)
    trainer.fit(Module(), DataLoader(torch.randn(8, subject.width), batch_size=8))
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        trainer.save_checkpoint(f"{url}/last.ckpt")
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    reporting.finish(main)
