"""Memory that the driver and its workers share."""
