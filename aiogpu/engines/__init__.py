"""Carry: take a site and its arguments to where they run, bring back what comes."""
