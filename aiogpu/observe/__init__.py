"""What has run on a node: kept in a ring, and written as others read it."""
