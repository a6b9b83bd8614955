"""Samples of images and volumes: pictures by class, volumes with labels, and synthetic phantoms."""
