"""From data set to batches on the device."""
