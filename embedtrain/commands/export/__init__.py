"""`python -m embedtrain export`: write a checkpoint as a model directory."""
