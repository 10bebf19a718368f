"""Live worker processes: slots, what they are told and say, how they end."""
