"""Common mistakes in a training loop, measured, and the lab of docs/lab.md."""
