"""Tests of the shared part of the package: one folder for each folder of `shared/lmpool`."""
