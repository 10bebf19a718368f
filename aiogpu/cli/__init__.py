"""Tells: the `aiogpu` command. Knows the public interface and nothing below it."""
