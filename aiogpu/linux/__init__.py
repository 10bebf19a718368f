"""Interfaces of the Linux kernel, one module each."""
