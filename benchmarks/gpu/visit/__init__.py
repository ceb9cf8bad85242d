"""One visit to a GPU, in minutes: checks, a run, speed, losses, search and large models, by their worth."""
