"""Handles and streams, on an event loop and in plain code, and waiting for them."""
