"""`python -m embedtrain evaluate`: measure a model on evaluation sets and MTEB tasks."""
