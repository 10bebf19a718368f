"""Actors: their classes, handles to them, and pools of them."""
