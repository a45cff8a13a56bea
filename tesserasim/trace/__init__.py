"""What a trace and a mix are, and how they are read and written."""
