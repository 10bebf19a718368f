"""The reports of a node: its status, reasons for waiting, metrics, past tasks."""
