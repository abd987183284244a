"""Routes that tokenize, detokenize and apply templates, in vLLM's and llama.cpp's forms."""
