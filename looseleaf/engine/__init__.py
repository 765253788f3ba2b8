"""Requests, scheduler, sampling: continuous batching over packed passes."""
