"""What tasks print, on its way to a terminal or a log."""
