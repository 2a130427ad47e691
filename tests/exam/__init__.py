"""The exam of `phalanx verify`: bugs planted in the code that it judges, and how many it finds."""
