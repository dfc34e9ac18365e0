"""Answers in, evidence out."""
