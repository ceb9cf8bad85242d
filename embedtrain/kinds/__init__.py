"""The kinds of models, a package each."""
