"""Import and export of weights: Hugging Face, safetensors, torch's files.

Torch-free but for what a separate process unpickles.
"""
