"""Write model directories for sentence-transformers, transformers and ONNX, and verify them."""
