"""Classification of noisy wave forms: an example of a user's package."""
