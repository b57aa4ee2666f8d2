"""Wave forms in noise: a user's package, trained by `trainer`."""
