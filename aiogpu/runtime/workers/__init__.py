"""Worker processes: slots, messages to and from workers, deaths."""
