"""A task module that raises while it is imported."""

raise RuntimeError("the user's own mistake")
