"""Values and their shared memory, on the driver's side."""
