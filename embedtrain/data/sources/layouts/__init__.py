"""Row layouts: which keys hold the query, positives and negatives."""
