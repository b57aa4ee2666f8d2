"""Commands that read a run folder; committed things only."""
