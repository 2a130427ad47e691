"""Compiled code of blocks: kept between runs, and compiled by one rank of a host for all."""
