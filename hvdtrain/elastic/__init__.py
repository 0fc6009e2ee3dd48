"""Elastic jobs: workers come and go while the job continues.."""
