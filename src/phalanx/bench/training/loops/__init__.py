"""A file for each way to train: `train_in_turns(setting, turns)` builds the model in its library's
idiom, and takes a step for each element of `turns`."""
