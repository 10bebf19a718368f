"""What `.remote()` gives, on a loop and in plain code, and how it is waited for."""
