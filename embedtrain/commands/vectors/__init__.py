"""`embedtrain vectors`: a teacher's vectors of all texts of training data, computed once."""
