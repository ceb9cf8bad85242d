"""The kinds of evaluation, grouped by what a set consists of: rankings, pairs, labels."""
