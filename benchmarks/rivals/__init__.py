"""Training side by side with other libraries, each in an environment of its own."""
