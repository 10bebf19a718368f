"""The kinds of devices that a node can share out, one file a vendor.

Each vendor gives the same four answers, those of `base.Accelerator`: what is it
called, how is it detected, which variable assigns it, which quantities are valid.
A room that knows no tasks: it says which devices there are and never who has them.
"""
