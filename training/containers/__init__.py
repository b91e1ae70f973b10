"""Containers: the engine, the bases and packages that images are made of, the images, their trial, and Compose."""
