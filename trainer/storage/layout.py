"""Names of the files and folders in a run folder."""

IDENTITY, CONFIG, ENVIRONMENT = "run.json", "config.toml", "environment.json"
SUMMARY, PRODUCT = "summary.json", "model.safetensors"
METRICS, EVENTS, TIMING = "metrics.jsonl", "events.jsonl", "timing.jsonl"
CHECKPOINTS, TENSORBOARD, FAULTS, LOCK = "checkpoints", "tensorboard", "faults", "lock"
COMPILED, PICTURES, MIRROR = "compile-cache", "pictures", "mirror.json"
STACKS, REPORT, PREDICTIONS = "stacks", "report", "predictions"
FOLDERS = (CHECKPOINTS, TENSORBOARD, f"{TENSORBOARD}/train", f"{TENSORBOARD}/validation", FAULTS,
           COMPILED, PICTURES, STACKS)
"""Folders of a run folder to which a training writes."""
APPENDED = (METRICS, EVENTS, TIMING, LOCK)
"""Files of a run folder that a training changes."""
REPLACED = (IDENTITY, CONFIG, ENVIRONMENT, PRODUCT, SUMMARY)
"""Files of a run folder that a training replaces."""
MODEL, OPTIMIZER, EMA, STATE, MANIFEST = (
    "model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json", "manifest.json",
)  # fmt: skip
"""Files of a checkpoint."""

STEP_NAME = r"step-(\d{8,15})"
"""Pattern of `step_name`."""


def step_name(step: int) -> str:
    """Name of what belongs to a step, such as its checkpoint."""
    return f"step-{step:08d}"
