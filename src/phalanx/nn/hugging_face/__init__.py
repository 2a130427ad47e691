"""Hugging Face models as modules that phalanx trains: built, adapted, sharded and tried."""
