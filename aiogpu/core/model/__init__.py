"""Plain data and units that all modules of the scheduler share."""
