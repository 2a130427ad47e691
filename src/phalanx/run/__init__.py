"""One job from start to end: prepare, start or join ranks, train, resume, conclude; trained
models put to use."""
