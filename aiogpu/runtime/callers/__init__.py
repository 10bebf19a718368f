"""Who asks a node for something: its tasks, and programs that have joined it."""
