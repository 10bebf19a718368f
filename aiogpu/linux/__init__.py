"""What aiogpu asks the Linux kernel: one module for each of its interfaces."""
