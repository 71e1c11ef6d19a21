"""Helpers of the tests of several folders; helpers of one folder are in that folder."""
