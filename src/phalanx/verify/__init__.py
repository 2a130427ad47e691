"""The judge: does a layout compute what one process computes?"""
