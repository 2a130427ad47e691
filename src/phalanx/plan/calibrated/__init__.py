"""The time of a step of phalanx's own program on a machine that `phalanx bench` has measured."""
