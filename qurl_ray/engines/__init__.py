"""Engines, which hold a verified copy of the policy and generate from it."""
