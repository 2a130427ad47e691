"""What the user said: the job, frozen and validated, and the shapes of models. Torch-free."""
