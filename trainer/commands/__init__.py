"""Commands other than training. They read only committed data of a run folder."""
