"""Names of the files and folders in a run folder."""

IDENTITY, CONFIG, ENVIRONMENT = "run.json", "config.toml", "environment.json"
SUMMARY, PRODUCT = "summary.json", "model.safetensors"
METRICS, EVENTS, TIMING = "metrics.jsonl", "events.jsonl", "timing.jsonl"
CHECKPOINTS, TENSORBOARD, FAULTS, LOCK = "checkpoints", "tensorboard", "faults", "lock"
COMPILED, LAST_STEP, PICTURES, MIRROR = (
    "compile-cache", "last-step", "pictures", "mirror.json",
)  # fmt: skip
MODEL, OPTIMIZER, EMA, STATE, MANIFEST = (
    "model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json", "manifest.json",
)  # fmt: skip
"""Files of a checkpoint."""

STEP_NAME = r"step-(\d{8,})"
"""Pattern of `step_name`."""


def step_name(step: int) -> str:
    """Name of what belongs to a step, such as its checkpoint."""
    return f"step-{step:08d}"
