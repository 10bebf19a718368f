"""Objects of the user to bytes and back."""
