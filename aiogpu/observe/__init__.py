"""What a node shows to users: its status, reasons for waiting, and past tasks."""
