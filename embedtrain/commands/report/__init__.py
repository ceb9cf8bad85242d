"""`python -m embedtrain report`: compare runs on an HTML page."""
