"""Carry: take a function and its arguments to where they run, bring back what comes."""
