"""A module with this name is part of many projects."""

RATE = 0.05
