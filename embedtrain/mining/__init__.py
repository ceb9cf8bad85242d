"""Search of documents for the queries of training rows, shared by `mine` and `filter`."""
