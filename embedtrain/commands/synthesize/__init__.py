"""`torchrun -m embedtrain synthesize corpus=PATH output_dir=DIR`: training rows that a language model writes."""
