"""Pickling of user objects: arguments, results, functions, exceptions."""
