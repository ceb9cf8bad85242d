"""`python -m embedtrain submit`: run a training as a SLURM job."""
