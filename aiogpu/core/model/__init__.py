"""Plain data and units that all parts of the scheduler share."""
