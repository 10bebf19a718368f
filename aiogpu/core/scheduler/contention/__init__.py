"""Decisions that come up only while tasks wait for what others hold; loaded late."""
