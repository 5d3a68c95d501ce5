"""Caches: steps in which most of a transformer is left out, because little has changed since the last one.

A cache belongs to one row, that is to one branch of one canvas, so company changes nothing in it.
"""
