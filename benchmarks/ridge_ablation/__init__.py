"""Which features, targets and row weights make the ridge better: raw readings, then variants."""
