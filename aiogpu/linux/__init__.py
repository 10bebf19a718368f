"""Interfaces of the Linux kernel, one module for each."""
