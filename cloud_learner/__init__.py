"""Runs in the cloud: ingest, buffer, algorithms, trainer, weight publishing, job assignment and the operator page."""
